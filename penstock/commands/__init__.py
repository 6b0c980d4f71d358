"""The command line, and the jobs behind it: what was typed is checked in full before anything is started.

`cli`       the list of the commands: finds, parses and runs the one that was typed
`options`   what makes a dataclass a command, and how its options are parsed
`source`    the schedule that a name or a file stands for
`learn`     `penstock lab` and `penstock puzzle`
`show`      `penstock schedules`, `penstock show` and `penstock compare`
`search`    `penstock search`
`plan`      `penstock plan`
`traces`    traces as a record, and `penstock export-costs`
`pages`     `penstock studio` and `penstock watch`
`train/`    `penstock train`: real data, checkpoints, metrics, a comparison with one process
`trained`   `penstock generate`, `penstock eval` and `penstock export`
`text`      text generation and evaluation with a trained GPT over ranks
`audit`     `penstock audit`
`machine/`  `penstock doctor`, `penstock bench steps` and `penstock bench collectives`
"""
