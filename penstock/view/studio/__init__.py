"""The playground: one local page on which schedules are chosen, priced, edited, proved and timed.

`answers`    what the page asks, as plain data, to what it shows
`costs`      costs as the page has them, and when a table runs at them
`better`     a better table, searched for
`question`   what may stand in a question
`opened`     a file that it was opened with
`worker`     answers from processes of their own, which are ended when nobody waits any more
`server`     the page and its answers over HTTP, for this machine alone
`page/`      what the browser runs
"""
