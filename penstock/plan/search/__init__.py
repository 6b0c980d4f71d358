"""The search for tables: the shortest step within a limit on memory, for any costs of the stages.

`problem`                 the pipeline as a search sees it: numbered actions, and lists of what they cost, send and hold
`initial_tables`          tables to begin with
`periodic`                rows that repeat for every microbatch, one period later
`incremental_simulation`  the rows of a search and when their actions run; most of a search's time is spent here
`annealing`               random moves; the more a move lengthens the step, the more rarely it is accepted
`makespan_bounds`         lower bounds on the makespan of any table
`cp_sat`                  the optimum of a small pipeline, by OR-Tools
`table_search`            checks the arguments, runs all of the above, returns the best table
"""
