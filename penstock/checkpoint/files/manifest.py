"""A checkpoint's folder: its manifest of sizes and checksums, its name, its replacement and deletion.

`step-00000120/manifest.json` lists every file with its size and SHA-256, and has its own SHA-256. Files in memory have a
CRC-32, which is faster. A folder is written as `.step-00000120.part`, and renamed once all of it is on the disk. So a folder
whose name begins without a dot is a complete checkpoint, unless it was damaged since.
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
from penstock.checkpoint.files.disk import (
    CHECKSUM_CLASSES,
    CHECKSUM_TITLES,
    DamagedFileError,
    errors_as_damaged,
    fsync,
    is_in_memory,
    open_regular_file,
)
from penstock.errors import MismatchError

MANIFEST_FILE = "manifest.json"
FORMAT = "penstock checkpoint 2"
FORMAT_OF_ONE_OPTIMIZER = "penstock checkpoint 1"  # until 0.2: one optimizer and one scheduler, or None
_FOLDER_PATTERN = re.compile(r"step-([0-9]+)|\.step-([0-9]+)\.old")
MAX_MANIFEST_BYTES = 2**28
_verified_folders: set[Path] = set()  # checkpoints that this process has written, or whose checksums it has compared


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint: `step-00000120`."""
    return f"step-{step:08d}"


def step_of_folder(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for other folders."""
    match = _FOLDER_PATTERN.fullmatch(folder.name)
    return int(match[1] or match[2]) if match else None


def all_checkpoints_newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, damaged ones too, the newest first; a replaced one comes after its replacement."""
    checkpoints = [(step, path.name[0] != ".", path) for path in folder.iterdir() if (step := step_of_folder(path)) is not None]
    return [path for _, _, path in sorted(checkpoints, reverse=True)]


# -- one checkpoint -----------------------------------------------------------------------------------------------------


def file_entry(path: Path, checksum: str = "sha256") -> dict[str, Any]:
    """Return the manifest's entry for the file at `path`: its size in bytes and its checksum."""
    with errors_as_damaged(path, ""), open_regular_file(path) as file:
        return {checksum: hashlib.file_digest(file, CHECKSUM_CLASSES[checksum]).hexdigest(), "bytes": file.tell()}


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest of `folder`, and sync both to the disk.

    Raises MismatchError for `content` that `read` would refuse.
    """
    content = {"format": FORMAT, **content}
    try:
        schema.validate_and_list_tensors(content)
    except ValueError as error:
        raise MismatchError(f"a checkpoint cannot keep this state: {error}") from error
    data = _encode(content, indent=None if is_in_memory(folder) else 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise MismatchError(
            f"a checkpoint's {MANIFEST_FILE} has at most {MAX_MANIFEST_BYTES} bytes, and this state takes {len(data)}: "
            "use tensors"
        )
    (folder / MANIFEST_FILE).write_bytes(data)
    fsync(folder / MANIFEST_FILE)
    fsync(folder)


def _encode(content: dict[str, Any], indent: int | None = 1) -> bytes:
    """Return the bytes of a manifest. `indent`: spaces; None, for one line, is faster."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({"sha256": digest, **content}, indent=indent).encode()


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder`. Raises DamagedFileError if it is damaged, or is no manifest."""
    path = folder / MANIFEST_FILE
    if folder.is_symlink():
        raise DamagedFileError(
            f"{folder} is a link, and a checkpoint is a folder: give what it leads to, if that is what you mean"
        )
    with (
        errors_as_damaged(path, "is damaged: its bytes do not have the SHA-256 they had when they were written"),
        open_regular_file(path) as file,
    ):
        data = file.read(MAX_MANIFEST_BYTES + 1)
        content = json.loads(data)
        del content["sha256"]
        if data not in (_encode(content), _encode(content, indent=None)):
            raise ValueError
    if content.get("format") == FORMAT_OF_ONE_OPTIMIZER:
        content = _with_lists(content)
    if content.get("format") != FORMAT:
        raise DamagedFileError(
            f"{path} is a {content.get('format')!r}, and this Penstock reads a {FORMAT!r}: use the one that wrote it"
        )
    content.setdefault("settings", {})
    try:
        schema.validate_and_list_tensors(content)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} does not say what a manifest says: {error}") from error
    return content


def _with_lists(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest from before 0.3 with a list of optimizers and of schedulers."""
    names = {"optimizer": "optimizers", "scheduler": "schedulers"}
    lists = {names[name]: [] if content[name] is None else [content[name]] for name in names if name in content}
    return {**{name: value for name, value in content.items() if name not in names}, **lists, "format": FORMAT}


def verify_files(folder: Path, files: dict[str, Any], rank: int = 0, num_ranks: int = 1) -> None:
    """Raise DamagedFileError unless this rank's share of the files in `folder` matches the manifest's entries `files`."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in files:
            raise DamagedFileError(f"{path} does not belong to the checkpoint: its {MANIFEST_FILE} does not name it")
    for name, manifest_entry in list(files.items())[rank::num_ranks]:
        (checksum,) = manifest_entry.keys() - {"bytes"}
        actual_entry = file_entry(folder / name, checksum)
        if actual_entry != manifest_entry:
            counts = f"{actual_entry['bytes']} bytes are not the {manifest_entry['bytes']}"
            raise DamagedFileError(
                f"{folder / name} is damaged: by their {CHECKSUM_TITLES[checksum]} its {counts} that were written"
            )


def remember_as_verified(folder: Path) -> None:
    """Remember that `folder` is a complete checkpoint, so that this process does not compare its checksums again."""
    _verified_folders.add(folder.resolve())


def _is_intact(folder: Path) -> bool:
    if folder.resolve() not in _verified_folders:
        try:
            verify_files(folder, read(folder)["files"])
        except DamagedFileError:
            return False
        remember_as_verified(folder)
    return True


# -- rename and delete --------------------------------------------------------------------------------------------------


def delete_path(path: Path) -> None:
    """Delete the folder, with its contents, or the file or link at `path`. The target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def delete_leftovers(folder: Path) -> None:
    """Delete what interrupted saves have left in `folder`: unfinished checkpoints, and replaced ones."""
    set_aside = [old for old in folder.glob(".step-*.old") if (folder / old.name[1:-4]).exists()]
    for leftover in [*folder.glob(".step-*.part"), *set_aside]:
        delete_path(leftover)


def rename_checkpoint(part: Path, final: Path) -> None:
    """Rename `part` to `final`. A checkpoint that has that name already is renamed first, and deleted afterwards."""
    aside = final.with_name(f".{final.name}.old")
    if os.path.lexists(final):
        delete_path(aside)
        os.rename(final, aside)
    os.rename(part, final)
    fsync(final.parent)
    delete_path(aside)
    remember_as_verified(final)


def prune(folder: Path, step: int, keep: int) -> None:
    """Delete the checkpoints up to `step` that are older than the last `keep` complete ones."""
    num_kept = 0
    for checkpoint in all_checkpoints_newest_first(folder):
        if int(step_of_folder(checkpoint) or 0) > step:
            continue
        if num_kept < keep:
            num_kept += _is_intact(checkpoint)
        else:
            hidden_path = folder / f".{checkpoint.name.strip('.')}.part"  # renamed first, as that is atomic
            delete_path(hidden_path)
            os.rename(checkpoint, hidden_path)
            delete_path(hidden_path)
            _verified_folders.discard(checkpoint.resolve())


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; after the block, sync it to the disk and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.part")
    delete_path(temporary)  # it may be a link
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
