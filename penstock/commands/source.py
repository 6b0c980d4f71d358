"""The schedule that a name, a CSV file or a Python file stands for. No torch."""

import difflib
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.schedule import Schedule, build, verify


def table_of(name: str, ranks: int, microbatches: int, **options: int | None) -> Schedule:
    """The schedule called `name`, built with those `options` that are not None, or the table in the CSV file of that name.

    It is proved. Raises PenstockError for what cannot be built or proved, and for options of a file.
    """
    if name.endswith(".csv"):
        _check_file(name, options)
        return Schedule.from_csv(name)
    if name.endswith(".py"):
        told = f"{name} would be run, which only `penstock show` and `penstock compare` do"
        raise PenstockError(f"{told}: let `penstock show {name} --csv mine.csv` write its table, and use that")
    given = {option: value for option, value in options.items() if value is not None}
    schedule = build(name, ranks=ranks, microbatches=microbatches, **given)
    verify(schedule)
    return schedule


def table_written_in(path: str, ranks: int, microbatches: int, **options: int | None) -> Schedule:
    """The table that a function in the Python file `path` makes, not yet proved.

    The file is run: only for a path that the user has typed. Raises PenstockError for what is no schedule, and for options.
    """
    from penstock.learn.written import table_in

    _check_file(path, options)
    return table_in(path, ranks, microbatches)


def question_of(path: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """What the studio is asked to show the table in the CSV or Python file `path`, which is run, proved or not; or a plan."""
    if path.endswith(".py"):
        made = table_written_in(path, ranks, microbatches)
        return {"rows": made.texts(), "placement": made.placement, "name": Path(path).name}
    if not path.endswith((".csv", ".json")):
        raise PenstockError(f"{path} is no table: the studio opens a .csv or a .py file, a plan.json or a run's timeline.json")
    _check_file(path, {})
    try:
        return {"csv" if path.endswith(".csv") else "run": Path(path).read_text(encoding="utf-8"), "file": Path(path).name}
    except (OSError, UnicodeError) as error:
        raise PenstockError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _check_file(name: str, options: dict[str, int | None]) -> None:
    """Raise PenstockError unless there is a file `name`, and no option is given that belongs to a family of schedules."""
    if given := [option for option, value in options.items() if value is not None]:
        raise PenstockError(f"the table {name} is read as it stands: leave out {', '.join(given)}")
    if not Path(name).is_file():
        raise PenstockError(f"the table {name} does not exist{nearest_path(Path(name))}")


def nearest_path(path: Path) -> str:
    """The end of a sentence about a `path` that is none or does not exist: the nearest one that does."""
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [] if path.exists() else names, n=1)
    if near:
        return f" (did you mean {parent / near[0]}?)"
    return ": give another" if path.exists() else ": give a file or folder that does"
