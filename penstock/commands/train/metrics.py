"""Write the metrics of every step: a line of JSON, and TensorBoard if it is installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.files import json_lines
from penstock.view.files import report_write_errors
from penstock.view.watch.live_run import METRICS_FILE


def read_records(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Return the records of a run's first `steps` steps; an unfinished last line is left out."""
    return [record for record in json_lines.read(folder / METRICS_FILE) if record["step"] <= steps]


class Metrics:
    """Write the metrics of a run to `folder`, after those of its first `steps` steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS_FILE
        json_lines.write(self._path, read_records(folder, steps))
        self._board = _board(folder / "tensorboard", steps)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()

    def write(self, record: Mapping[str, float]) -> None:
        """Append the record of the step `record["step"]` to the file. Raises PenstockError if it cannot be written."""
        with report_write_errors(self._path):
            json_lines.append(self._path, record)
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])


def _board(folder: Path, steps: int) -> Any:
    """Return TensorBoard's writer, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=steps + 1)
