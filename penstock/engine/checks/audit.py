"""Now and then one microbatch of one stage computed once more, on another rank: a device that computes wrongly is found.

When the rank that has the stage has done with the microbatch it sends what went in, the stage's values and digests of what
came out. Another rank, as soon as its own actions are over, computes the same; that is while others still work, but for the
last ranks of a step. If the digests differ both compute again, and so does a third rank if there is one, until it is known who
is wrong. Stage, replica and microbatch take turns.

What is not looked at: values that were wrong before they were used, with which all ranks compute alike; and the weights'
gradients of a backward in two.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comms.control import Control, Pending
from penstock.engine.actions import Acts, explained, unpacked
from penstock.engine.batch import Batch
from penstock.engine.checks import parcels
from penstock.engine.checks.skeleton import MADE, Parcel, Skeletons, digest, modes_of, own, tensors_of, weights_gradients
from penstock.errors import MismatchError
from penstock.mesh.position import MeshPosition
from penstock.randomness import generator_of
from penstock.schedule import Schedule
from penstock.schedule.table import Action, Kind
from penstock.stage.stage import Stage


class Turn(NamedTuple):
    """What is computed twice in one step, and by whom."""

    stage: int
    replica: int
    microbatch: int
    rank: int  # that has the stage
    checkers: Sequence[int]  # the rank that computes it too, and one more for the case that they differ


NOBODYS = Turn(-1, -1, -1, -1, ())


def checkers_of(position: MeshPosition, place: int, replica: int, everywhere: bool) -> list[int]:
    """Who can compute what the rank at `place` of a pipeline does: its replicas, and if they know all stages its neighbours."""
    pipelines = position.counted
    beside = [pipelines[(replica + step) % len(pipelines)][place] for step in range(1, len(pipelines))]
    mine = pipelines[replica]
    after = [mine[(place + step) % len(mine)] for step in range(1, len(mine))]
    return (beside + after if everywhere else beside)[:2]


class Audit:
    """The audits of one rank with `stages`, one every so many steps. Raises MismatchError where nobody could audit."""

    def __init__(
        self,
        every: int,
        control: Control,
        position: MeshPosition,
        table: Schedule,
        stages: Mapping[int, Stage],
        skeletons: Skeletons,
    ) -> None:
        self.every, self.control, self.position, self.table = every, control, position, table
        self.stages, self.skeletons, self.everywhere = stages, skeletons, len(skeletons.modules) == table.stages
        check(position, self.everywhere, stages)
        self.rank = position.world.rank
        self.turn = NOBODYS  # in this step
        self.weights: Sequence[float] = ()  # of the step's microbatches
        self._batch: Batch
        self._parcel: Parcel | None = None  # what is computed twice, once it is whole
        self._digests: list[str] = []  # of what this rank made of it
        self._sending: list[Pending] = []  # that parcel
        for stage in stages.values():
            if stage.loss_fn is not None:
                stage.loss_fn = partial(self._loss, stage.loss_fn)

    def begin(self, batch: Batch) -> None:
        """A step begins: whose turn is it?"""
        self._batch, self.turn, self._parcel, self._digests = batch, NOBODYS, None, []
        if not batch.training or batch.call.step % self.every != self.every - 1:
            return
        number, table, position = batch.call.step // self.every, self.table, self.position
        number, stage = divmod(number, table.stages)
        number, replica = divmod(number, position.replicas)
        place = table.placement[stage]
        checkers = checkers_of(position, place, replica, self.everywhere)
        self.turn = Turn(stage, replica, number % table.microbatches, position.counted[replica][place], checkers)
        self._what = f"to audit stage {stage}"

    def around(self, acts: Acts) -> Acts:
        """What the engine does for each kind of action, noted for the one microbatch."""
        if self.turn.rank != self.rank:
            return acts
        noted = {Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward}
        return {kind: partial(noted[kind], act) if kind in noted else act for kind, act in acts.items()}

    def _is_due(self, action: Action) -> bool:
        return (action.stage, action.microbatch) == (self.turn.stage, self.turn.microbatch)

    def _forward(self, act: Callable[..., Any], action: Action, values: Any) -> Any:
        if not self._is_due(action):
            return act(action, values)
        stage, batch = self.stages[action.stage], self._batch
        given = own(batch.given(action, values))
        target = own(batch.targets[action.microbatch]) if stage.loss_fn is not None else None
        state = [each.detach() if each.requires_grad else each.detach().clone() for each in tensors_of(stage.module)]
        random = generator_of(self.position.pipeline.device).get_state()
        self._noted = Parcel(
            action.microbatch, batch.seed, given, target, (), False, 0.0, random, state, modes_of(stage.module)
        )
        self._in_turn = True
        made = act(action, values)
        self._in_turn = False
        self._digests = self._digests or [digest(made)]
        return made

    def _loss(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any) -> Any:
        loss = loss_fn(output, target)
        if self._in_turn:
            self._digests = [digest(loss)]
        return loss

    _in_turn = False  # the forward that is computed twice is running

    def _backward(self, act: Callable[..., Any], action: Action, values: Any) -> Any:
        if not self._is_due(action):
            return act(action, values)
        gradients = own(unpacked(values))
        whole = action.kind is Kind.B
        with weights_gradients(self.stages[action.stage].module, whole) as of_weights:
            made = act(action, values)
        self._digests += [digest(made), *of_weights]
        weight = self.weights[action.microbatch] * self._batch.scale
        self._parcel = self._noted._replace(gradients=gradients, weight=weight, whole=whole)
        self._send(0)
        return made

    def _send(self, checker: int) -> None:
        receiver = self.turn.checkers[checker]
        self._sending = parcels.send(self.control, (self._parcel, self._digests), receiver, self._what)

    def differs(self) -> bool:
        """This rank's actions are over: if it is the one that computes once more, whether it came to the same."""
        if self.turn.rank == self.rank and self._parcel is None:  # there was no such microbatch, or it counted nothing
            self._send(0)
        return self.rank in self.turn.checkers[:1] and self._receive() != self._digests

    def _receive(self) -> list[str]:
        """What the rank whose turn it is came to; this one's own digests are there then."""
        self._parcel, theirs = parcels.receive(self.control, self.turn.rank, self.position.pipeline.device, self._what)
        self._digests = self._compute() if self._parcel is not None else theirs
        return theirs

    def _compute(self) -> list[str]:
        assert self._parcel is not None
        try:
            return self.skeletons.compute(self.turn.stage, self.turn.replica, self._parcel)
        except Exception as error:
            raise explained(error, self.rank, Action(Kind.F, self.turn.stage, self.turn.microbatch)) from error

    def end(self) -> None:
        """The step is over on all ranks: let go of what was noted for it."""
        self._arrived()
        self._sending, self._parcel, self.turn = [], None, NOBODYS

    def _arrived(self) -> None:
        for each in self._sending:
            each.wait()

    def blame(self) -> str:
        """Two ranks differ: what all of them come to about who is wrong. All ranks call it."""
        rank, checker, *further = self.turn.rank, *self.turn.checkers
        first, again = self._digests, self._compute() if self.rank in (rank, checker) else []
        if self.rank == rank and further:
            self._arrived()
            self._send(1)
        elif self.rank in further:
            self._receive()
            first = self._digests
        everyone = self.control.gather_objects((first, again, _processor()), self._what)
        one, other, *others = [everyone[each] for each in (rank, checker, *further)]
        what = next(name for name, *pair in zip(MADE, one[0], other[0], strict=False) if pair[0] != pair[1])
        what = "loss" if what == MADE[0] and self.turn.stage == self.table.stages - 1 else what
        differ = (
            "" if one[2] == other[2] else f" (rank {rank} is {one[2]}, rank {checker} {other[2]}: that alone may change bits)"
        )
        where = f"the {what} of stage {self.turn.stage} for microbatch {self.turn.microbatch}"
        told = f"{where} is not the same to the bit on rank {rank}, which has the stage, and rank {checker}, which did it again"
        return f"{told}{differ}: {_who(self.turn, one, other, others)}"


