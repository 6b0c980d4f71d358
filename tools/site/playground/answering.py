"""What the playground's worker answers: what the studio does, and the table of a schedule written as a Python function.

A function is run, which the studio's server never does: the worker is in the browser of whoever wrote it.
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.learn.written import table_of
from penstock.view.studio import question
from penstock.view.studio.answers import MOST, answer


def answered(body: str) -> str:
    """The answer to a question, both as JSON; a refusal is a sentence. {"python": text, ..} asks for a function's table."""
    asked = json.loads(body)
    try:
        said = answer(_table(asked) if "python" in asked else asked)
    except PenstockError as error:
        said = {"error": str(error)}
    return json.dumps(said, separators=(",", ":"))


def _table(asked: Mapping[str, Any]) -> dict[str, object]:
    """The question for the table that a function makes for so many ranks and microbatches, at the same costs."""
    ranks, microbatches = (question.whole(asked, what, MOST[what]) for what in ("ranks", "microbatches"))
    made = table_of("your schedule", asked["python"], ranks, microbatches)
    others = {name: value for name, value in asked.items() if name not in ("python", "ranks", "microbatches")}
    return {**others, "rows": made.texts(), "placement": list(made.placement), "name": made.name}
