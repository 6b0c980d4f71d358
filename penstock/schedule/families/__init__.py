"""Families of schedules: one rule a file, its docstring the rule and its source.

`naive`                one microbatch at a time
`gpipe`                all forwards, then all backwards
`one_f_one_b`          a microbatch goes back as soon as it can
`interleaved`          1F1B over several stages a rank
`looped_bfs`           GPipe over several stages a rank
`zero_bubble`          weight gradients fill what would be idle
`zb_v`                 two stages a rank, down and back up, and no bubble
`controllable_memory`  the same shape in half of the memory, or a third
`dualpipe_v`           a forward and a backward at the same time
`two_chunks`           what the rules of two stages a rank count by
"""
