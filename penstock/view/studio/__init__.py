"""The studio: a local page to choose, price, edit, prove and time schedules.

`answers`      answers the page's questions, JSON in and out
`page_costs`   turns the page's costs into `Costs`, and simulates a table at them
`faster_table` searches for a better table
`validation`   checks the values of a question
`worker`       answers questions in other processes, which end when the page no longer waits
`studio_server` serves the page and the answers to this machine; the file that the studio was opened with
`page/`        the scripts and styles of the page
"""
