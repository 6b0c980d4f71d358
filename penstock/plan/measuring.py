"""Measure the layers of a model, each as the engine would run it as a stage, on the inputs of a real forward.

They run as in a step: all forwards in the order of the model, then all backwards the other way round. So a layer finds the
caches as the others leave them, and its activations are in memory of their own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from penstock import trees
from penstock.batch import pieces
from penstock.engine.activation_memory import MemoryMeasurement, StorageSet
from penstock.errors import MismatchError, PenstockError, first_line
from penstock.partition import CuttableModel, run
from penstock.partition.attributes import restore_attributes_afterwards
from penstock.partition.graph_stage import GraphStage
from penstock.partition.materialise import has_meta_tensors
from penstock.partition.unit_times import (
    RecordedUnit,
    copy_on_device,
    module_device,
    record_unit_inputs,
    replace_tensors_temporarily,
    restore_parameters_after_calls,
    timed,
)
from penstock.plan.model_profile import LayerCost, ModelProfile, ProfileSample
from penstock.randomness import preserve_generator_state
from penstock.schedule.memory import ActivationSize
from penstock.schedule.table import Action, Kind
from penstock.stage.attention import AttentionContext, attention_context
from penstock.stage.connections import StageConnections
from penstock.stage.stage import Stage
from penstock.torch_private import gradient_hooks, pretend_exporting, tree_flatten, tree_unflatten

MIN_ROUNDS, MIN_SECONDS = 3, 2.0  # a layer is measured at least so often, and all of them on until so long
MAX_ROUNDS = 50  # rounds whose median more would not change
GROUP_BYTES = 2**28  # of the parameters of layers that run one after the other, so that a model need not fit on one rank
SMALL_SAMPLE_DIVISOR = 4  # rows of the first sample for each row of the second
MIDDLE_STAGE = 1  # the number of a stage that gets messages and gives some

ActionSeconds = tuple[float, ...]  # seconds of F and B; and of F, I and W where the backward is in two


def measure(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    target: Any = None,
    device: torch.device | None = None,
    rounds: int = MIN_ROUNDS,
    seconds: float = MIN_SECONDS,
) -> ModelProfile:
    """Return the cost of every layer of `model`: seconds of F, I and W, and bytes, for a microbatch like the example.

    `example_args`, `example_kwargs`: the arguments of the forward for one microbatch; `ps.Rows(tensor, dim)` for a tensor
    whose rows are not its first dimension. A quarter of the rows is measured too, so that the plan knows how much more many
    small microbatches cost than few large ones.
    `loss_fn`, `target`: as in `step`; the cost of the loss is added to the last layer.
    `device`: where the layers run, in groups of up to 256 MB of parameters; by default the model's device, and the CPU for a
    model on the meta device.
    `rounds`: how often each layer runs at least. `seconds`: for how long all of them run, at most 50 times. Medians count.

    Parameters, gradients, buffers, attributes and random numbers stay as they are. Raises MismatchError for a model that cannot
    be cut, and for an example without rows or one that it fails on.

        layers = measure(model, (tokens,), loss_fn=loss_fn, target=target)  # with (8, 1024) tokens: for 8 rows, and for 2
    """
    cuttable = CuttableModel(model, None, example_args, example_kwargs)
    example = *cuttable.example, target
    [rows] = pieces.nonempty_split_sizes(example, "the example", 1)
    samples = []
    with restore_attributes_afterwards(model):
        for count in sorted({max(1, rows // SMALL_SAMPLE_DIVISOR), rows}):
            sizes = [count, rows - count] if count < rows else [rows]
            part = pieces.split(example, sizes)[0]
            units = record_layer_inputs(cuttable, part, loss_fn, count)
            layers = costs_in_layer_order(cuttable, units, _measure_units(units, device, rounds, seconds), part)
            samples.append(ProfileSample(count, tuple(layers)))
    return ModelProfile(tuple(samples))


class _ModelWithLoss(nn.Module):
    """A model with its loss as its last layer."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.model, self.loss = model, _LossLayer(loss_fn)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Any:
        """Return the loss, or the output if there is no loss."""
        return self.loss(self.model(*args, **kwargs), target)


class _LossLayer(nn.Module):
    def __init__(self, loss_fn: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, output: Any, target: Any) -> Any:
        return output if self.loss_fn is None else self.loss_fn(output, target)


def record_layer_inputs(
    cuttable: CuttableModel, example: tuple[Any, ...], loss_fn: Callable[[Any, Any], Tensor] | None, rows: int
) -> list[RecordedUnit]:
    """Return every layer, the loss last, with its arguments on an example of `rows` rows."""
    if not cuttable.unit_order:
        raise MismatchError(
            f"{type(cuttable.model).__name__} has no layers to plan with: give an nn.Sequential or a model of several"
        )
    model = _ModelWithLoss(cuttable.model, loss_fn)
    model.training = cuttable.model.training
    layers = {name: cuttable.model.get_submodule(name) for name in cuttable.unit_order}
    try:
        return record_unit_inputs(model, {**layers, "": model.loss}, example)
    except PenstockError:
        raise
    except Exception as error:
        problem = f"the forward of {type(cuttable.model).__name__}, or the loss, fails on {rows} rows of the example"
        raise MismatchError(f"{problem}, of which all and a quarter are measured: {first_line(error)}") from error


