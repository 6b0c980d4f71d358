"""Other libraries' programs: transformers' Trainer with its model cut over ranks, and recorded steps as timelines.

`transformers`  Trainer and TrainingArguments, which alone import that library
`chrome_trace`  events of a Chrome trace, read as a stream
`trace_marks`   what is kept of a rank's events: ranges, operations, kernels
`rank_trace`    what one rank did: its actions, receives and profiler steps
`clocks`        ranks' clocks lined up by their messages
`trace_causes`  pauses, blocked collectives, and what runs between steps
`torch_trace`   the traces of all ranks: a record of measured timelines
"""
