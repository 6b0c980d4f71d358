"""Load a schedule by its name, from a CSV file or from a Python file. No torch."""

import difflib
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.schedule import Schedule, build, verify


def table_of(name: str, ranks: int, microbatches: int, **options: int | None) -> Schedule:
    """Build the schedule `name` with the `options` that are not None, or read the CSV file of that name; prove it.

    Raises PenstockError if it cannot be built or proved, and if options are given for a file.
    """
    if name.endswith(".csv"):
        check_file(name, options)
        return Schedule.from_csv(name)
    if name.endswith(".py"):
        problem = f"{name} would be run, which only `penstock show`, `compare`, `studio` and `train` do"
        raise PenstockError(f"{problem}: let `penstock show {name} --csv mine.csv` write its table, and use that")
    set_options = {option: value for option, value in options.items() if value is not None}
    schedule = build(name, ranks=ranks, microbatches=microbatches, **set_options)
    verify(schedule)
    return schedule


def table_from_python(path: str, ranks: int, microbatches: int, **options: int | None) -> Schedule:
    """Run the Python file `path` and return the table that its function `schedule` makes, not proved.

    Call it only for a path that the user has typed. Raises PenstockError if there is no schedule, and for options.
    """
    from penstock.learn.python_schedule import table_from_file

    check_file(path, options)
    return table_from_file(path, ranks, microbatches)


def question_of(path: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """Return the studio's question for the file `path`: a CSV table, a Python file (which is run), a plan or a timeline."""
    if path.endswith(".py"):
        table = table_from_python(path, ranks, microbatches)
        return {"rows": table.csv_rows(), "placement": table.placement, "name": Path(path).name}
    if not path.endswith((".csv", ".json")):
        raise PenstockError(f"{path} is no table: the studio opens a .csv or a .py file, a plan.json or a run's timeline.json")
    check_file(path, {})
    try:
        return {"csv" if path.endswith(".csv") else "run": Path(path).read_text(encoding="utf-8"), "file": Path(path).name}
    except (OSError, UnicodeError) as error:
        raise PenstockError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def check_file(name: str, options: dict[str, int | None]) -> None:
    """Raise PenstockError if there is no file `name`, or if an option of a family of schedules is given."""
    if set_options := [option for option, value in options.items() if value is not None]:
        raise PenstockError(f"the table {name} is read as it stands: leave out {', '.join(set_options)}")
    if not Path(name).is_file():
        raise PenstockError(f"the table {name} does not exist{nearest_path(Path(name))}")


def nearest_path(path: Path) -> str:
    """Return the end of an error about a wrong `path`: the nearest path that exists, or what to give."""
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [] if path.exists() else names, n=1)
    if near:
        return f" (did you mean {parent / near[0]}?)"
    return ": give another" if path.exists() else ": give a file or folder that does"
