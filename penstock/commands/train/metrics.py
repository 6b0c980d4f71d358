"""What every step came to, as numbers by name: lines of JSON always, TensorBoard where it is installed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.files.manifest import replaced

LINES = "metrics.jsonl"


def recorded(folder: Path, steps: int) -> list[dict[str, Any]]:
    """What a run in `folder` recorded of its first `steps` steps; a line that was not finished is left out."""
    path = folder / LINES
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["step"] <= steps]


class Metrics:
    """The metrics of a run in `folder`, which goes on after its first `steps` steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        before = recorded(folder, steps)
        with replaced(folder / LINES) as beside:
            beside.write_text("".join(json.dumps(record) + "\n" for record in before))
        self._lines = (folder / LINES).open("a")
        self._board = _board(folder / "tensorboard", steps)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def write(self, record: Mapping[str, float]) -> None:
        """Add what one step, `record["step"]`, came to; it is there when this returns."""
        print(json.dumps(record), file=self._lines, flush=True)
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
