"""The schedule that a name or a CSV file stands for, proved. No torch."""

import difflib
from pathlib import Path

from penstock.errors import PenstockError
from penstock.schedule import Schedule, build, verify


def table_of(name: str, ranks: int, microbatches: int, **options: int | None) -> Schedule:
    """The schedule called `name`, built with those `options` that are not None, or the table in the CSV file of that name.

    It is proved. Raises PenstockError for what cannot be built or proved, and for options of a file.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if not name.endswith(".csv"):
        schedule = build(name, ranks=ranks, microbatches=microbatches, **given)
        verify(schedule)
        return schedule
    if given:
        raise PenstockError(f"the table {name} is read as it stands: leave out {', '.join(given)}")
    if not Path(name).is_file():
        raise PenstockError(f"the table {name} does not exist{nearest_path(Path(name))}")
    return Schedule.from_csv(name)


def nearest_path(path: Path) -> str:
    """The end of a sentence about a `path` that does not exist: the nearest one that does."""
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {parent / near[0]}?)" if near else ": give a file or folder that does"
