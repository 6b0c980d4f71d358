"""What a pipeline's user asks to be checked in its steps: `on_nonfinite`, `audit_every`."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from torch import nn

from penstock.comms.control import Control
from penstock.engine.checks.audit import Audit
from penstock.engine.checks.nonfinite import Watch
from penstock.engine.checks.skeleton import Make, Skeletons, hollow
from penstock.engine.checks.together import Checks
from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.schedule import Schedule
from penstock.stage.parameters import Parameters
from penstock.stage.stage import Stage

OnNonfinite = Literal["raise", "skip", "retry"]


class Asked(NamedTuple):
    """The two options of `Pipeline`."""

    on_nonfinite: OnNonfinite | None
    audit_every: int | None

    def __str__(self) -> str:
        return f"on_nonfinite={self.on_nonfinite!r} and audit_every={self.audit_every!r}"

    def check(self) -> None:
        """Raises MismatchError for what cannot be asked."""
        if self.on_nonfinite is not None and self.on_nonfinite not in get_args(OnNonfinite):
            raise MismatchError(f"on_nonfinite={self.on_nonfinite!r}: use 'raise', 'skip', 'retry' or None")
        every = self.audit_every
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise MismatchError(f"audit_every={every!r}: give a whole number of steps, 100 for instance, or None")

    def hollows(self, stages: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
        """Of all stages that this rank was given, before it puts its own to use, if there are audits: see `skeleton.py`."""
        return {index: hollow(module, index) for index, module in stages.items()} if self.audit_every else {}

    def checks(
        self,
        control: Control,
        position: MeshPosition,
        table: Schedule,
        stages: Mapping[int, Stage],
        parameters: Parameters,
        hollows: Mapping[int, nn.Module],
        make: Make,
    ) -> Checks:
        """What was asked for. Raises MismatchError where there is nobody to audit."""
        audit = watch = None
        if self.audit_every:
            skeletons = Skeletons(hollows, make, position.pipeline.device)
            audit = Audit(self.audit_every, control, position, table, stages, skeletons)
        if self.on_nonfinite:
            watch = Watch(position.world.rank, stages, parameters.names)
        return Checks(control, parameters, watch, audit)
