"""Read a run while it trains: each time only the new lines of its metrics."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from penstock.view.record import TIMELINE_FILE

METRICS_FILE = "metrics.jsonl"  # in the run's folder: a line for each step
MAX_CURVE_POINTS = 400


class LiveRun:
    """A run in `folder`, which may have no files yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # several pages may request the state at once
        self._reset(inode=0)

    def _reset(self, inode: int) -> None:
        self._inode, self._bytes_read = inode, 0  # of the metrics file
        self._losses: list[tuple[int, float | None]] = []  # (step, loss); None: the loss was not finite
        self._last_record: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the last step's record, at most 400 of the losses, and when the timeline was last written (ns), or None."""
        timeline = self._folder / TIMELINE_FILE
        with self._lock:
            self._read_new_lines()
            return {
                "name": self._folder.name,
                "last": self._last_record,
                "losses": self._losses[:: 1 + len(self._losses) // MAX_CURVE_POINTS],
                "timeline": timeline.stat().st_mtime_ns if timeline.is_file() else None,
            }

    def _read_new_lines(self) -> None:
        path = self._folder / METRICS_FILE
        if not path.is_file():
            return
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._bytes_read:  # a resumed run rewrites the file
                self._reset(status.st_ino)
            file.seek(self._bytes_read)
            new = file.read()
        lines = new[: new.rfind(b"\n") + 1]  # the last line may be incomplete
        self._bytes_read += len(lines)
        for line in lines.splitlines():
            self._last_record = record = json.loads(line, parse_constant=lambda _: None)  # browsers cannot parse NaN
            self._losses.append((record["step"], record["loss"]))
