"""A file with one JSON record of a step in each line. A resumed run appends to it, even if a kill left a line unfinished."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.files.disk import errors_as_damaged
from penstock.checkpoint.files.manifest import atomic_replacement


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records in the file at `path`, without an unfinished last line; an empty list if there is no file.

    Raises DamagedFileError for a line that is no record of a step.
    """
    if not path.exists():
        return []
    with errors_as_damaged(
        path, "is damaged, it has a line that is no record of a step: put the file elsewhere to go on without it"
    ):
        records = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if not all(isinstance(record["step"], int) for record in records):
            raise ValueError
        return records


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file at `path` by one with these `records`."""
    with atomic_replacement(path) as temporary:
        temporary.write_text("".join(json.dumps(record) + "\n" for record in records))


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append `record` to the file at `path`, and close the file."""
    with path.open("a") as file:
        print(json.dumps(record), file=file)
