"""Other libraries' programs: transformers' Trainer with its model cut over ranks, and recorded steps as timelines.

`transformers`  Trainer and TrainingArguments, which alone import that library
`chrome_trace`  events of a Chrome trace, read as a stream
`rank_trace`    what one rank did: its actions, receives and profiler steps
`clocks`        ranks' clocks lined up by their messages
`torch_trace`   the traces of all ranks: a record of measured timelines
"""
