"""The playground: one local page on which schedules are chosen, priced, edited, proved and timed.

`answers` turns what the page asks into what it shows, `server` carries both over HTTP, `page/` is what the browser runs.
"""

from penstock.view.studio.answers import answer

__all__ = ["answer"]
