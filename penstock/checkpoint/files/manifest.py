"""A checkpoint's folder: what must be in it, byte for byte, and which folders there are.

`step-00000120/manifest.json` names every file with its size and SHA-256 and carries its own SHA-256. Of a file in memory, where
checkpoints are to be quick, it is the CRC-32. A folder is written as `.step-00000120.part` and renamed when all of it is on the
disk, so a name without a dot is a whole checkpoint, unless it was damaged since.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.checkpoint.files import schema
from penstock.checkpoint.files.disk import CHECKSUMS, NAMES, Damaged, in_memory, opened, reading, sync
from penstock.errors import MismatchError

NAME = "manifest.json"
FORMAT = "penstock checkpoint 1"
_FOLDER = re.compile(r"step-([0-9]+)|\.step-([0-9]+)\.old")
LARGEST = 2**28  # bytes of a manifest
_whole: set[Path] = set()  # what this process has written, or has read to the last byte


def folder_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step whose checkpoint a folder of this name is; None for other folders."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1] or match[2]) if match else None


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, whole or not; one that was set aside to be replaced comes after its replacement."""
    found = [(step, path.name[0] != ".", path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    return [path for _, _, path in sorted(found, reverse=True)]


# -- one checkpoint -----------------------------------------------------------------------------------------------------


def entry(path: Path, checksum: str = "sha256") -> dict[str, Any]:
    """What a manifest says of the file at `path`: its bytes and its checksum."""
    with reading(path, ""), opened(path) as file:
        return {checksum: hashlib.file_digest(file, CHECKSUMS[checksum]).hexdigest(), "bytes": file.tell()}


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest of `folder`; it, and with it the folder, is on the disk afterwards if the folder is on one.

    Raises MismatchError if it would not be read again.
    """
    content = {"format": FORMAT, **content}
    try:
        schema.check(content)
    except ValueError as error:
        raise MismatchError(f"a checkpoint cannot keep this state: {error}") from error
    data = _encoded(content, indent=None if in_memory(folder) else 1)
    if len(data) > LARGEST:
        raise MismatchError(f"a checkpoint's {NAME} has at most {LARGEST} bytes, and this state takes {len(data)}: use tensors")
    (folder / NAME).write_bytes(data)
    sync(folder / NAME)
    sync(folder)


def _encoded(content: dict[str, Any], indent: int | None = 1) -> bytes:
    """The bytes of a manifest: indented to be read on a disk, in one line where that takes too long."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({"sha256": digest, **content}, indent=indent).encode()


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`. Raises Damaged if it is not what was written, or not what a manifest says."""
    path = folder / NAME
    if folder.is_symlink():
        raise Damaged(f"{folder} is a link, and a checkpoint is a folder: give what it leads to, if that is what you mean")
    with reading(path, "is damaged: its bytes do not have the SHA-256 they had when they were written"), opened(path) as file:
        data = file.read(LARGEST + 1)
        content = json.loads(data)
        del content["sha256"]
        if data not in (_encoded(content), _encoded(content, indent=None)):
            raise ValueError
    if content.get("format") != FORMAT:
        raise Damaged(f"{path} is a {content.get('format')!r}, and this Penstock reads a {FORMAT!r}: use the one that wrote it")
    content.setdefault("settings", {})
    try:
        schema.check(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} does not say what a manifest says: {error}") from error
    return content


def check(folder: Path, files: dict[str, Any], rank: int = 0, ranks: int = 1) -> None:
    """Compare this rank's share of the files of `folder` with the manifest's `files`. Raises Damaged, naming the file."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in files:
            raise Damaged(f"{path} does not belong to the checkpoint: its {NAME} does not name it")
    for name, expected in list(files.items())[rank::ranks]:
        (checksum,) = expected.keys() - {"bytes"}
        found = entry(folder / name, checksum)
        if found != expected:
            counts = f"{found['bytes']} bytes are not the {expected['bytes']}"
            raise Damaged(f"{folder / name} is damaged: by their {NAMES[checksum]} its {counts} that were written")


def known_whole(folder: Path) -> None:
    """Remember that `folder` is whole."""
    _whole.add(folder.resolve())


def _is_whole(folder: Path) -> bool:
    if folder.resolve() not in _whole:
        try:
            check(folder, read(folder)["files"])
        except Damaged:
            return False
        known_whole(folder)
    return True


# -- putting into place, and away ---------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Delete a folder and all in it, or whatever else is at `path`; a link is deleted, and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def delete_left_overs(folder: Path) -> None:
    """Delete what broken saves have left in `folder`."""
    set_aside = [old for old in folder.glob(".step-*.old") if (folder / old.name[1:-4]).exists()]
    for left in [*folder.glob(".step-*.part"), *set_aside]:
        remove(left)


def put_in_place(part: Path, final: Path) -> None:
    """Call `part` `final`; a checkpoint of that name is set aside until that is done."""
    aside = final.with_name(f".{final.name}.old")
    if os.path.lexists(final):
        remove(aside)
        os.rename(final, aside)
    os.rename(part, final)
    sync(final.parent)
    remove(aside)
    known_whole(final)


def prune(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to `step`, delete those older than the last `keep` whole ones."""
    kept = 0
    for old in newest_first(folder):
        if int(step_of(old) or 0) > step:
            continue
        if kept < keep:
            kept += _is_whole(old)
        else:
            away = folder / f".{old.name.strip('.')}.part"  # no longer a checkpoint, from one moment to the next
            remove(away)
            os.rename(old, away)
            remove(away)
            _whole.discard(old.resolve())


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; when that is done and on the disk, it takes the place of `path`."""
    beside = path.with_name(f".{path.name}.part")
    remove(beside)  # it may lead elsewhere
    try:
        yield beside
        sync(beside)
        os.replace(beside, path)
        sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)
