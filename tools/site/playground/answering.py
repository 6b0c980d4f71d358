"""What the playground's worker answers: what the studio does, and the table of a schedule written as a Python function.

A function is run, which the studio's server never does: the worker is in the browser of whoever wrote it.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.learn.python_schedule import table_from_source
from penstock.view.studio import question
from penstock.view.studio.answers import MOST, answer


def answered(body: str, tell: Callable[[str], object]) -> str:
    """The answer to a question, both as JSON, as is what `tell` is told on the way; a refusal is a sentence.

    {"python": text, "ranks": 4, "microbatches": 8, ..} asks for the table that a function makes.
    """
    asked = json.loads(body)
    try:
        said = answer(_table(asked) if "python" in asked else asked, lambda data: tell(json.dumps(data)))
    except PenstockError as error:
        said = {"error": str(error)}
    return json.dumps(said, separators=(",", ":"))


def _table(asked: Mapping[str, Any]) -> dict[str, object]:
    """The question for the table that a function makes for so many ranks and microbatches, at the same costs."""
    ranks, microbatches = (question.whole(asked, what, MOST[what]) for what in ("ranks", "microbatches"))
    made = table_from_source("your schedule", asked["python"], ranks, microbatches)
    others = {name: value for name, value in asked.items() if name not in ("python", "ranks", "microbatches")}
    return {**others, "rows": made.csv_rows(), "placement": list(made.placement), "name": made.name}
