"""The page of a run, for the browser on this machine, while it trains or afterwards.

`live_run`     reads the new lines of a run's metrics
`watch_server` serves the page and the run's state
`page/`        the scripts and styles of the page
"""
