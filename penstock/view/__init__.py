"""A timeline for people: whatever is drawn or told of it comes from one plain form, the record.

`record`        timelines as plain data: kept in a file, read back, and what every picture is drawn from
`sums`          the same of a step that is too large for a page: where each rank's time went
`messages`      which action of which rank an event needed, and when that arrived
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