def _measure_units(units: Sequence[RecordedUnit], device: torch.device | None, rounds: int, seconds: float) -> list[LayerCost]:
    groups = _groups_of_units(units)
    layer_costs = []
    for group in groups:
        times = _measure_group(group, device, rounds, seconds * len(group) / len(units))
        for unit, (forward, backward, *in_two) in zip(group, times, strict=True):
            weights = min(in_two[-1], backward)
            longer = max(0.0, sum(in_two) - forward - backward)
            with _stage_of_unit(unit, device) as unit_stage:
                sizes = _measure_bytes(unit_stage)
            layer_costs.append(LayerCost(unit.name, forward, backward - weights, weights, split=longer, **sizes))
    return layer_costs


def _groups_of_units(units: Sequence[RecordedUnit]) -> list[list[RecordedUnit]]:
    """Return the units in groups of consecutive ones, of at most GROUP_BYTES of parameters or of one unit."""
    groups, group_bytes = list[list[RecordedUnit]](), 0
    for unit in units:
        unit_bytes = sum(parameter.nbytes for parameter in unit.module.parameters())
        group_bytes += unit_bytes
        if not groups or group_bytes > GROUP_BYTES:
            groups.append([])
            group_bytes = unit_bytes
        groups[-1].append(unit)
    return groups


def _measure_group(
    units: Sequence[RecordedUnit], device: torch.device | None, rounds: int, seconds: float
) -> list[ActionSeconds]:
    """Return the median seconds of each unit, over `rounds` or more; until `seconds` have passed, at most MAX_ROUNDS."""
    with ExitStack() as stack:
        stages = [stack.enter_context(_stage_of_unit(unit, device)) for unit in units]
        _run_round(stages)  # to warm up
        all_rounds, until = list[list[ActionSeconds]](), perf_counter() + seconds
        while len(all_rounds) < rounds or (perf_counter() < until and len(all_rounds) < MAX_ROUNDS):
            all_rounds.append(_run_round(stages))
    return [tuple(map(median, zip(*of_unit, strict=True))) for of_unit in zip(*all_rounds, strict=True)]


def costs_in_layer_order(
    cuttable: CuttableModel, units: Sequence[RecordedUnit], unit_costs: Sequence[LayerCost], example: tuple[Any, ...]
) -> list[LayerCost]:
    """Return the costs of the model's layers in order, the last with the loss. A unit may be several layers."""
    of_unit = {unit.module: layer for unit, layer in zip(units, unit_costs, strict=True)}
    *layers, last_layer, loss = [
        of_unit[module] for module in [*map(cuttable.model.get_submodule, cuttable.unit_order), units[-1].module]
    ]
    sums = [layer_value + loss_value for layer_value, loss_value in zip(last_layer[1:], loss[1:], strict=True)]
    last_with_loss = LayerCost._make((last_layer.name, *sums))._replace(output=last_layer.output)
    layers += [last_with_loss._replace(activation=last_layer.activation, ends=loss.activation + loss.ends)]
    for border, size in _border_bytes(cuttable, example).items():
        layers[border] = layers[border]._replace(output=size)
    return layers


def _border_bytes(cuttable: CuttableModel, example: tuple[Any, ...]) -> dict[int, float]:
    """Return the bytes over the border after each layer, skip connections to later layers included; none for a plain chain."""
    stages, carried = cuttable.cut(cuttable.unit_order[1:]), defaultdict[int, float](float)
    if not all(isinstance(stage, GraphStage) for stage in stages):
        return carried

    def count(number: int, stage: nn.Module, _: Any, output: Any) -> None:
        destinations = cast(GraphStage, stage).penstock.destinations
        for destination, message in zip(destinations, output if len(destinations) > 1 else (output,), strict=False):
            for border in range(number, destination):
                carried[border] += sum(tensor.nbytes for tensor in trees.tensors(message))

    for number, stage in enumerate(stages):
        stage.register_forward_hook(partial(count, number))
    meta = has_meta_tensors(cuttable.model)
    args, kwargs, _ = trees.map_tensors(lambda tensor: tensor.to("meta") if meta else tensor, example)
    with (
        replace_tensors_temporarily(nn.ModuleList(stages), lambda tensor: tensor.to("meta") if meta else tensor),
        nullcontext() if meta else restore_parameters_after_calls(stages),
        pretend_exporting() if meta else nullcontext(),
        preserve_generator_state(module_device(cuttable.model)),
        torch.no_grad(),
    ):
        run(stages, *args, **kwargs)
    return carried


