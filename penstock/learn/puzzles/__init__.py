"""Puzzles: exercises with a file to complete, a target in numbers, and a check that says what is wrong and draws the table.

`puzzle_files`   lists the puzzles; the learner's folder: files, hints shown, progress
`check_helpers`  functions of all checks: load the learner's file, build its tables, run it on ranks, compare
`tools`          messages and collectives for the learner's code
`p01_..`         one puzzle: its docstring is the statement, functions marked `@solution` are the solution, whose bodies the
                 learner's file leaves out; then hints, an explanation, and the check
"""
