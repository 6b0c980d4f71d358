"""The file that the studio was opened with, which is read again when it changes."""

from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError
from penstock.view.data.timeline import Data

Reader = Callable[[], Data]  # returns the question for the file's table, or raises PenstockError


class Opened:
    """A file on this machine, which the page polls."""

    def __init__(self, path: Path, reader: Reader) -> None:
        self.path, self._reader = path, reader
        self._last_read = "", Data()  # the file's time when it was read, and its question

    def data(self) -> Data:
        """Return the question for the file's table, or the error; `version` differs after a change of the file."""
        try:
            version = str(self.path.stat().st_mtime_ns)
        except OSError:
            return {"changed": "", "error": f"{self.path} is gone"}
        if version != self._last_read[0]:
            try:
                data = self._reader()
            except PenstockError as error:
                data = {"error": str(error)}
            self._last_read = version, data
        return {"changed": version, **self._last_read[1]}
