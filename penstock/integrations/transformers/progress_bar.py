"""Add the idle share of the ranks to Trainer's progress bar."""

from collections.abc import Callable
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from penstock.engine.report import StepReport


class PipelineProgress(ProgressCallback):
    """Trainer's bar, followed by the share of the last step in which the ranks were idle, as `idle 14%`.

    `read_report` returns the report of the pipeline's last step, or None before the first.
    """

    def __init__(self, read_report: Callable[[], StepReport | None]) -> None:
        super().__init__()
        self._read_report = read_report

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Advance the bar of rank 0."""
        report = self._read_report()
        if self.training_bar is not None and report is not None and len(report.busy) > 1:
            self.training_bar.set_postfix_str(f"idle {report.idle_share:.0%}", refresh=False)
        super().on_step_end(args, state, control, **options)


def replace_progress(callbacks: list[TrainerCallback], read_report: Callable[[], StepReport | None]) -> None:
    """Replace Trainer's own bar in its list of callbacks. Keep a notebook's table and a user's bar."""
    callbacks[:] = [PipelineProgress(read_report) if type(callback) is ProgressCallback else callback for callback in callbacks]
