"""The course: pipeline parallelism built by hand, from one process to schedules of your own and all axes of parallelism.

`mini`             pipeline parallelism in one file, to be read first: runs any table on plain torch.distributed
`middle`           the same with what a step needs first: agreement, receives posted ahead, one failure for all ranks
`labs/`            scripts that explain an idea, check themselves and print what they measured
`lab_list`         lists and runs the labs
`lab_helpers`      functions of all labs: run on ranks, print once, check
`puzzles/`         exercises: a file to complete, a target in numbers, a check
`devices`          stages that sleep instead of computing, and steps on them; a limit for a process's memory
`buckets`          data parallelism with gradient buckets that are averaged during the backward
`collectives`      collectives made of sends and receives
`timeline_parts`   draws a timeline with room for every action's name
`equal_stages`     simulates a table whose ranks have equal work
"""
