"""docs/reference/promises.md: each promise has tests that are there, and that `make test` runs."""

import ast
import re
from functools import cache

import pytest
from rooms import ROOT

PAGE = (ROOT / "docs" / "reference" / "promises.md").read_text(encoding="utf-8")
PROMISES = re.findall(r"^\| (?!promise|---)(.+) \| (`tests/.+) \|$", PAGE, re.MULTILINE)


@cache
def marks_of_tests(path: str) -> dict[str, list[str]]:
    """Return the decorators of each test in a file, and those that the file gives all of them."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    of_all = [ast.unparse(node.value) for node in assigned]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: of_all + [ast.unparse(mark) for mark in node.decorator_list] for node in functions}


@pytest.mark.parametrize(("promise", "tests"), PROMISES, ids=[promise for promise, _ in PROMISES])
def test_a_promise_has_tests_that_make_test_runs(promise: str, tests: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`: `(test_\w+)`", tests)
    assert named
    for path, name in named:
        assert not {"pytest.mark.slow", "pytest.mark.nccl"} & {*marks_of_tests(path)[name]}, f"{path}: {name}"


def test_all_rows_are_read() -> None:
    assert len(PROMISES) == PAGE.count("\n| ") - 1
