"""The same model in another cut: every tensor is sent from a rank that has it to the ranks that will run it.

Its gradient and its optimizer state are sent with it; first, what has changed of the attributes of submodules, as a drop-out
rate. Tensors are sent one after the other, not through a disk, and are
released where they were: a rank needs memory for its old and its new stages, and no more. First all ranks compare what they
have; until then nothing changes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.comms.control_group import ControlGroup
from penstock.comms.encoding import view_as_bytes
from penstock.comms.topology import CPU, Topology
from penstock.engine.model_partition import AllStages, ModelPartition, OriginalModel
from penstock.engine.optimizers import (
    check_has_no_remote_parameters,
    check_same_group_options,
    group_options,
    optimizer_title,
)
from penstock.errors import MismatchError, format_count, require_equal, warn_user
from penstock.options import PipelineOptions
from penstock.partition import CuttableModel
from penstock.partition.attributes import attributes_to_send
from penstock.partition.graph_stage import move_stage_to_device
from penstock.partition.materialise import META, reallocate_in_place
from penstock.plan.recut import NOT_CUT
from penstock.torch_private import has_gradient_hooks, has_hooks, tree_leaves, tree_map_only

WAIT_REASON = "to rebuild the pipeline"
MAX_MESSAGE_BYTES = 2**28

# -- what ranks send to each other before the move ------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorLayout:
    """The properties of a tensor from which another rank allocates one like it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # without gaps
    on_cpu: bool  # as an optimizer's step counts are, wherever the model is


class ModuleState(NamedTuple):
    """The state of a submodule besides its tensors."""

    training: bool
    has_hooks: bool
    extra_state: Any  # of its `get_extra_state()`; None without one
    attributes: Mapping[str, Any]  # of `attributes_to_send`, those that differ from the first pipeline's


class RankInventory(NamedTuple):
    """The state that a rank has, and the state that it will need."""

    tensors: Mapping[str, Any]  # name -> `Redistribution._tensor_state` of it, with a TensorLayout in place of each tensor
    modules: Mapping[str, ModuleState]  # by name
    needed_tensors: Mapping[str, bool]  # name -> whether this rank's copy has hooks of its gradient
    needed_modules: Mapping[str, bool]  # name -> whether this rank's copy has hooks
    training: bool  # the mode of its first stage
    optimizers: Sequence[tuple[str, Sequence[Mapping[str, str]]]]  # class, and the options of each group as text


def _checked_dense_layout(name: str, tensor: Tensor) -> TensorLayout:
    """Return the layout of a tensor. Raise MismatchError for one that cannot be sent as its bytes."""
    if hasattr(tensor, "placements"):
        raise MismatchError(
            "rebuild() moves whole tensors, and parameters are in shards on several ranks (fsdp, tp): save a checkpoint, build "
            "the other pipeline, and resume from it"
        )
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        kind = type(tensor).__name__ if tensor.layout == torch.strided else f"tensor of layout {tensor.layout}"
        raise MismatchError(f"{name} is a {kind}: rebuild() moves plain tensors only")
    dense = torch.empty_like(tensor, device=META)
    return TensorLayout(tensor.dtype, tuple(tensor.shape), dense.stride(), tensor.is_cpu)


def _check_inventories(inventories: Mapping[int, RankInventory]) -> None:
    """Raise MismatchError if optimizers differ, a needed tensor is nowhere, or a hook would be lost. By rank."""
    expected_optimizers = next(iter(inventories.values())).optimizers
    classes_and_groups = {
        rank: ", ".join(f"{kind} of {format_count(len(groups), 'group')}" for kind, groups in inventory.optimizers) or "none"
        for rank, inventory in inventories.items()
    }
    advice = "; make the same on all ranks, with empty groups where need be"
    require_equal(classes_and_groups, "have different optimizers", advice=advice)
    kinds = [kind for kind, _ in expected_optimizers]
    for rank, inventory in inventories.items():
        for place, ((_, expected_groups), (_, groups)) in enumerate(
            zip(expected_optimizers, inventory.optimizers, strict=True)
        ):
            for number, (expected_options, options) in enumerate(zip(expected_groups, groups, strict=True)):
                check_same_group_options(expected_options, options, number, rank, optimizer_title(place, kinds))

    tensors = {name: state for inventory in inventories.values() for name, state in inventory.tensors.items()}
    modules = {name: state for inventory in inventories.values() for name, state in inventory.modules.items()}
    for rank, inventory in inventories.items():
        for name, has_hook in inventory.needed_tensors.items():
            if name not in tensors:
                raise MismatchError(f"rank {rank} needs {name}, which no rank has: build a new Pipeline of the model")
            if name not in inventory.tensors:
                _check_same_hooks(f"the gradient of {name}", has_hook, tensors[name]["has_hooks"], rank)
        for name, has_hook in inventory.needed_modules.items():
            if name in modules and name not in inventory.modules:
                _check_same_hooks(name, has_hook, modules[name].has_hooks, rank)


