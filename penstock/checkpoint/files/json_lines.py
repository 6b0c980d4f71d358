"""A file of JSON, a line for each record of a step: it is continued by a run that goes on, whatever a kill has left of it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.files.disk import errors_as_damaged
from penstock.checkpoint.files.manifest import atomic_replacement


def read(path: Path) -> list[dict[str, Any]]:
    """The records of the file at `path`, of none if there is no file; a line that was not finished is left out.

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
    """Make the file at `path`, in the place of what is there, one of these records."""
    with atomic_replacement(path) as temporary:
        temporary.write_text("".join(json.dumps(record) + "\n" for record in records))


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to the file at `path`; it is there when this returns."""
    with path.open("a") as file:
        print(json.dumps(record), file=file)
