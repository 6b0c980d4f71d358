"""Puzzles: a stub with a story, a target in numbers, and a check that says what is wrong and shows the picture.

`book`    the puzzles in their order; the learner's files, hints and progress
`judge`   what checks stand on: how answers are printed, tables, ranks that run the learner's code
`p01_..`  one puzzle a file: its docstring is the story, what is marked `yours` is the solution, and what the learner is
          given has `...` in its place; then hints, an explanation, and the check
"""
