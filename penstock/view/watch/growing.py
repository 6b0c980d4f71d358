"""Read a growing run: only the new lines of its metrics."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from penstock.view.record import FILE

METRICS = "metrics.jsonl"  # in the folder of a run: a line for each step
MAX_CURVE_POINTS = 400


class GrowingRun:
    """The run in `folder`, which may have no files yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # several pages may ask at once
        self._forget(file=0)

    def _forget(self, file: int) -> None:
        self._file, self._num_read = file, 0  # its number on the disk, and the bytes that were read of it
        self._losses: list[tuple[int, float | None]] = []  # of every step; None: it was not finite
        self._last_record: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the last step's record, the losses so far, and the time of the newest timeline."""
        timeline = self._folder / FILE
        with self._lock:
            self._read_on()
            return {
                "name": self._folder.name,
                "last": self._last_record,
                "losses": self._losses[:: 1 + len(self._losses) // MAX_CURVE_POINTS],
                "timeline": timeline.stat().st_mtime_ns if timeline.is_file() else None,
            }

    def _read_on(self) -> None:
        path = self._folder / METRICS
        if not path.is_file():
            return
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._num_read:  # the run was resumed, and begins another file
                self._forget(status.st_ino)
            file.seek(self._num_read)
            new = file.read()
        lines = new[: new.rfind(b"\n") + 1]  # the last line may be being written
        self._num_read += len(lines)
        for line in lines.splitlines():
            self._last_record = record = json.loads(line, parse_constant=lambda _: None)  # the browser's JSON has no NaN
            self._losses.append((record["step"], record["loss"]))
