"""The same model in another cut: every tensor goes from the rank that has it to the ranks that will.

Its gradient goes along, and what optimizers keep of it. One tensor goes after the other, through no disk, and is let go of
where it was: so a rank needs memory for its stages before and after, and no more. All ranks compare first what they have; until
then nothing changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.comms.control_group import ControlGroup
from penstock.comms.encoding import view_as_bytes
from penstock.comms.topology import CPU, Topology
from penstock.engine.optimizers import check_known, check_optimizer, check_same_options, options_of
from penstock.engine.source import Source
from penstock.errors import MismatchError
from penstock.partition import CuttableModel
from penstock.partition.graph_stage import move_to
from penstock.partition.materialise import META, reallocate
from penstock.schedule import Schedule
from penstock.torch_private import has_gradient_hooks, has_hooks, tree_leaves, tree_map_only

WHAT = "to rebuild the pipeline"
PIECE = 2**28  # bytes of a message
PLANNED = ("schedule", "microbatches", "cuts", "recompute")  # the arguments that a plan takes the place of
FIXED = {
    **dict.fromkeys(("model", "example_args", "example_kwargs", "init", "rows_dim"), "the model stays the one it was cut from"),
    **dict.fromkeys(("topology", "mesh", "data_parallel", "tensor_parallel"), "the ranks stay where they are"),
}


def change_arguments(arguments: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A pipeline's arguments after `changes`. Another schedule, or a plan, leaves behind the options of the one before.

    Raises MismatchError for what cannot be changed.
    """
    for name in changes:
        if name in FIXED:
            raise MismatchError(f"rebuild() takes no {name}=: {FIXED[name]}. Make a new Pipeline for another one")

    now, options = dict(arguments), arguments["options"]
    del now["options"]
    if (plan := now["plan"]) is not None:
        now |= {name: getattr(plan, name) for name in PLANNED} | {"plan": None}
    if changes.get("plan") is not None:
        now |= {"cuts": None, "recompute": None}
    if "schedule" in changes or changes.get("plan") is not None:
        options = {}
    elif "microbatches" in changes and _is_table(now["schedule"]):
        told = f"microbatches={changes['microbatches']} changes nothing: the schedule is a table, which has its own number"
        raise MismatchError(f"{told}; give schedule= too")
    return {**now, **options, **changes}


def _is_table(schedule: Any) -> bool:
    return isinstance(schedule, Schedule | PathLike) or (isinstance(schedule, str) and schedule.endswith(".csv"))


def optimizers_in(optimizer: Any, ranks: int) -> list[Any]:
    """The optimizers in what the user gave: none, one, or several.

    Raises MismatchError for what is none, or decides by the parameters of all `ranks` at once.
    """
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for each in optimizers:
        if not hasattr(each, "param_groups") or not hasattr(each, "state"):
            raise MismatchError(f"rebuild() takes an optimizer of pipe.parameters(), or a list, not a {type(each).__name__}")
        check_optimizer(each, ranks)
    return optimizers


# -- what ranks tell each other -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What another rank must know of a tensor to make one like it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # without gaps
    on_cpu: bool  # as an optimizer's counts are, wherever the model is


class ModuleState(NamedTuple):
    """What a submodule has besides tensors."""

    training: bool
    has_hooks: bool
    extra: Any  # of its `get_extra_state()`, None if it has none


class Holding(NamedTuple):
    """What a rank has, and what it needs."""

    tensors: Mapping[str, Any]  # name -> `Redistribution._record` of it, a Layout in the place of each tensor
    modules: Mapping[str, ModuleState]  # by name
    needs: Mapping[str, bool]  # name of a tensor -> whether this rank's copy has hooks of its gradient
    needs_modules: Mapping[str, bool]  # name -> whether this rank's copy has hooks
    training: bool  # whether its first stage is in training
    optimizers: Sequence[tuple[str, Sequence[Mapping[str, str]]]]  # class, and the options of each group in words


def _layout(name: str, tensor: Tensor) -> Layout:
    """Raises MismatchError for a tensor that does not travel as its bytes."""
    if hasattr(tensor, "placements"):
        raise MismatchError(
            "rebuild() moves whole tensors, and parameters are in shards on several ranks (fsdp, tp): save a checkpoint, build "
            "the other pipeline, and resume from it"
        )
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        kind = type(tensor).__name__ if tensor.layout == torch.strided else f"tensor of layout {tensor.layout}"
        raise MismatchError(f"{name} is a {kind}: rebuild() moves plain tensors only")
    dense = torch.empty_like(tensor, device=META)
    return Layout(tensor.dtype, tuple(tensor.shape), dense.stride(), tensor.is_cpu)


