"""The puzzles in their order, and a learner's folder of them: files that are handed out once, hints, progress."""

import ast
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.learn.puzzles.judge import Missed, Passed, fault, loaded
from penstock.learn.python_schedule import USER_CODE_ERRORS

NAMES = (
    "p01_cut_by_hand", "p02_memory", "p03_swap", "p04_mean_of_means", "p05_naive", "p06_gpipe", "p07_bubble", "p08_circle",
    "p09_1f1b", "p10_1f1b_loop", "p11_interleaved", "p12_split_linear", "p13_zb_h1", "p14_in_a_v", "p15_memory_budget",
    "p16_all_reduce", "p17_tensor_parallel", "p18_fsdp", "p19_recompute", "p20_open",
    "p21_slices",
)  # fmt: skip
FAST_TRACK = (6, 9, 10, 12, 13, 15, 20)  # for those who know the rest
PROGRESS = "progress.json"


class Puzzle(NamedTuple):
    """One puzzle."""

    number: int
    name: str
    story: str
    stub: str  # what the learner is given
    solution: str  # what it becomes
    hints: tuple[str, ...]
    explanation: str
    check: Callable[[Any], Passed]

    @property
    def title(self) -> str:
        """The first line of the story."""
        return self.story.partition("\n")[0].rstrip(".")


def puzzle(number: int) -> Puzzle:
    """The puzzle of this number. Raises PenstockError where there is none."""
    if not 1 <= number <= len(NAMES):
        raise PenstockError(f"there is no puzzle {number}: choose from 1 to {len(NAMES)}")
    name = NAMES[number - 1]
    module = importlib.import_module(f"penstock.learn.puzzles.{name}")
    source = inspect.getsource(module)
    story = inspect.getdoc(module) or ""
    return Puzzle(
        number,
        name,
        story,
        _given(source, with_solution=False),
        _given(source, with_solution=True),
        module.HINTS,
        module.EXPLANATION,
        module.check,
    )


def _given(source: str, with_solution: bool) -> str:
    """A puzzle's file without hints and check: story, imports it needs, and what is `yours`, with or without the bodies."""
    lines, nodes = source.splitlines(), ast.parse(source).body
    names = {value.id for node in nodes if _is_yours(node, lines) for value in ast.walk(node) if isinstance(value, ast.Name)}
    parts = [_part(node, lines, names - {"yours"}, with_solution) for node in nodes]
    return "\n".join(part for part in parts if part) + "\n"


def _is_yours(node: ast.stmt, lines: list[str]) -> bool:
    """Whether the learner is to write it: a function that is marked so, or what stands behind an `=` with that comment."""
    if isinstance(node, ast.FunctionDef):
        return any(isinstance(value, ast.Name) and value.id == "yours" for value in node.decorator_list)
    return isinstance(node, ast.Assign) and lines[node.lineno - 1].endswith("# yours")


def _part(node: ast.stmt, lines: list[str], names: set[str], with_solution: bool) -> str:
    """What the learner gets of a statement; of imports those of the `names` that a solution uses."""
    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    if isinstance(node, ast.Expr):
        return text + "\n"
    if isinstance(node, ast.Import | ast.ImportFrom):
        return text if names & {name.asname or name.name for name in node.names} else ""
    if not _is_yours(node, lines):
        return ""
    if isinstance(node, ast.Assign):
        name = ast.unparse(node.targets[0])
        return "\n" + (text.removesuffix("  # yours") if with_solution else f"{name} = ...  # your answer")
    assert isinstance(node, ast.FunctionDef)
    docstring = node.body[0]  # its docstring
    head = lines[node.lineno - 1 : docstring.end_lineno]
    body = lines[docstring.end_lineno or 0 : node.end_lineno] if with_solution else ["    ...  # your code"]
    return "\n\n" + "\n".join([*head, *body])


class Folder:
    """A learner's folder: a file for each puzzle that was begun, never overwritten, and what was passed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, puzzle: Puzzle) -> Path:
        """Return the path of the learner's file of a puzzle."""
        return self.path / f"{puzzle.name}.py"

    def hand_out(self, puzzle: Puzzle) -> bool:
        """Write the stub, unless the file exists. Return whether it was written."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with self.file(puzzle).open("x", encoding="utf-8") as file:
                file.write(puzzle.stub)
        except FileExistsError:
            return False
        return True

    def check(self, puzzle: Puzzle) -> Passed:
        """Check the learner's file, and record the puzzle as passed. Raises Missed."""
        path = self.file(puzzle)
        try:
            result = puzzle.check(loaded(path))
        except Missed:
            raise
        except USER_CODE_ERRORS as error:
            raise Missed(fault(error, path)) from error
        self._write({**self.progress(), "passed": sorted({*self.passed(), puzzle.number})})
        return result

    def hint(self, puzzle: Puzzle) -> str:
        """Return the next hint; after all of them the last one again."""
        num_shown = self.progress()["hints"].get(str(puzzle.number), 0)
        number = min(num_shown, len(puzzle.hints) - 1)
        hints = self.progress()["hints"] | {str(puzzle.number): number + 1}
        self._write({**self.progress(), "hints": hints})
        return f"hint {number + 1} of {len(puzzle.hints)}: {puzzle.hints[number]}"

    def reset(self, puzzle: Puzzle) -> Path | None:
        """Rename the learner's file, and hand out a new one. Return the path of the old file."""
        path, backup = self.file(puzzle), None
        if path.exists():
            numbers = (number for number in range(1, 10_000) if not path.with_suffix(f".{number}.bak").exists())
            backup = path.with_suffix(f".{next(numbers)}.bak")
            path.rename(backup)
        self.hand_out(puzzle)
        return backup

    def solution(self, puzzle: Puzzle) -> str:
        """Return the solution with its explanation. Raises PenstockError if the puzzle has not been passed."""
        if puzzle.number not in self.passed():
            raise PenstockError(
                f"the solution of puzzle {puzzle.number} is shown once yours has passed: penstock puzzle {puzzle.number}"
            )
        return f"{puzzle.solution}\n{puzzle.explanation}"

    def passed(self) -> set[int]:
        """Return the numbers of the passed puzzles."""
        return set(self.progress()["passed"])

    def next(self, fast: bool = False, after: int = 0) -> int | None:
        """Return the first puzzle after `after` that has not been passed, else the first of all; None if all are passed."""
        unsolved = [number for number in (FAST_TRACK if fast else range(1, len(NAMES) + 1)) if number not in self.passed()]
        return next((number for number in unsolved if number > after), unsolved[0] if unsolved else None)

    def progress(self) -> dict[str, Any]:
        """Return the recorded progress: passed puzzles, and hints shown."""
        path = self.path / PROGRESS
        try:
            saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            hints = {number: int(count) for number, count in saved.get("hints", {}).items()}
            return {"passed": [int(number) for number in saved.get("passed", [])], "hints": hints}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise PenstockError(f"{path} cannot be read ({error}): delete it to begin anew") from error

    def _write(self, progress: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / PROGRESS).write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")
