"""A timeline as JSON data: the one form that files hold and that every picture is drawn from.

    {"format": "penstock timeline 1", "name": "1f1b", "unit": "s", "layers": [],
     "predicted": TIMELINE or null, "steps": [{"label": "step 7", "timeline": TIMELINE}, ..], "usual": 0,
     "verdict": null or {"text": "rank 1 is slow: ..", "basis": "at the medians of 3 steps", "findings": [
                 {"about": "straggler", "text": "rank 1 is slow: ..", "gain": 0.1, "rank": 1,
                  "name": "1f1b, predicted", "timeline": TIMELINE}, ..],
                 "others": {"zb-v": "zb-v (2 stages a rank): 410.2 ms, 3.1% less; a rank holds ..", ..}}}

Times of a TIMELINE count from its first start. For each rank it has the events, the idle times and the memory:

    {"makespan": 9, "bubble": 0.33, ..., "critical_path": ["0F0", ..],
     "ranks": [{"events": [{"action": "1F0", "start": 1, "end": 2, "held": 1, "waited": 1, "waited_for": "0F0",
                            "receives": [{"action": "0F0", "rank": 0, "arrived": 1}]}, ..],
                "idle": [[0, 1, "fill"], ..], "memory": [[1, 1], ..]}, ..]}

`usual` is the index of the step that stands for all: the one of median length. Of an event, `waited` is how long its rank was
idle before it, `waited_for` the action whose message arrived last, `held` the activations on the rank once it has ended, in
`memory_unit`: "bytes", or "" for their number. Measured events also have the time when their output was `sent`. `between` is
how long each rank did other work before the step. Readers of a file use the events alone: they compute all else again, also
the verdict, which says what would make the steps shorter.

`timeline_data`  makes this data from a timeline and its verdict; finds the messages that each event needed
`sums`           for a step too large for a page: shares of each rank's time
"""
