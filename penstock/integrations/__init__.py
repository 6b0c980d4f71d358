"""Other libraries' programs: transformers' Trainer with its model cut over ranks, and timelines from torch.profiler's traces.

`transformers`  Trainer and TrainingArguments; only this folder imports transformers
`chrome_trace`  reads the events of a Chrome trace as a stream
`trace_events`  collects a rank's events that matter: ranges, operations, kernels
`rank_trace`    reads the actions, receives and profiler steps of one rank
`clocks`        aligns ranks' clocks by their messages
`trace_delays`  finds pauses, blocked collectives, and work between steps
`torch_trace`   reads the traces of all ranks into a record of timelines
"""
