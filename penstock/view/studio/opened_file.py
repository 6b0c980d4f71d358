"""The file that the studio was opened with. It is read again when it changes."""

from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError
from penstock.view.data.timeline import Data

Reader = Callable[[], Data]  # returns the question for the file's table, or raises PenstockError


class OpenedFile:
    """A file whose table the page polls for."""

    def __init__(self, path: Path, reader: Reader) -> None:
        self.path, self._reader = path, reader
        self._version_and_data = "", Data()  # when the file was changed, as read last; its question or error

    def data(self) -> Data:
        """Return the question for the file's table, or {"error"}. "changed" is another text after each change of the file."""
        try:
            version = str(self.path.stat().st_mtime_ns)
        except OSError:
            return {"changed": "", "error": f"{self.path} is gone"}
        if version != self._version_and_data[0]:
            try:
                data = self._reader()
            except PenstockError as error:
                data = {"error": str(error)}
            self._version_and_data = version, data
        return {"changed": version, **self._version_and_data[1]}
