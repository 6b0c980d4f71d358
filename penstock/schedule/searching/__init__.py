"""Tables that are searched for: the shortest step within a limit on memory, for any costs of the stages.

`problem`                 the pipeline as a search sees it: actions as numbers, lists of what they cost, send and hold
`initial_tables`          tables to begin with
`periodic`                rows that do the same for every microbatch, one period later
`incremental_simulation`  the rows of a search and when everything in them runs; the loop in which it spends its time
`annealing`               random moves; the more one lengthens the step, the more seldom it is accepted
`bounds`                  lower bounds for the time of any table
`cp_sat`                  the optimum of a small pipeline, by OR-Tools
`search`                  checks the arguments, runs all of the above, returns the best table
"""
