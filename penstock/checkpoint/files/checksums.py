"""Checksums of a checkpoint's files: SHA-256 on a disk, the quick CRC-32 in memory."""

import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.checkpoint.files.disk import in_memory


class Crc32:
    """A CRC-32 that is made as `hashlib` makes digests."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: Any) -> None:
        """Add bytes."""
        self._crc = zlib.crc32(data, self._crc)

    def hexdigest(self) -> str:
        """Eight digits."""
        return f"{self._crc:08x}"


CHECKSUMS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "crc32": Crc32}
NAMES = {"sha256": "SHA-256", "crc32": "CRC-32"}


def checksum_for(folder: Path) -> str:
    """Which of them files in `folder` get."""
    return "crc32" if in_memory(folder) else "sha256"
