"""What every step came to, as numbers by name: lines of JSON always, TensorBoard where it is installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.files import json_lines
from penstock.view.files import writing
from penstock.view.watch.growing import METRICS


def recorded(folder: Path, steps: int) -> list[dict[str, Any]]:
    """What a run in `folder` recorded of its first `steps` steps; a line that was not finished is left out."""
    return [record for record in json_lines.read(folder / METRICS) if record["step"] <= steps]


class Metrics:
    """The metrics of a run in `folder`, which goes on after its first `steps` steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        json_lines.write(self._path, recorded(folder, steps))
        self._board = _board(folder / "tensorboard", steps)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()

    def write(self, record: Mapping[str, float]) -> None:
        """Add what one step, `record["step"]`, came to; it is there when this returns. Raises PenstockError if it cannot be."""
        with writing(self._path):
            json_lines.add(self._path, record)
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])


def _board(folder: Path, steps: int) -> Any:
    """TensorBoard's writer; None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=steps + 1)
