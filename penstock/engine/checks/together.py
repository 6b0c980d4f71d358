"""What watches over a step, as one: it sees every action, and at the end says what all ranks come to."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.comms.control import Control
from penstock.engine.actions import Acts, observed
from penstock.engine.batch import Batch
from penstock.engine.checks.audit import Audit
from penstock.engine.checks.nonfinite import Watch, in_tree, value_of
from penstock.engine.report import StepReport, Verdict
from penstock.stage.parameters import Parameters

STATE, DATA, COMPUTED, CORRUPT = "parameters", "data", "computed", "corrupt"  # causes
NONFINITE, DIFFERS = 1, 2  # what a rank tells that it has found, added up


class Checks:
    """Those that a pipeline's user asked for."""

    def __init__(self, control: Control, parameters: Parameters, watch: Watch | None, audit: Audit | None) -> None:
        self.control, self.parameters, self.watch, self.audit = control, parameters, watch, audit

    def begin(self, batch: Batch) -> None:
        """Before the first action."""
        if self.audit is not None:
            self.audit.begin(batch)

    def agreed(self, weights: Sequence[float]) -> None:
        """The ranks have agreed: `weights` of the microbatches in the loss."""
        if self.audit is not None:
            self.audit.weights = weights

    def around(self, acts: Acts) -> Acts:
        """What the engine does for each kind of action, looked at."""
        return observed(acts, [self.audit, self.watch])

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