def _check_same_hooks(name: str, receiver_has_hook: bool, sender_has_hook: bool, rank: int) -> None:
    if receiver_has_hook != sender_has_hook:
        place = "where it is now, and none on" if sender_has_hook else "where it is not used now, on"
        raise MismatchError(
            f"{name} has a hook {place} rank {rank}, which will have it, and hooks do not move: take it off, rebuild, and give "
            "it to the new pipeline's"
        )


def _tensor_moves(inventories: Mapping[int, RankInventory]) -> Iterator[tuple[str, int, list[int]]]:
    """Return the name of every tensor, its sender and its receivers, in the same order on every rank."""
    for name in dict.fromkeys(name for inventory in inventories.values() for name in inventory.tensors):
        owners = [rank for rank, inventory in inventories.items() if name in inventory.tensors]
        needing = [rank for rank, inventory in inventories.items() if name in inventory.needed_tensors]
        yield name, owners[0], [rank for rank in needing if rank not in owners]


def _warn_if_trained_tensors_move(inventories: Mapping[int, RankInventory]) -> None:
    """Warn that an optimizer from before does not get parameters that arrive on its rank, nor their state."""
    moved = [
        name
        for name, sender, receivers in _tensor_moves(inventories)
        if receivers and inventories[sender].tensors[name]["requires_grad"]
    ]
    if moved:
        warn_user(
            f"rebuild() moves {len(moved)} trained parameters between ranks ({moved[0]}{', ..' if len(moved) > 1 else ''}) "
            "and was given no optimizer: one from before trains only what stayed on its rank; give optimizer=, or make a new "
            "one of the new pipeline's parameters()"
        )


def _send_tensors(state: Any, control: ControlGroup, receivers: Sequence[int]) -> None:
    """Send every tensor of a state, as `_tensor_state` returns it, to all receivers, in pieces."""
    if not receivers:
        return
    for tensor in [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]:
        dense = tensor.detach().to(CPU, copy=True)
        pieces = view_as_bytes(dense.as_strided((dense.numel(),), (1,))).split(MAX_MESSAGE_BYTES)
        for send in [control.send(piece, rank, WAIT_REASON) for piece in pieces for rank in receivers if len(piece)]:
            send.wait()


def _receive_tensor(control: ControlGroup, sender: int, device: torch.device, layout: TensorLayout) -> Tensor:
    dense = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=CPU)
    for piece in view_as_bytes(dense.as_strided((dense.numel(),), (1,))).split(MAX_MESSAGE_BYTES):
        if len(piece):
            control.receive(piece, sender, WAIT_REASON)
    return dense.to(CPU if layout.on_cpu else device)


# -- the move -------------------------------------------------------------------------------------------------------------