def _check(ranks: Mapping[int, Holding]) -> None:
    """Raises MismatchError where optimizers differ, for what no rank has, and for hooks that a rank's copy does not have."""
    first = min(ranks)
    for rank, holding in ranks.items():
        kinds, others = ([(kind, len(groups)) for kind, groups in each.optimizers] for each in (ranks[first], holding))
        if kinds != others:
            told = f"(class, groups) are {kinds} on rank {first}, {others} on rank {rank}"
            raise MismatchError(f"the optimizers differ: {told}. Make the same on all ranks, with empty groups where need be")
        for (_, expected), (_, got) in zip(ranks[first].optimizers, holding.optimizers, strict=True):
            for number, (mine, theirs) in enumerate(zip(expected, got, strict=True)):
                check_same_options(mine, theirs, number, rank)

    tensors = {name: each for holding in ranks.values() for name, each in holding.tensors.items()}
    modules = {name: each for holding in ranks.values() for name, each in holding.modules.items()}
    for rank, holding in ranks.items():
        for name, has in holding.needs.items():
            if name not in tensors:
                raise MismatchError(f"rank {rank} needs {name}, which no rank has: build a new Pipeline of the model")
            if name not in holding.tensors:
                _check_hooks(f"the gradient of {name}", has, tensors[name]["has_hooks"], rank)
        for name, has in holding.needs_modules.items():
            if name in modules and name not in holding.modules:
                _check_hooks(name, has, modules[name].has_hooks, rank)


def _check_hooks(what: str, here: bool, there: bool, rank: int) -> None:
    if here != there:
        where = "where it is now, and none on" if there else "where it is not used now, on"
        told = f"{what} has a hook {where} rank {rank}, which will have it, and hooks do not move"
        raise MismatchError(f"{told}: take it off, rebuild, and give it to the new pipeline's")


def _moves(ranks: Mapping[int, Holding]) -> Iterator[tuple[str, int, list[int]]]:
    """Of every tensor the name, the rank that gives it, and those that take it, in the same order on every rank."""
    for name in dict.fromkeys(name for holding in ranks.values() for name in holding.tensors):
        owners = [rank for rank, holding in ranks.items() if name in holding.tensors]
        yield name, owners[0], [rank for rank, holding in ranks.items() if name in holding.needs and rank not in owners]


def _send(record: Any, control: ControlGroup, takers: Sequence[int]) -> None:
    for tensor in [leaf for leaf in tree_leaves(record) if isinstance(leaf, Tensor)] if takers else ():
        dense = tensor.detach().to(CPU, copy=True)
        pieces = view_as_bytes(dense.as_strided((dense.numel(),), (1,))).split(PIECE)
        for pending in [control.send(piece, taker, WHAT) for piece in pieces for taker in takers if len(piece)]:
            pending.wait()


def _receive(control: ControlGroup, giver: int, device: torch.device, layout: Layout) -> Tensor:
    dense = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=CPU)
    for piece in view_as_bytes(dense.as_strided((dense.numel(),), (1,))).split(PIECE):
        if len(piece):
            control.receive(piece, giver, WHAT)
    return dense.to(CPU if layout.on_cpu else device)


# -- the move -------------------------------------------------------------------------------------------------------------


