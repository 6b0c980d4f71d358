"""A step that leaves no trace where it fails, and where something in it was not finite: raised, skipped, or run once more."""

import warnings

from penstock.engine.batch import Call
from penstock.engine.checks.asked import OnNonfinite
from penstock.engine.checks.before import undone_on_failure
from penstock.engine.checks.together import COMPUTED, CORRUPT, DATA, STATE
from penstock.engine.report import Outcome, Verdict
from penstock.engine.step import Engine
from penstock.errors import CorruptionError, NonFiniteError


class Guard:
    """Runs the steps of `engine`."""

    def __init__(self, engine: Engine, on_nonfinite: OnNonfinite | None) -> None:
        self.engine, self.choice = engine, on_nonfinite

    def step(self, call: Call) -> Outcome:
        """As the engine's. Raises NonFiniteError and CorruptionError the same on every rank, once all have ended the step."""
        self.engine.forget()
        if not call.training:
            return self.engine.step(call)
        with undone_on_failure(self.engine.stages.values(), self.engine.device, self.choice is not None) as before:
            outcome = self._run(call)
            if (found := outcome.verdict) is None:
                return outcome
            if found.cause == CORRUPT:
                raise CorruptionError(f"step {call.step}: {found.text}")
            name = f"step {call.step}: something is not finite"
            if self.choice == "raise" or found.cause == STATE or (self.choice == "retry" and found.cause == DATA):
                raise NonFiniteError(f"{name}, {_CAUSES[found.cause]}: {found.text}")
            before.put_back()
            if self.choice == "skip":
                self._warn(f"{name}, and the step is skipped: {found.text}")
                return outcome._replace(report=outcome.report._replace(skipped=True, nonfinite=found.text))
            self.engine.forget()
            outcome = self._run(call)
            if (again := outcome.verdict) is None:
                self._warn(f"{name}, and was transient: run once more, the step is finite. {found.text}")
                return outcome._replace(report=outcome.report._replace(nonfinite=found.text))
            raise NonFiniteError(f"{name}, {_persistence(found, again)}")

    def _run(self, call: Call) -> Outcome:
        if (watch := self.engine.checks.watch) is None:
            return self.engine.step(call)
        with watch.on(gradients=call.scaler is None or not call.scaler.is_enabled(), offset=self.engine.offset):
            return self.engine.step(call)

    def _warn(self, told: str) -> None:
        if self.engine.position.world.rank == 0:
            warnings.warn(told, RuntimeWarning, stacklevel=5)


_CAUSES = {STATE: "and was before the step began", DATA: "which came with the batch", COMPUTED: "and came up in the step"}


def _persistence(found: Verdict, again: Verdict) -> str:
    if again.place == found.place:
        return f"and persistent: it is there again when the step is run once more: {found.text}"
    return f"and again, elsewhere, when the step is run once more: {found.text}; then {again.text}"
