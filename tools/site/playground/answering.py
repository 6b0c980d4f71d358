"""Answer the playground's questions: those of the studio, and the table of a schedule written as a Python function.

The function is run, which the studio's server never does. Here the worker is in the browser of whoever wrote it.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.python_file import table_from_source
from penstock.view.studio import validation
from penstock.view.studio.answers import LIMITS, answer


def answer_json(body: str, report: Callable[[str], object]) -> str:
    """Return the answer to a question, both as JSON; {"error"}, a sentence, if it is refused. `report` is called with progress.

    {"python": text, "ranks": 4, "microbatches": 8, ..} asks for the table that a function makes.
    """
    question = json.loads(body)
    try:
        question = _with_table(question) if "python" in question else question
        result = answer(question, lambda data: report(json.dumps(data)))
    except PenstockError as error:
        result = {"error": str(error)}
    return json.dumps(result, separators=(",", ":"))


def _with_table(question: Mapping[str, Any]) -> dict[str, object]:
    """Return the question with the table that its function makes, in place of the function."""
    ranks, microbatches = (validation.integer(question, name, LIMITS[name]) for name in ("ranks", "microbatches"))
    table = table_from_source("your schedule", question["python"], ranks, microbatches)
    options = {name: value for name, value in question.items() if name not in ("python", "ranks", "microbatches")}
    return {**options, "rows": table.csv_rows(), "placement": list(table.placement), "name": table.name}
