"""docs/reference/errors.md says of each error what the code says."""

import inspect
import re

from rooms import ROOT

import penstock as ps
from penstock import errors

PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
CLASSES = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, ps.PenstockError) and error is not ps.PenstockError
]


def test_the_page_has_every_error_with_the_sentence_of_its_class() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE, re.MULTILINE))
    assert rows == {error.__name__: _lower_first(inspect.getdoc(error) or "").rstrip(".") for error in CLASSES}
    assert {*rows} <= {*ps.__all__}


def test_the_page_says_which_errors_are_others_too() -> None:
    value_errors = [f"`{error.__name__}`" for error in CLASSES if issubclass(error, ValueError)]
    stage_errors = [f"`{error.__name__}`" for error in CLASSES if ps.StageError in error.__bases__]
    assert sorted(re.findall(r"`\w+`", PAGE.partition(" are also `ValueError`s")[0].rpartition("\n")[2])) == sorted(
        value_errors
    )
    assert re.findall(r"(`\w+`) is a `StageError`", PAGE) == stage_errors


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
