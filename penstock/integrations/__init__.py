"""Other programs' steps: what they recorded of them, as timelines.

`chrome_trace`  events of a Chrome trace, read as a stream
`rank_trace`    what one rank did: its actions, receives and profiler steps
`clocks`        ranks' clocks lined up by their messages
`torch_trace`   the traces of all ranks: a record of measured timelines
"""