class UnitWithTensorArguments(nn.Module):
    """A unit as a module that takes the tensors of its arguments and returns the tensors of its output that have a gradient."""

    def __init__(self, unit: RecordedUnit) -> None:
        super().__init__()
        self.unit = unit.module
        self.leaves, self.tree = tree_flatten((unit.args, dict(unit.kwargs or {})))

    def argument_tensors(self) -> list[Tensor]:
        """The tensors of the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the unit's output for arguments with these tensors."""
        next_tensor = iter(tensors)
        leaves = [next(next_tensor) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        return trees.tensors(self.unit(*args, **kwargs))


class _UnitStage(NamedTuple):
    """A unit as a stage of its own, and the tensors of its arguments."""

    stage: Stage
    inputs: list[Tensor]
    device: torch.device

    def new_message(self) -> list[list[Tensor]]:
        """Return a message with copies of the inputs, which the unit may change."""
        return [[tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.inputs]]


@contextmanager
def _stage_of_unit(unit: RecordedUnit, device: torch.device | None) -> Iterator[_UnitStage]:
    """Yield the unit as a stage, with stand-ins for its parameters and inputs, whose gradients are their own."""
    hooks = [gradient_hooks(parameter) for parameter in unit.module.parameters()]  # run in W, and take their time
    with copy_on_device(unit, device) as (device, copy):
        for parameter, parameter_hooks in zip(unit.module.parameters(), hooks, strict=True):
            for hook in parameter_hooks:
                parameter.register_hook(hook)
        module = UnitWithTensorArguments(unit)
        inputs = trees.map_tensors(copy, module.argument_tensors())
        stage = Stage(MIDDLE_STAGE, module, device, connections=StageConnections((MIDDLE_STAGE - 1,), ()))
        stage.begin_step()  # as before any step: it learns which parameters there are
        yield _UnitStage(stage, inputs, device)


def _run_round(units: Sequence[_UnitStage]) -> list[ActionSeconds]:
    """Run a microbatch through all units with whole backwards, then one with split ones. Return the seconds of each unit."""
    seconds = list[list[ActionSeconds]]()
    for split in (False, True):
        forwards = [
            timed(partial(unit.stage.forward, 0, unit.new_message(), split_backward=split), unit.device) for unit in units
        ]
        backwards = []
        for unit, (_, output) in zip(reversed(units), reversed(forwards), strict=True):
            gradients = [torch.ones_like(tensor) for tensor in output if tensor.requires_grad]
            backward, _ = timed(partial(unit.stage.backward, 0, gradients), unit.device)
            weights, _ = timed(partial(unit.stage.backward_weight, 0), unit.device) if split else (0.0, None)
            backwards.append((backward, weights))
        seconds.append([(forward, *rest) for (forward, _), rest in zip(forwards, reversed(backwards), strict=True)])
    return [(*whole[:2], *in_two) for whole, in_two in zip(*seconds, strict=True)]


class _KeyValueGradientBytes(AttentionContext):
    """Counts the bytes of keys and values that get a gradient."""

    num_bytes = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        """Return the attention."""
        self.num_bytes += sum(tensor.nbytes for tensor in (key, value) if tensor.requires_grad)
        return super().attend(query, key, value, *args)


def _measure_bytes(unit: _UnitStage) -> dict[str, float]:
    """Return the costs of a layer that are bytes, by the names of `LayerCost`."""
    stage = unit.stage
    measured = MemoryMeasurement({MIDDLE_STAGE: stage})
    acts = measured.wrap_actions(
        {
            Kind.F: lambda action, values: stage.forward(0, values, split_backward=True),
            Kind.I: lambda action, values: stage.backward(0, values),
            Kind.W: lambda action, values: stage.backward_weight(0),
        }
    )
    with attention_context(counter := _KeyValueGradientBytes()):
        output = acts[Kind.F](Action(Kind.F, MIDDLE_STAGE, 0), unit.new_message())
    gradients = [torch.ones_like(tensor) for tensor in output if tensor.requires_grad]
    carried, ends = sum(tensor.nbytes for tensor in output), StorageSet(output)
    del output
    kept_output = ends.alive_subset()
    acts[Kind.I](Action(Kind.I, MIDDLE_STAGE, 0), gradients)
    del gradients
    acts[Kind.W](Action(Kind.W, MIDDLE_STAGE, 0), None)
    size = measured.sizes.get(MIDDLE_STAGE, ActivationSize(0, 0))  # none of a compiled layer
    trained, frozen = parameter_bytes(stage.module)
    shared = kept_output.freed_bytes()
    return {
        "activation": max(0, size.act - shared),
        "keep": size.keep,
        "parameters": trained,
        "output": carried,
        "ends": shared,
        "keys_and_values": counter.num_bytes,
        "frozen": frozen,
    }


def parameter_bytes(module: nn.Module) -> tuple[int, int]:
    """Return the bytes of a module's parameters: of those that are trained, and of the others."""
    trained, frozen = (
        sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad == is_trained)
        for is_trained in (True, False)
    )
    return trained, frozen
