"""Trainer's progress bar, with the idle share of the ranks."""

from collections.abc import Callable
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from penstock.engine.report import StepReport


class PipelineProgress(ProgressCallback):
    """Trainer's bar; behind it the share of the last step in which the ranks ran no action, as `idle 14%`.

    `read_report`: the report of the last step of the pipeline; None before the first.
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
    """Replace Trainer's own bar in its list of callbacks. A notebook's table and a bar of the user's stay."""
    callbacks[:] = [PipelineProgress(read_report) if type(callback) is ProgressCallback else callback for callback in callbacks]
