"""The command line, and the jobs behind it: what was typed is checked in full before anything is started.

`cli`      the commands and their options: parses, calls, prints
`options`  how options are typed that may be left out
`source`   the schedule that a name or a CSV file stands for
`show`     `penstock show` and `penstock compare`
`plan`     `penstock plan`
`search`   `penstock search`
`train/`   the main job: real data, checkpoints, metrics, a comparison with one process
`audit`    two runs compared by their digests: the first step, kind and name that differ
`trained`  `penstock generate` and `penstock eval`: their options
`text`     what they do: text and a trained GPT that is cut over ranks
`bench/`   a step against its table, and the collectives over sizes
`puzzle`   `penstock puzzle`
`doctor`   what this machine offers, and what a message costs
"""
