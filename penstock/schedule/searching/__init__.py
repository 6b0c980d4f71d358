"""Tables that are searched for: the shortest step within a limit on memory, for any costs of the stages.

`machine`    what a search knows of a pipeline: numbers for actions, flat lists of what they cost, send and hold
`position`   rows of numbers and when everything in them runs; the loop that a search spends its time in
`annealing`  moves tried at random, those that lengthen the step ever more seldom taken
`starts`     rows to begin with
`wheel`      rows that do the same for every microbatch
`bounds`     what no table can be shorter than
`proving`    small pipelines to the end, by OR-Tools
`search`     what is asked for, checked, all of it together, and what is found
"""
