"""The page of a run while it runs, and afterwards: what its folder has, to the browser on this machine.

`growing`  a run's folder, of which only what is new is read
`server`   the page, and what it asks again and again
`page/`    what the browser runs
"""
