"""The command line and its jobs. All options are checked before anything is started.

`cli`       lists the commands; parses and runs the typed one
`command_options` makes a dataclass a command, and parses its options
`source`    loads the schedule of a name or file
`learn`     `penstock lab` and `penstock puzzle`
`show`      `penstock schedules`, `penstock show` and `penstock compare`
`search`    `penstock search`
`plan`      `penstock plan`
`traces`    loads traces as a record; `penstock export-costs`
`pages`     `penstock studio` and `penstock watch`
`train/`    `penstock train`: real data, checkpoints, metrics, a comparison with one process
`trained_model`  `penstock generate`, `penstock eval` and `penstock export`
`text`      text generation and evaluation with a trained GPT over ranks
`audit`     `penstock audit`
`machine/`  `penstock doctor`, `penstock bench steps` and `penstock bench collectives`
"""