def _who(turn: Turn, one: Any, other: Any, others: Sequence[Any]) -> str:
    """Who is wrong: each is (digests, those when computed again, ..), of the two that differ and of a third rank."""
    rank, checker, *further = turn.rank, *turn.checkers
    for each, (first, again, *_) in ((rank, one), (checker, other)):
        if again != first:
            return f"rank {each} was wrong, for it comes to other bits when it does so again"
    if not others:
        return "one of the two is wrong, and there is no third rank to tell which"
    judge = others[0][0]
    if judge not in (one[0], other[0]):
        return f"rank {further[0]} has a third opinion, so bits do not repeat here at all"
    wrong, right = (rank, checker) if judge == other[0] else (checker, rank)
    return f"rank {wrong} is wrong, since rank {further[0]} agrees with rank {right}"


def _processor() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability} with {torch.get_num_threads()} threads"


def check(position: MeshPosition, everywhere: bool, stages: Mapping[int, Stage]) -> None:
    """Raises MismatchError where there is nobody who could audit."""
    sharded = any(hasattr(each, "placements") for stage in stages.values() for each in stage.module.parameters())
    if sharded or position.tp is not None:
        raise MismatchError("audit_every= has one rank compute a whole stage: it takes no tensor_parallel and no fully_shard")
    if position.pipeline.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        raise MismatchError("audit_every= compares bits, which on a GPU repeat with init_distributed(deterministic=True) only")
    if not checkers_of(position, position.pipeline.rank, position.replica, everywhere):
        knows = "give every rank the whole model, or a list of all stages" if position.world.world_size > 1 else "use two"
        raise MismatchError(f"audit_every= computes a stage on another rank, and no other has what that takes: {knows}")
