"""Load a schedule by its name, from a CSV file or from a Python file. No torch."""

import difflib
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.schedule import Schedule, build, verify

DEFAULT_RANKS, DEFAULT_MICROBATCHES = 4, 8  # of a schedule that is built


def table_of(name: str, ranks: int | None, microbatches: int | None, **options: int | None) -> Schedule:
    """Build the schedule `name` with the `options` that are not None, or read the CSV file of that name; prove it.

    Without `ranks` or `microbatches`, a table has its own, and a schedule is built for 4 ranks and 8 microbatches.

    Raises PenstockError if it cannot be built or proved, if options are given for a file, and if the file has other numbers.
    """
    if name.endswith(".csv"):
        check_file(name, options)
        table = Schedule.from_csv(name)
        check_size(name, (table.ranks, table.microbatches), ranks, microbatches)
        return table
    if name.endswith(".py"):
        problem = f"{name} would be run, which only `penstock show`, `compare`, `studio` and `train` do"
        raise PenstockError(f"{problem}: let `penstock show {name} --csv mine.csv` write its table, and use that")
    set_options = {option: value for option, value in options.items() if value is not None}
    ranks, microbatches = default_size(ranks, microbatches)
    schedule = build(name, ranks=ranks, microbatches=microbatches, **set_options)
    verify(schedule)
    return schedule


def default_size(ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """Return the numbers of ranks and microbatches that a schedule is built for."""
    return DEFAULT_RANKS if ranks is None else ranks, DEFAULT_MICROBATCHES if microbatches is None else microbatches


def check_size(source: str, size: tuple[int, int], ranks: int | None, microbatches: int | None) -> None:
    """Raise PenstockError if other `ranks` or `microbatches` are given than those of `source`, its `size`."""
    for option, given, own in zip(("ranks", "microbatches"), (ranks, microbatches), size, strict=True):
        if given is not None and given != own:
            raise PenstockError(f"--{option} {given}, but {source} has {own} {option}: leave out --{option}, or give {own}")


def table_from_python(path: str, ranks: int | None, microbatches: int | None, **options: int | None) -> Schedule:
    """Run the Python file `path` and return the table that its function `schedule` makes, not proved.

    Call it only for a path that the user has typed. Raises PenstockError if there is no schedule, and for options.
    """
    from penstock.python_file import table_from_file

    check_file(path, options)
    return table_from_file(path, *default_size(ranks, microbatches))


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
