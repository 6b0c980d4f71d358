"""A timeline as plain data: the one form that is kept in a file and that every picture is drawn from.

    {"format": "penstock timeline 1", "name": "1f1b", "unit": "s", "layers": [],
     "planned": TIMELINE or null, "steps": [{"label": "step 7", "timeline": TIMELINE}, ..], "usual": 0,
     "verdict": null or {"text": "rank 1 is slow: ..", "basis": "at the medians of 3 steps", "findings": [
                 {"about": "straggler", "text": "rank 1 is slow: ..", "gain": 0.1, "rank": 1,
                  "name": "1f1b, predicted", "timeline": TIMELINE}, ..],
                 "others": {"zb-v": "zb-v (2 stages a rank): 410.2 ms, 3.1% less; a rank holds ..", ..}}}

A TIMELINE counts from its first start, and says of every rank what it ran, why it was idle and what it held:

    {"makespan": 9, "bubble": 0.33, ..., "critical_path": ["0F0", ..],
     "ranks": [{"events": [{"action": "1F0", "start": 1, "end": 2, "held": 1, "waited": 1, "waited_for": "0F0",
                            "receives": [{"action": "0F0", "rank": 0, "arrived": 1}]}, ..],
                "idle": [[0, 1, "fill"], ..], "memory": [[1, 1], ..]}, ..]}

`usual` is the place of the step that stands for all, the middle one by its length. `waited` is how long the rank was idle
before the event, `waited_for` what came last of what it needed from other ranks, `held` what its activations take once it
has ended, in `memory_unit`: "bytes", or "" for activations. Measured events say when what they made was `sent`; `between`
is how long each rank was out of the pipeline before the step. What follows from the events is worked out again when a file
is read, and so is the verdict on a run: what would make its steps shorter.

`timeline`   one timeline as this data, and the verdict on it
`messages`   which action of which rank an event needed, and when that arrived
`sums`       the same of a step that is too large for a page: where each rank's time went
"""
