"""The studio: a local page to choose, price, edit, prove and time schedules.

`answers`      answers the page's questions, JSON in and out
`costs`        turns the page's costs into `Costs`, and simulates a table at them
`search`       searches for a better table
`validation`   checks the values of a question
`opened_file`  the file that the studio was opened with
`worker`       answers questions in other processes, which end when the page no longer waits
`server`       serves the page and the answers to this machine
`page/`        the scripts and styles of the page
"""