class Redistribution:
    """From the `stages` of one pipeline on this rank to those of the next, to which it is given in the place of a model.

    `source`: what the first one was made of. `optimizers`: of this rank's parameters; their groups and state become those
    of the parameters that it will have.
    """

    def __init__(self, source: Source, stages: Mapping[int, nn.Module], optimizers: Sequence[Any]) -> None:
        self.model, self._whole, self._source = source.model, source.whole, source
        self._stages, self._optimizers = stages, optimizers
        self._tensors, self._modules = self._source.of(stages), self._source.submodules(stages)
        self._places = [_places(each) for each in optimizers]
        self._home = next((each.device for each in self._source.elsewhere(stages).values()), None)  # of what others run
        self.has_begun = False  # to change what ranks have

    def recut(self, cuts: Sequence[str] | None) -> CuttableModel | None:
        """The model that the next pipeline cuts, and where; None if its stages stay as they are."""
        if self._whole is None and cuts is not None:
            raise MismatchError("cuts= are for a model that was cut, but this pipeline was given its stages")
        return None if self._whole is None else self._whole.with_cuts(cuts)

    def _record(self, tensor: Tensor) -> dict[str, Any]:
        """A tensor of this rank's and all that goes with it."""
        return {
            "tensor": tensor,
            "gradient": tensor.grad,
            "requires_grad": tensor.requires_grad,
            "has_hooks": has_gradient_hooks(tensor),
            "places": [places.get(id(tensor)) for places in self._places],
            "states": [dict(each.state.get(tensor, {})) for each in self._optimizers],
        }

    def _holding(self, stages: Mapping[int, nn.Module], rank: int) -> Holding:
        """Raises MismatchError for what does not travel."""
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        for optimizer in self._optimizers:
            check_known(optimizer, names, rank)
        records = {name: self._record(tensor) for name, tensor in self._tensors.items()}
        layouts = {name: tree_map_only(Tensor, partial(_layout, name), record) for name, record in records.items()}
        if self._whole is not None and any(map(has_hooks, self._stages.values())):
            told = f"rank {rank}: a hook of a whole stage would be lost, since there will be other stages"
            raise MismatchError(f"{told}: take it off, rebuild, and give it to the new pipeline's")
        return Holding(
            layouts,
            {name: ModuleState(each.training, has_hooks(each), _extra(each)) for name, each in self._modules.items()},
            {name: has_gradient_hooks(each) for name, each in self._source.of(stages).items()},
            {name: has_hooks(each) for name, each in self._source.submodules(stages).items()},
            next(iter(self._stages.values())).training,
            [(type(each).__name__, [options_of(group) for group in each.param_groups]) for each in self._optimizers],
        )

    @torch.no_grad()
    def move(self, control: ControlGroup, topology: Topology, stages: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
        """The `stages` of the next pipeline that this rank runs, on its device, with what the ranks have of them.

        Raises MismatchError, the same on every rank and before anything changes, for what would be lost or cannot move.
        """
        me, tensors = control.topology.rank, self._source.of(stages)
        everyone = control.all_gather_object(self._holding(stages, me), WHAT)
        ranks = {rank: everyone[rank] for rank in map(topology.get_global_rank, range(topology.world_size))}
        _check(ranks)

        self.has_begun, places = True, dict[str, Sequence[Any]]()
        for name, giver, takers in _moves(ranks):
            record = ranks[giver].tensors[name]
            if me == giver:
                _send(self._record(self._tensors[name]), control, takers)
            elif me in takers:
                receive = partial(_receive, control, giver, topology.device)
                self._take(tensors[name], tree_map_only(Layout, receive, record), topology.device)
            if name in tensors:
                places[name] = record["places"]
            elif name in self._tensors:
                self._release(self._tensors[name])

        for name in tensors.keys() & self._tensors.keys():
            if tensors[name] is not self._tensors[name]:  # a buffer that had been copied to the device
                tensors[name].data = self._tensors[name].data
        for number, optimizer in enumerate(self._optimizers):
            _regroup(optimizer, [(tensor, places[name][number]) for name, tensor in tensors.items() if places[name][number]])
        self._put_modules(stages, ranks)
        return {stage: move_to(module, topology.device) for stage, module in stages.items()}

    def _take(self, tensor: Tensor, record: Mapping[str, Any], device: torch.device) -> None:
        """Make `tensor` what was received."""
        if tensor.is_meta:
            reallocate(tensor, device)
        tensor.data = record["tensor"]
        tensor.requires_grad_(record["requires_grad"])
        tensor.grad = record["gradient"]
        for optimizer, state in zip(self._optimizers, record["states"], strict=True):
            if state:
                optimizer.state[tensor] = state

    def _release(self, tensor: Tensor) -> None:
        """Another rank has it now: have it here where this rank has all that others run."""
        tensor.grad = None
        for optimizer in self._optimizers:
            optimizer.state.pop(tensor, None)
        if self._home == META:
            reallocate(tensor, META)
        elif self._home is not None:
            tensor.data = tensor.data.to(self._home)

    def _put_modules(self, stages: Mapping[int, nn.Module], ranks: Mapping[int, Holding]) -> None:
        """What submodules have besides tensors."""
        states = {name: state for holding in ranks.values() for name, state in holding.modules.items()}
        training = ranks[min(ranks)].training
        for name, module in self._source.submodules(stages).items():
            if name not in self._modules:
                module.training = states[name].training if name in states else training
                if name in states and states[name].extra is not None:
                    module.set_extra_state(states[name].extra)
        for stage in stages.values() if self._whole is not None else ():
            stage.training = training


def _extra(module: nn.Module) -> Any:
    return None if type(module).get_extra_state is nn.Module.get_extra_state else module.get_extra_state()


def _places(optimizer: Any) -> dict[int, tuple[int, str | None]]:
    """The id of each parameter -> its group in the optimizer, and its name there, if it has one."""
    found = dict[int, tuple[int, str | None]]()
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [None] * len(group["params"]))
        found |= {id(parameter): (number, name) for parameter, name in zip(group["params"], names, strict=True)}
    return found


def _regroup(optimizer: Any, members: Sequence[tuple[Tensor, tuple[int, str | None]]]) -> None:
    """Have `members`, each with its place, in the optimizer's groups."""
    for number, group in enumerate(optimizer.param_groups):
        group["params"][:] = [tensor for tensor, (place, _) in members if place == number]
        if "param_names" in group:
            group["param_names"] = [name for _, (place, name) in members if place == number]
