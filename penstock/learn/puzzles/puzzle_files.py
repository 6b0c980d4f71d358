"""List the puzzles, and keep the learner's folder: files to complete, hints shown, progress."""

import ast
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, load_file
from penstock.python_file import USER_CODE_ERRORS, one_line_error_of_file

PUZZLE_NAMES = (
    "p01_cut_by_hand", "p02_memory", "p03_swap", "p04_naive", "p05_mean_of_means", "p06_gpipe", "p07_bubble", "p08_cycle",
    "p09_1f1b", "p10_1f1b_loop", "p11_interleaved", "p12_split_linear", "p13_zb_h1", "p14_in_a_v", "p15_memory_budget",
    "p16_all_reduce", "p17_tensor_parallel", "p18_fsdp", "p19_recompute", "p20_open",
    "p21_slices",
)  # fmt: skip
PUZZLE_NUMBERS = range(1, len(PUZZLE_NAMES) + 1)
FAST_TRACK = (6, 9, 10, 12, 13, 15, 20)  # for readers who know pipelines
PROGRESS_FILE = "progress.json"


class Puzzle(NamedTuple):
    """One puzzle: texts of its file, and its check."""

    number: int
    name: str
    statement: str
    stub: str  # text of the learner's file, with `...` for the solution
    solution: str  # text of that file when solved
    hints: tuple[str, ...]
    explanation: str
    check: Callable[[Any], CheckPassed]

    @property
    def title(self) -> str:
        """Return the first line of the statement."""
        return self.statement.partition("\n")[0].rstrip(".")


def load_puzzle(number: int) -> Puzzle:
    """Return puzzle `number`. Raises PenstockError if there is none."""
    if number not in PUZZLE_NUMBERS:
        raise PenstockError(f"there is no puzzle {number}: choose from 1 to {PUZZLE_NUMBERS[-1]}")
    name = PUZZLE_NAMES[number - 1]
    module = importlib.import_module(f"penstock.learn.puzzles.{name}")
    source = inspect.getsource(module)
    return Puzzle(
        number,
        name,
        inspect.getdoc(module) or "",
        _learner_file(source, with_solution=False),
        _learner_file(source, with_solution=True),
        module.HINTS,
        module.EXPLANATION,
        module.check,
    )


def _learner_file(source: str, with_solution: bool) -> str:
    """Reduce a puzzle's module to its statement, the solution (or `...` in its place) and the imports that it uses."""
    lines, nodes = source.splitlines(), ast.parse(source).body
    solution_nodes = [node for node in nodes if _is_solution(node, lines)]
    names = {name.id for node in solution_nodes for name in ast.walk(node) if isinstance(name, ast.Name)} - {"solution"}
    texts = [_learner_text(node, lines, names, with_solution) for node in nodes]
    return "\n".join(text for text in texts if text) + "\n"


def _is_solution(node: ast.stmt, lines: list[str]) -> bool:
    """Return whether the learner writes this: a function marked `@solution`, or an assignment with `# solution`."""
    if isinstance(node, ast.FunctionDef):
        return any(isinstance(decorator, ast.Name) and decorator.id == "solution" for decorator in node.decorator_list)
    return isinstance(node, ast.Assign) and lines[node.lineno - 1].endswith("# solution")


def _learner_text(node: ast.stmt, lines: list[str], names: set[str], with_solution: bool) -> str:
    """Return the text of `node` in the learner's file, empty if it is left out. Imports stay if they have one of `names`."""
    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    if isinstance(node, ast.Expr):
        return text + "\n"
    if isinstance(node, ast.Import | ast.ImportFrom):
        return text if names & {name.asname or name.name for name in node.names} else ""
    if not _is_solution(node, lines):
        return ""
    if isinstance(node, ast.Assign):
        name = ast.unparse(node.targets[0])
        return "\n" + (text.removesuffix("  # solution") if with_solution else f"{name} = ...  # your answer")
    assert isinstance(node, ast.FunctionDef)
    docstring = node.body[0]
    head = lines[node.lineno - 1 : docstring.end_lineno]
    body = lines[docstring.end_lineno or 0 : node.end_lineno] if with_solution else ["    ...  # your code"]
    return "\n\n" + "\n".join([*head, *body])


class LearnerFolder:
    """A learner's folder: a file for each begun puzzle, which is never overwritten, and the progress."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, puzzle: Puzzle) -> Path:
        """Return the path of the learner's file of a puzzle."""
        return self.path / f"{puzzle.name}.py"

    def write_stub(self, puzzle: Puzzle) -> bool:
        """Write the stub, unless the file exists. Return whether it was require_answer."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with self.file(puzzle).open("x", encoding="utf-8") as file:
                file.write(puzzle.stub)
        except FileExistsError:
            return False
        return True

    def check(self, puzzle: Puzzle) -> CheckPassed:
        """Check the learner's file, and record that the puzzle is passed. Raises CheckFailed if it is not."""
        path = self.file(puzzle)
        try:
            result = puzzle.check(load_file(path))
        except CheckFailed:
            raise
        except USER_CODE_ERRORS as error:
            raise CheckFailed(one_line_error_of_file(error, path)) from error
        self._write({**self.progress(), "passed": sorted({*self.passed(), puzzle.number})})
        return result

    def hint(self, puzzle: Puzzle) -> str:
        """Return the next hint, with its number; after the last hint the last one again."""
        num_shown = self.progress()["hints"].get(str(puzzle.number), 0)
        number = min(num_shown, len(puzzle.hints) - 1)
        hints = self.progress()["hints"] | {str(puzzle.number): number + 1}
        self._write({**self.progress(), "hints": hints})
        return f"hint {number + 1} of {len(puzzle.hints)}: {puzzle.hints[number]}"

    def reset(self, puzzle: Puzzle) -> Path | None:
        """Rename the learner's file, and write a new stub. Return the old file's new path, None if there was no file."""
        path, backup = self.file(puzzle), None
        if path.exists():
            numbers = (number for number in range(1, 10_000) if not path.with_suffix(f".{number}.bak").exists())
            backup = path.with_suffix(f".{next(numbers)}.bak")
            path.rename(backup)
        self.write_stub(puzzle)
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
        """Return the first unsolved puzzle after number `after`, else the first unsolved one; None if all are passed."""
        unsolved = [number for number in (FAST_TRACK if fast else PUZZLE_NUMBERS) if number not in self.passed()]
        return next((number for number in unsolved if number > after), unsolved[0] if unsolved else None)

    def progress(self) -> dict[str, Any]:
        """Return the recorded progress: passed puzzles, and hints shown."""
        path = self.path / PROGRESS_FILE
        try:
            saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            hints = {number: int(count) for number, count in saved.get("hints", {}).items()}
            return {"passed": [int(number) for number in saved.get("passed", [])], "hints": hints}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise PenstockError(f"{path} cannot be read ({error}): delete it to begin anew") from error

    def _write(self, progress: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / PROGRESS_FILE).write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")
