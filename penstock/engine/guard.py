"""A step that leaves no trace where it fails, and where something in it was not finite: raised, skipped, or run once more."""

import warnings
from collections.abc import Collection
from typing import Literal, get_args

import torch

from penstock.engine.batch import Call
from penstock.engine.checks.nonfinite import COMPUTED, DATA, STATE
from penstock.engine.report import Outcome
from penstock.engine.step import Engine
from penstock.errors import MismatchError, NonFiniteError
from penstock.randomness import generator_of
from penstock.stage.stage import Stage
from penstock.torch_private import buffer_slots

OnNonfinite = Literal["raise", "skip", "retry"]


def check_choice(on_nonfinite: OnNonfinite | None) -> None:
    """Raises MismatchError for what is no choice."""
    if on_nonfinite is not None and on_nonfinite not in get_args(OnNonfinite):
        raise MismatchError(f"on_nonfinite={on_nonfinite!r}: use 'raise', 'skip', 'retry' or None")


class Guard:
    """Runs the steps of `engine`."""

    def __init__(self, engine: Engine, on_nonfinite: OnNonfinite | None) -> None:
        self.engine, self.choice = engine, on_nonfinite

    def step(self, call: Call) -> Outcome:
        """As the engine's. Raises NonFiniteError, the same on every rank, once all have ended the step."""
        self.engine.forget()
        if not call.training:
            return self.engine.step(call)
        with Before(self.engine.stages.values(), self.engine.device, self.choice is not None) as before:
            outcome = self._run(call)
            if (found := outcome.verdict) is None:
                return outcome
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
            if again.place == found.place:
                told = f"and persistent: it is there again when the step is run once more: {found.text}"
            else:
                told = f"and again, elsewhere, when the step is run once more: {found.text}; then {again.text}"
            raise NonFiniteError(f"{name}, {told}")

    def _run(self, call: Call) -> Outcome:
        if (watch := self.engine.watch) is None:
            return self.engine.step(call)
        with watch.on(gradients=call.scaler is None or not call.scaler.is_enabled(), offset=self.engine.skew.offset):
            return self.engine.step(call)

    def _warn(self, told: str) -> None:
        if self.engine.position.world.rank == 0:
            warnings.warn(told, RuntimeWarning, stacklevel=5)


_CAUSES = {STATE: "and was before the step began", DATA: "which came with the batch", COMPUTED: "and came up in the step"}


class Before:
    """Around a step: gradients of `stages` are put back where it fails; with `everything`, buffers and random state too.

    A gradient that is None costs nothing. One that is being added to is copied: sums that begin anew would have other bits.
    """

    def __init__(self, stages: Collection[Stage], device: torch.device, everything: bool) -> None:
        parameters = {id(each): each for stage in stages for each in stage.parameters}
        gradients = [(each, each.grad) for each in parameters.values()]
        self._gradients = [(each, grad, None if grad is None else grad.detach().clone()) for each, grad in gradients]
        slots = [slot for stage in stages for slot in buffer_slots(stage.module)] if everything else []
        self._buffers = [(slot, slot.tensor.clone()) for slot in slots]
        generators = {id(each): each for each in (generator_of(device), torch.default_generator)} if everything else {}
        self._random = [(each, each.get_state()) for each in generators.values()]

    def __enter__(self) -> "Before":
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed:
            self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Make all of it what it was, in the same tensors."""
        for parameter, gradient, copied in self._gradients:
            parameter.grad = gradient if gradient is None or copied is None else gradient.copy_(copied)
        for slot, values in self._buffers:
            slot.put(slot.tensor.copy_(values))
        for generator, state in self._random:
            generator.set_state(state)
