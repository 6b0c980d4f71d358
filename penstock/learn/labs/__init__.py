"""The labs. Each is a script that explains one idea, checks itself, and ends with what it measured.

`lab1_` to `lab3_`     one process; a cut by hand and the memory wall; two processes and a message
`lab4_` to `lab8_`     the schedules, each less idle or smaller than the last: naive, GPipe, 1F1B, interleaved, zero bubble
`lab9_`                a schedule of your own, written into a copy of `my_schedule`
`lab10_` to `lab13_`   the other axes: collectives, data parallel, tensor parallel, two axes at once
`lab14_`, `lab15_`     less memory: recompute, store or communicate an activation; replicas that shard their weights (FSDP)
`lab16_`               PyTorch's tutorial: a transformer cut by hand and by tracing
`lab17_`, `lab18_`     what a link is worth, how to time it, and how to hide it
`lab19_`, `lab20_`     tokens of a sequence spread over ranks; a pipeline that never drains, which Penstock does not offer
`lab21_`               rows of unequal lengths: which share a microbatch, and in which order these run
`lab22_`               a second, frozen model whose forwards run in the idle time
"""
