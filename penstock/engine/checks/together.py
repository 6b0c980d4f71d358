"""What watches over a step, as one: it sees every action, and at the end says what all ranks come to."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from penstock.comms.control import Control
from penstock.engine.actions import Acts
from penstock.engine.batch import Batch
from penstock.engine.checks.audit import Audit
from penstock.engine.checks.nonfinite import Watch, in_tree, value_of
from penstock.engine.checks.skeleton import Make, Skeletons, hollow
from penstock.engine.memory import MemoryMeasurement
from penstock.engine.report import StepReport, Verdict
from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.schedule import Schedule
from penstock.stage.parameters import Parameters
from penstock.stage.stage import Stage

STATE, DATA, COMPUTED, CORRUPT = "parameters", "data", "computed", "corrupt"  # causes
NONFINITE, DIFFERS = 1, 2  # what a rank tells that it has found, added up


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


class Checks:
    """Those that were asked for, with `hollows` of theirs. Raises MismatchError where there is nobody to audit."""

    def __init__(
        self,
        asked: Asked,
        control: Control,
        position: MeshPosition,
        table: Schedule,
        stages: Mapping[int, Stage],
        parameters: Parameters,
        hollows: Mapping[int, nn.Module],
        make: Make,
    ) -> None:
        self.control, self.parameters = control, parameters
        self.watch = Watch(position.world.rank, stages, parameters.names) if asked.on_nonfinite else None
        self.audit: Audit | None = None
        if asked.audit_every:
            skeletons = Skeletons(hollows, make, position.pipeline.device)
            self.audit = Audit(asked.audit_every, control, position, table, stages, skeletons)

    def begin(self, batch: Batch) -> None:
        """Before the first action."""
        if self.audit is not None:
            self.audit.begin(batch)

    def agreed(self, weights: Sequence[float]) -> None:
        """The ranks have agreed: `weights` of the microbatches in the loss."""
        if self.audit is not None:
            self.audit.weights = weights

    def around(self, acts: Acts, measurement: MemoryMeasurement | None) -> Acts:
        """What the engine does for each kind of action, looked at and measured."""
        for each in (self.audit, self.watch, measurement):
            acts = acts if each is None else each.around(acts)
        return acts

    def found(self) -> int:
        """After the last action: what this rank has found."""
        nonfinite = self.watch is not None and self.watch.at_the_end()
        differs = self.audit is not None and self.audit.differs()
        return NONFINITE * nonfinite + DIFFERS * differs

    def verdict(self, batch: Batch, report: StepReport) -> Verdict | None:
        """What all ranks come to, if one of them has found something; once all have ended the step."""
        found, judged = [int(each) for each in report.found], None
        if self.audit is not None:
            if any(each & DIFFERS for each in found):
                told = self.audit.blame()
                judged = Verdict(CORRUPT, told, (told,))
            self.audit.end()
        if judged is None and self.watch is not None and any(found):
            judged = self._of_nonfinite(self.watch, batch)
        return judged

    def _of_nonfinite(self, watch: Watch, batch: Batch) -> Verdict:
        rank = self.control.topology.rank
        state, data = ([f"rank {rank}: {each}" for each in told] for told in (_state(self.parameters), _data(batch)))
        everyone = self.control.gather_objects((watch.found, state, data), "to tell what is not finite")
        first = min((found for found, *_ in everyone if found), key=lambda each: each[:2])
        for cause, told in ((STATE, [each for _, each, _ in everyone]), (DATA, [each for *_, each in everyone])):
            if several := [each for mine in told for each in mine]:
                more = f" (and {len(several) - 1} more)" if len(several) > 1 else ""
                return Verdict(cause, f"{several[0]}{more}; first seen in {first}", first.place)
        return Verdict(COMPUTED, str(first), first.place)


def _state(parameters: Parameters) -> Iterator[str]:
    """What cannot have come of this step, since no step changes a parameter."""
    for name, parameter in parameters.named_parameters():
        if value := value_of(parameter):
            yield f"{name} has {value} since the last optimizer step, or was loaded so"


def _data(batch: Batch) -> Iterator[str]:
    given: Mapping[str, Sequence[Any]] = {"inputs": batch.inputs, "target": batch.targets}
    for what, microbatches in given.items():
        for number, each in enumerate(microbatches):
            if value := in_tree(each):
                yield f"the batch's {what} in microbatch {number} have {value}"
