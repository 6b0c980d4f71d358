"""A file that the studio was opened with: read again whenever it has changed."""

from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError
from penstock.view.data.timeline import Data

Reader = Callable[[], Data]  # the question that shows the file's table; raises PenstockError for what is none


class Opened:
    """A file on this machine, which the page asks for again and again."""

    def __init__(self, path: Path, reader: Reader) -> None:
        self.path, self._reader = path, reader
        self._read = "", Data()  # when the file was changed, and what was read then

    def data(self) -> Data:
        """The question that shows its table, or why there is none; `changed` is another text once the file is another."""
        try:
            changed = str(self.path.stat().st_mtime_ns)
        except OSError:
            return {"changed": "", "error": f"{self.path} is gone"}
        if changed != self._read[0]:
            try:
                told = self._reader()
            except PenstockError as error:
                told = {"error": str(error)}
            self._read = changed, told
        return {"changed": changed, **self._read[1]}
