"""What a step of each schedule takes when it runs: writes docs/schedules/measured.json, which the gallery shows.

    python tools/site/steps.py        # a minute or two, on a quiet machine

Four ranks are emulated devices: each sleeps 10 ms for F, for I and for W of a microbatch. The fastest of some steps counts.
"""

import json
from pathlib import Path

import penstock as ps
from penstock.learn.devices import emulated_step

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "schedules" / "measured.json"
RANKS, COUNTS, SECONDS = 4, (4, 8, 16), 0.01


def measured() -> dict[str, dict[int, float]]:
    """By schedule and number of microbatches: the makespan, in units of F. Every rank calls it."""
    build, names = ps.schedule.build, ps.schedule.names()
    return {
        name: {
            count: round(emulated_step(build(name, RANKS, count), SECONDS, SECONDS, SECONDS).makespan / SECONDS, 2)
            for count in COUNTS
        }
        for name in names
    }


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(ps.launch(measured, RANKS)[0], indent=1) + "\n", encoding="utf-8")
