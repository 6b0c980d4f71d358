"""Timelines as pictures, texts and pages, all drawn from one form of JSON data.

`record`        timelines of a run's steps, or of a schedule; every picture is drawn from one
`reading`       reads records from files
`data/`         a timeline as JSON data
`terminal`      a timeline as text, and in numbers
`differences`   compares two timelines in numbers
`html`          one HTML file, made from the files in `page/`
`perfetto`      a trace for ui.perfetto.dev
`figure/`       figures for papers, as SVG and PNG
`notebook`      the picture that a notebook shows of a schedule, a timeline or a plan
`files`         writes pictures to files
`local_server`  serves HTTP to the browser on this machine only
`studio/`       a local page to choose, price, edit and prove schedules
`watch/`        the page of a run, while it trains and afterwards
"""