class Redistribution:
    """The source of the next pipeline's stages: the state of the `stages` that the ranks run now, which it moves there.

    `original`: what the first pipeline was made of. `optimizers`: of this rank's parameters; their groups and state become
    those of the parameters that it will have. `first_attributes`: of submodules by name, when the first pipeline was made.
    `cuts_tokens`: whether the pipeline before cut its tokens. `was_trained`: whether the program has an optimizer, even if it
    gives none.
    """

    def __init__(
        self,
        original: OriginalModel,
        stages: Mapping[int, nn.Module],
        optimizers: Sequence[Any],
        first_attributes: Mapping[str, Mapping[str, Any]],
        cuts_tokens: bool,
        was_trained: bool,
    ) -> None:
        self.cut_tokens_before = cuts_tokens
        self.first_attributes, self._original, self._was_trained = first_attributes, original, was_trained
        self._stages, self._optimizers = stages, optimizers
        self._tensors, self._modules = original.stage_tensors(stages), original.stage_submodules(stages)
        self._group_positions = [_group_positions(optimizer) for optimizer in optimizers]
        remote = original.remote_tensors(stages).values()
        self._remote_device = next((tensor.device for tensor in remote), None)  # where this rank has what others run
        self.has_started = False  # whether tensors may have changed

    def cut(self, options: PipelineOptions) -> CuttableModel | None:
        """Return the model for the next pipeline to cut, at its `cuts` if given; None if its stages stay as they are."""
        cuttable = self._original.cuttable
        if cuttable is None and options.cuts is not None:
            raise MismatchError(NOT_CUT)
        return None if cuttable is None else cuttable.with_cuts(options.cuts)

    @torch.no_grad()
    def fill_stages(
        self,
        control: ControlGroup,
        topology: Topology,
        original: OriginalModel,
        partition: ModelPartition,
        all_stages: AllStages,
        changed_keys: Collection[tuple[str, str]],
    ) -> tuple[dict[int, nn.Module], set[str]]:
        """Fill the stages that this rank will run with the state that the ranks have, and return them on its device.

        Also returns the names of tensors without values: none. All ranks call it. Raises MismatchError, the same on every rank
        and before anything changes, for what would be lost or cannot be sent.
        """
        # 1. Compare what all ranks have and need.
        rank, stages = control.topology.rank, partition.modules
        tensors = self._original.stage_tensors(stages)
        everyone = control.all_gather_value(self._inventory(stages, rank), WAIT_REASON)
        inventories = {job_rank: everyone[job_rank] for job_rank in map(topology.get_global_rank, range(topology.world_size))}
        _check_inventories(inventories)

        if self._was_trained and not self._optimizers and rank == 0:
            _warn_if_trained_tensors_move(inventories)

        # 2. Move one tensor after the other.
        self.has_started, positions = True, dict[str, Sequence[Any]]()
        for name, sender, receivers in _tensor_moves(inventories):
            state = inventories[sender].tensors[name]
            if rank == sender:
                _send_tensors(self._tensor_state(self._tensors[name]), control, receivers)
            elif rank in receivers:
                receive = partial(_receive_tensor, control, sender, topology.device)
                self._set_tensor_state(tensors[name], tree_map_only(TensorLayout, receive, state), topology.device)

            if name in tensors:
                positions[name] = state["group_positions"]
            elif name in self._tensors:
                self._release_tensor(self._tensors[name])

        # 3. Put everything in its place: buffers that were copied to the device, optimizers' groups, modes, extra state.
        for name in tensors.keys() & self._tensors.keys():
            if tensors[name] is not self._tensors[name]:
                tensors[name].data = self._tensors[name].data
        for number, optimizer in enumerate(self._optimizers):
            members = [(tensor, positions[name][number]) for name, tensor in tensors.items() if positions[name][number]]
            _set_group_members(optimizer, members)
        self._restore_module_states(stages, inventories)
        return {stage: move_stage_to_device(module, topology.device) for stage, module in stages.items()}, set()

    def _tensor_state(self, tensor: Tensor) -> dict[str, Any]:
        """Return one of this rank's tensors with all that is sent with it."""
        return {
            "tensor": tensor,
            "gradient": tensor.grad,
            "requires_grad": tensor.requires_grad,
            "grad_dtype": tensor.grad_dtype,
            "has_hooks": has_gradient_hooks(tensor),
            "group_positions": [positions.get(id(tensor)) for positions in self._group_positions],
            "optimizer_states": [dict(optimizer.state.get(tensor, {})) for optimizer in self._optimizers],
        }

    def _inventory(self, next_stages: Mapping[int, nn.Module], rank: int) -> RankInventory:
        """Return what this rank has, and needs for `next_stages`. Raise MismatchError for what cannot be sent."""
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        for optimizer in self._optimizers:
            check_has_no_remote_parameters(optimizer, names, rank)

        states = {name: self._tensor_state(tensor) for name, tensor in self._tensors.items()}
        layouts = {name: tree_map_only(Tensor, partial(_checked_dense_layout, name), state) for name, state in states.items()}
        if self._original.cuttable is not None and any(map(has_hooks, self._stages.values())):
            raise MismatchError(
                f"rank {rank}: a hook of a whole stage would be lost, since there will be other stages: take it off, rebuild, "
                "and give it to the new pipeline's"
            )

        needed_tensors = self._original.stage_tensors(next_stages).items()
        needed_modules = self._original.stage_submodules(next_stages).items()
        return RankInventory(
            layouts,
            {
                name: ModuleState(
                    module.training, has_hooks(module), _extra_state(module), self._changed_attributes(name, module)
                )
                for name, module in self._modules.items()
            },
            {name: has_gradient_hooks(tensor) for name, tensor in needed_tensors},
            {name: has_hooks(module) for name, module in needed_modules},
            next(iter(self._stages.values())).training,
            [
                (type(optimizer).__name__, [group_options(group) for group in optimizer.param_groups])
                for optimizer in self._optimizers
            ],
        )

    def _changed_attributes(self, name: str, module: nn.Module) -> dict[str, Any]:
        first, missing = self.first_attributes.get(name, {}), object()
        return {key: value for key, value in attributes_to_send(module).items() if first.get(key, missing) != value}

    def _set_attributes(self, module: nn.Module, name: str, changed: Mapping[str, Any]) -> None:
        current, missing = attributes_to_send(module), object()
        for key, value in {**self.first_attributes.get(name, {}), **changed}.items():
            if current.get(key, missing) != value:
                vars(module)[key] = deepcopy(value)

    def _set_tensor_state(self, tensor: Tensor, state: Mapping[str, Any], device: torch.device) -> None:
        """Give `tensor` the values, gradient and optimizer state that were received."""
        if tensor.is_meta:
            reallocate_in_place(tensor, device)
        tensor.data = state["tensor"]
        tensor.requires_grad_(state["requires_grad"])
        tensor.grad_dtype = state["grad_dtype"]
        tensor.grad = state["gradient"]
        for optimizer, optimizer_state in zip(self._optimizers, state["optimizer_states"], strict=True):
            if optimizer_state:
                optimizer.state[tensor] = optimizer_state

    def _release_tensor(self, tensor: Tensor) -> None:
        """Drop gradient and optimizer state of a tensor that another rank has now, and keep it with what others run."""
        tensor.grad = None
        for optimizer in self._optimizers:
            optimizer.state.pop(tensor, None)
        if self._remote_device == META:
            reallocate_in_place(tensor, META)
        elif self._remote_device is not None:
            tensor.data = tensor.data.to(self._remote_device)

    def _restore_module_states(self, stages: Mapping[int, nn.Module], inventories: Mapping[int, RankInventory]) -> None:
        """Give submodules that came from other ranks their mode, attributes and extra state."""
        states = {name: state for inventory in inventories.values() for name, state in inventory.modules.items()}
        training = inventories[min(inventories)].training
        for name, module in self._original.stage_submodules(stages).items():
            if name not in self._modules:
                module.training = states[name].training if name in states else training
                self._set_attributes(module, name, states[name].attributes if name in states else {})
                if name in states and states[name].extra_state is not None:
                    module.set_extra_state(states[name].extra_state)
        if self._original.cuttable is not None:
            for stage in stages.values():
                stage.training = training


def _extra_state(module: nn.Module) -> Any:
    return None if type(module).get_extra_state is nn.Module.get_extra_state else module.get_extra_state()


def _group_positions(optimizer: Any) -> dict[int, tuple[int, str | None]]:
    """Map the id of each parameter to its group in the optimizer, and to its name there if it has one."""
    positions = dict[int, tuple[int, str | None]]()
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [None] * len(group["params"]))
        positions |= {id(parameter): (number, name) for parameter, name in zip(group["params"], names, strict=True)}
    return positions


def _set_group_members(optimizer: Any, members: Sequence[tuple[Tensor, tuple[int, str | None]]]) -> None:
    """Replace the parameters of the optimizer's groups by `members`: tensors, with the group and name of each."""
    for number, group in enumerate(optimizer.param_groups):
        group["params"][:] = [tensor for tensor, (position, _) in members if position == number]
        if "param_names" in group:
            group["param_names"] = [name for _, (position, name) in members if position == number]
