"""The calls that all ranks make together on one pipeline, one at a time."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from penstock.comms.control_group import ControlGroup
from penstock.errors import LostRankError, PenstockError


class PipelineCalls:
    """A base of Pipeline. `control`: of all ranks. `_number`: of the pipeline, the same on every rank, once it is built."""

    def __init__(self, control: ControlGroup) -> None:
        self._control, self._process_id = control, os.getpid()
        self._number: int | None = None

    def collective(self, call: str, announces: bool = True, runs_actions: bool = False) -> AbstractContextManager[ControlGroup]:
        """Return the context of a call that all ranks make: see `ControlGroup.collective_call`."""
        if os.getpid() != self._process_id:
            raise PenstockError(f"the pipeline belongs to process {self._process_id}, which has forked this one: call it there")
        return self._control.collective_call(call, self._number, announces, runs_actions)

    def gather(self, make: Callable[[], Any], what: str = "to gather values") -> list[Any]:
        """Return what `make()` returns on each rank, by rank: numbers and texts, in lists and dicts. All ranks call it.

        If `make()` raises on one rank, all raise. `what` completes the error about a rank that does not answer. Not during a
        step.
        """
        with self.collective("gather()") as control:
            return control.all_gather_value(make(), what)

    def _check_not_ended(self) -> None:
        """Raise LostRankError once a failure has closed the process groups of this pipeline's mesh."""
        if self._number in self._control.ended_pipelines:
            reason = self._control.ended_pipelines[self._number]
            raise LostRankError(f"this pipeline ended when {reason}: start the ranks again")
