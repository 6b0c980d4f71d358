"""A timeline for people: all pictures and texts come from one plain form, `data/`.

`record`        the timelines of a run's steps, or of a schedule: what every picture is drawn from, and its file
`reading`       records read back from their files
`data/`         a timeline as plain data, and the sums of one that is too large to be listed action by action
`terminal`      a timeline as text, and in numbers
`differences`   two of them in numbers, side by side
`html`          one HTML file that needs nothing else, made of what is in `page/`
`perfetto`      a trace for ui.perfetto.dev
`figure/`       figures for papers, as SVG and PNG
`files`         those pictures written to the files that are asked for
`serving`       HTTP for the browser on this machine and for nobody else
`studio/`       the playground: a local page to choose, price, edit and prove schedules
`watch/`        the page of a run while it runs, and afterwards
"""
