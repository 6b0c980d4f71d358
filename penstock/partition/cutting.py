"""A model that can be cut: its units, where the stages begin, and the stages."""

import difflib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import MismatchError, PenstockError, first_line, is_whole_number
from penstock.partition.attributes import (
    AttributeChange,
    AttributeSnapshot,
    attribute_in_next_call,
    hidden_attribute,
    restore_attributes_afterwards,
    values_in_next_call,
)
from penstock.partition.balance import PARAMETERS, SECONDS, Balance, check_stage_count
from penstock.partition.graph_cutting import cut_graph
from penstock.partition.graph_stage import GraphStage
from penstock.partition.model_graph import ModelGraph
from penstock.partition.unit_times import measure_unit_seconds, record_unit_inputs
from penstock.rows import unwrap_tree
from penstock.torch_private import children_by_name, has_hooks, strip_compiled_prefix

_SHARED_ATTRIBUTE = "_penstock_shared"  # of a stage


def split(
    model: nn.Module,
    stages: int,
    cuts: Sequence[str] | None = None,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> list[nn.Module]:
    """Cut `model` into `stages` stages, to be run one after the other by `run`, or by `Pipeline`.

        first, second = split(model, 2, cuts=["layers.6"])              # the second stage begins with layers.6
        stages = split(model, 4, example_args=(tokens[:8],))            # where four stages are fastest
        output = run(stages, tokens)                                    # the bits of model(tokens)

    `model`: an `nn.Sequential`, which is cut between its layers, or any other module, which is cut between its units: the
    elements of its `ModuleList`, `ModuleDict` and `Sequential` containers, and the modules outside of these. The stages have
    its parameters and buffers themselves, not copies, under their names.
    `stages`: their number, 1 to the number of layers or units.
    `cuts`: the name of the submodule that each stage but the first begins with, `stages - 1` of them in the order in which
    they run. A name inside a unit cuts the unit there. Without `cuts`, the slowest stage is made as fast as possible: by the
    seconds that every unit takes on the example, or without one by its parameters. Of frozen ones a third counts for the
    forward, and a third for the backward to the input, which units before the first trained parameter do not have.
    `example_args`, `example_kwargs`: the forward's arguments for one microbatch. Later batches may have tensors of other sizes,
    except where the example has a size of 1 that is not its rows. Arguments that are no tensors must stay the same. The first
    stage raises MismatchError for a batch that does not fit the example.

    A model that is no `nn.Sequential` is traced, in training and in evaluation. With an example `torch.export` does it: the
    forward must not decide by the values of tensors. Without one `torch.fx` does it: the forward must not decide by shapes
    either, and its parameters with a default keep that.
    Raises MismatchError for more stages than units, unknown or unordered cuts, and a forward that cannot be traced.
    """
    cuttable = CuttableModel(model, cuts, example_args, example_kwargs)
    return cuttable.cut(cuttable.choose_cuts(stages))


def run(stages: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Run the `stages` that `split` made one after the other, and return the output of the whole model.

    `args`, `kwargs`: the arguments of the model's forward. Raises MismatchError if they do not fit the example of `split`.
    """
    messages: dict[tuple[int, int], Any] = {}
    output: Any = None
    for index, stage in enumerate(stages):
        graph = stage.penstock if isinstance(stage, GraphStage) else None
        sources, destinations = (graph.sources, graph.destinations) if graph else ([index - 1], [index + 1])
        output = stage(*[messages.pop((source, index)) for source in sources]) if index else stage(*args, **kwargs)
        outputs = output if len(destinations) > 1 else (output,)
        messages |= {(index, destination): message for destination, message in zip(destinations, outputs, strict=False)}
    return output


def as_cuttable(
    model: nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module],
    cuts: Sequence[str] | None,
    example_args: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    rows_dim: int = 0,
) -> "CuttableModel | None":
    """Return `model` as a `CuttableModel` if it is an `nn.Sequential` or has cuts or an example; None if it is stages."""
    has_arguments = any(argument is not None for argument in (cuts, example_args, example_kwargs))
    is_module = isinstance(model, nn.Module) and type(model) is not nn.ModuleList
    if isinstance(model, nn.Sequential) or (has_arguments and is_module):
        return CuttableModel(model, cuts, example_args, example_kwargs, rows_dim)  # type: ignore[arg-type]
    if has_arguments:
        form = "by number" if isinstance(model, Mapping) else "as a list"
        raise MismatchError(f"cuts= and example_args= are for a whole model, but the stages were given {form}")
    return None


class CuttableModel:
    """A model that is to be cut; the arguments are those of `split`.

    `unit_order`: the names of the layers or units it can be cut before, in the order in which they run.
    `attributes`: those of the modules around the units, which are compared later if the forward reads them.
    `trace_context`: a context for the model while it is traced once more.
    `balance`: of the cut that `choose_cuts` chose; None if the cuts were given by name.
    `example`: the arguments and keywords of the forward, as far as they were given, in `Rows` and `Replicated` if they were.
    `rows_dim`: the dimension of the other tensors' rows.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[str] | None = None,
        example_args: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        rows_dim: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise MismatchError(f"a model that is to be cut is one nn.Module, not a {type(model).__name__}")
        self.model, self.rows_dim = model, rows_dim
        self.cuts = _cuts_as_submodule_names(model, cuts)
        self.balance: Balance | None = None
        self._unit_seconds: dict[nn.Module, float] = {}  # once they are measured
        self.trace_context: Callable[[nn.Module], AbstractContextManager[None]] = lambda _: nullcontext()  # of a later trace

        # The example.
        self._has_example = example_args is not None or example_kwargs is not None
        example_args = (example_args,) if isinstance(example_args, Tensor) else example_args
        if not isinstance(example_args or (), Sequence):
            raise MismatchError(f"example_args are a tuple of the forward's arguments, got {type(example_args).__name__}")
        if not isinstance(example_kwargs or {}, Mapping):
            raise MismatchError(f"example_kwargs are a dict of the forward's keywords, got {type(example_kwargs).__name__}")
        self.example = (tuple(example_args or ()), dict(example_kwargs or {}))

        # The graph, unless the model is a Sequential that is cut between its layers.
        is_plain_sequential = type(model).forward is nn.Sequential.forward
        is_sequential = is_plain_sequential and children_by_name(model).keys() >= set(self.cuts or ())
        if is_sequential or not self._has_example:  # an export runs hooks of the model, and what replaces its forward
            _check_no_model_hooks(model)
        with restore_attributes_afterwards(model) as changes:
            self._graph = None if is_sequential else self._export_or_trace_graph()
        self.unit_order = list(children_by_name(model)) if self._graph is None else self._graph.unit_order()
        self._graph_text = "" if self._graph is None else self._graph.text()
        changed_attributes = set(changes)
        if self._graph is not None:
            changed_attributes |= {(id(change.owner), change.name) for change in self._graph.changes}
            with restore_attributes_afterwards(model):
                self._check_keeps_no_state(self._graph)
        is_read = None if is_sequential else self._graph_reads
        self.attributes = AttributeSnapshot(model, self.unit_order, changed_attributes, is_read)

    def _export_or_trace_graph(self, with_hint: bool = True) -> ModelGraph:
        from penstock.partition import export, trace  # torch.export takes a second to import

        units = find_units(self.model, self.cuts or ())
        if not self._has_example:
            return trace.trace_graph(self.model, units)
        try:
            return export.export_graph(self.model, units, *self.example, self.rows_dim)
        except MismatchError as error:
            # Perhaps hooks inside units pass values out of them, as for transformers' router logits: cut these units up.
            smaller_units = find_units(self.model, [*(self.cuts or ()), *_hooked_module_names(self.model)])
            if smaller_units.keys() == units.keys():
                if with_hint and (hint := self._hint_to_leave_out_the_example(units)):
                    raise MismatchError(f"{error}; or {hint}") from error
                raise
        return export.export_graph(self.model, smaller_units, *self.example, self.rows_dim)

    def _check_keeps_no_state(self, graph: ModelGraph) -> None:
        """Raise MismatchError if the forward reads what its last call has left: its graph would have that of the first call."""
        for change in graph.changes:
            for value in values_in_next_call(change, lambda tensor: id(tensor) in graph.constants):
                with attribute_in_next_call(change, value):
                    if not self._makes_same_graph():
                        raise MismatchError(self._state_text(change))

    def _makes_same_graph(self) -> bool:
        """Whether the forward, traced once more, has the graph it had."""
        try:
            return self._export_or_trace_graph(with_hint=False).text() == self._graph_text
        except Exception:  # whatever the forward makes of a value that it finds then
            return False

    def _state_text(self, change: AttributeChange) -> str:
        paths = (path for path, module in self.model.named_modules() if module is change.owner and path)
        owner = change.owner if isinstance(change.owner, type) else type(change.owner)
        return (
            f"the forward of {type(self.model).__name__} sets {next(paths, owner.__name__)}.{change.name}, and reads it in its "
            "next call, but where the model is cut the code between its layers is traced once: keep it in a layer, whose "
            "forward runs in every step, or give a list with one module for each stage"
        )

    def _hint_to_leave_out_the_example(self, units: Mapping[str, nn.Module]) -> str:
        """Return as text the cuts that do without an example, which looks into the units; nothing if those do not work."""
        from penstock.partition import trace

        try:
            names = trace.trace_graph(self.model, units).unit_order()
        except Exception:  # of any kind: the user's forward runs
            return ""
        cuts, what = self.cuts, "its layers are not looked into then"
        if cuts is None:
            if len(names) < 2:
                return ""
            cuts, what = [names[len(names) // 2]], f"a name for each stage but the first; {what}"
        return f"leave out the example and give cuts={cuts} alone ({what})"

    def _graph_reads(self, module: nn.Module, name: str) -> bool:
        """Whether the forward's graph depends on an attribute: it is traced once more without it."""
        with self.trace_context(self.model), restore_attributes_afterwards(self.model), hidden_attribute(module, name):
            return not self._makes_same_graph()

    def with_cuts(self, cuts: Sequence[str] | None) -> "CuttableModel":
        """Return the same model with other cuts. Its forward is traced again only if they make other units of it."""
        cuts = _cuts_as_submodule_names(self.model, cuts)
        if self._graph is None:
            has_same_units = set(cuts or ()) <= set(self.unit_order)
        else:
            has_same_units = find_units(self.model, cuts or ()).keys() == find_units(self.model, self.cuts or ()).keys()
        if not has_same_units:
            args, kwargs = self.example if self._has_example else (None, None)
            return CuttableModel(self.model, cuts, args, kwargs, self.rows_dim)
        copied = copy(self)
        copied.cuts, copied.balance = cuts, None
        return copied

    @property
    def is_exported(self) -> bool:
        """Whether the units ran, on tensors without values, when the model was traced."""
        return self._graph is not None and self._has_example

    # -- where the stages start ----------------------------------------------------------------------------------------

    @property
    def depends_on_measurement(self) -> bool:
        """Whether the cut depends on measured times, which differ from one process to the next."""
        return self.cuts is None and self._has_example

    def choose_cuts(self, stages: int, device: torch.device | None = None) -> list[str]:
        """Return the unit that each of `stages` stages but the first begins with: by the cuts, or for the best balance.

        Times are measured on `device`, where the stages will run; by default on the model's.
        """
        if not is_whole_number(stages):
            raise MismatchError(f"a model is cut into a whole number of stages, not {stages!r}")
        if self.cuts is not None:
            return self._starts_of_cuts(self.cuts, stages)
        check_stage_count(len(self.unit_order), stages)
        costs, cost_kind = self.unit_costs(device)
        self.balance = Balance.best(self.unit_order, costs, stages, cost_kind)
        return [self.unit_order[start] for start in self.balance.starts[1:]]

    def _starts_of_cuts(self, cuts: Sequence[str], stages: int) -> list[str]:
        starts = [next((unit for unit in self.unit_order if unit == cut or unit.startswith(f"{cut}.")), cut) for cut in cuts]
        for cut, start in zip(cuts, starts, strict=True):
            if start not in self.unit_order:
                raise MismatchError(f"cannot cut before {cut!r}: the forward of {type(self.model).__name__} does not call it")
        positions = [0, *map(self.unit_order.index, starts)]
        if positions != sorted(set(positions)) or len(positions) != stages:
            count = "1 layer" if stages == 2 else f"{stages - 1} layers"
            raise MismatchError(
                f"cuts {list(cuts)} do not make {stages} stages: name {count} after the first, in the order in which they run"
            )
        return starts

    def unit_costs(self, device: torch.device | None = None) -> tuple[list[float], str]:
        """Return the cost of every unit, and SECONDS if they are measured on the example; without one PARAMETERS.

        They are measured once, on `device`; by default on the model's.
        """
        modules = {name: self.model.get_submodule(name) for name in self.unit_order}
        if not self._has_example:
            return _passes_over_parameters([*modules.values()]), PARAMETERS
        if not self._unit_seconds:
            with restore_attributes_afterwards(self.model):
                self._unit_seconds = self._measure_units(modules, device)
        return [self._unit_seconds[module] for module in modules.values()], SECONDS

    def _measure_units(self, modules: dict[str, nn.Module], device: torch.device | None) -> dict[nn.Module, float]:
        try:
            units = record_unit_inputs(self.model, modules, *unwrap_tree(self.example))
        except PenstockError:
            raise
        except Exception as error:
            raise MismatchError(
                f"the forward of {type(self.model).__name__} fails on the example ({first_line(error)}): give a microbatch "
                "that it takes"
            ) from error
        return dict(zip([unit.module for unit in units], measure_unit_seconds(units, device), strict=True))

    # -- the stages ----------------------------------------------------------------------------------------------------

    def cut(self, starts: Sequence[str]) -> list[nn.Module]:
        """Return the stages that begin with these units.

        Raises MismatchError if a parameter or buffer of the model is in none of them, and if several stages would update the
        same running statistics.
        """
        if self._graph is None:
            layers = list(children_by_name(self.model).items())
            borders = [0, *map(self.unit_order.index, starts), len(layers)]
            stages: list[nn.Module] = [nn.Sequential(OrderedDict(layers[start:end])) for start, end in pairwise(borders)]
        else:
            stages = list(cut_graph(self._graph, starts))
        for stage in stages:
            stage.training = self.model.training

        lost_names = self.model.state_dict().keys() - {name for stage in stages for name in stage.state_dict()}
        if lost_names:
            names, model = ", ".join(sorted(lost_names)), type(self.model).__name__
            raise MismatchError(f"the cut loses {names}, which {model} has besides its layers: register it in one of them")
        _check_running_statistics_in_one_stage(stages)
        _record_shared_parameters(stages)
        return stages


def _passes_over_parameters(layers: Sequence[nn.Module]) -> list[float]:
    """Return the cost of each layer: its parameters, if all are trained; of frozen ones a third for each pass over them.

    A pass is the forward, and the backward to the input, unless the layer and all before it are frozen.
    """
    costs: list[float] = []
    has_input_gradient = False
    for layer in layers:
        trained = sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
        frozen = sum(parameter.numel() for parameter in layer.parameters()) - trained
        has_input_gradient = has_input_gradient or trained > 0
        costs.append(1 + trained + frozen * (2 if has_input_gradient else 1) / 3)
    return costs


def _check_no_model_hooks(model: nn.Module) -> None:
    if has_hooks(model) or "forward" in vars(model):
        raise MismatchError(
            f"a hook of the whole {type(model).__name__}, or a forward put in the place of its own, would run on none of its"
            " stages: give it to one of its parts"
        )


def _check_running_statistics_in_one_stage(stages: Sequence[nn.Module]) -> None:
    names_by_stage = defaultdict[nn.Module, dict[int, str]](dict)  # a module with running statistics -> stage -> its name
    for stage, module in enumerate(stages):
        for name, submodule in module.named_modules():
            if getattr(submodule, "running_mean", None) is not None:
                names_by_stage[submodule][stage] = name
    for names in names_by_stage.values():
        if len(names) > 1:
            name, where = next(iter(names.values())), " and ".join(map(str, names))
            raise MismatchError(f"{name} runs in stages {where}, which cannot share its running statistics: cut elsewhere")


def _record_shared_parameters(stages: Sequence[nn.Module]) -> None:
    owners = defaultdict[int, list[int]](list)  # id of a parameter -> its stages
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            owners[id(parameter)].append(number)
    for stage in stages:
        stages_by_name = {name: owners[id(parameter)] for name, parameter in stage.named_parameters()}
        shared = {name: numbers for name, numbers in stages_by_name.items() if len(numbers) > 1}
        vars(stage)[_SHARED_ATTRIBUTE] = shared


def stages_by_shared_parameter(stage: nn.Module) -> Mapping[str, list[int]]:
    """Return the parameters of `stage` that `split` has put into other stages too: name -> all stages that have it."""
    return vars(stage).get(_SHARED_ATTRIBUTE, {})


def _cuts_as_submodule_names(model: nn.Module, cuts: Sequence[str] | None) -> list[str] | None:
    """Return `cuts` as a list. Raises MismatchError unless they are names of submodules."""
    cuts = [cuts] if isinstance(cuts, str) else cuts
    if not isinstance(cuts, Sequence | None):
        raise MismatchError(f"cuts are names of submodules, where each stage but the first begins, got {cuts!r}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for cut in cuts or ():
        if cut not in names:
            suggestions = difflib.get_close_matches(str(cut), names, n=3) or names[:5]
            raise MismatchError(f"cannot cut before {cut!r}: {type(model).__name__} has {', '.join(suggestions)}, ..")
    return None if cuts is None else list(cuts)


# -- names -------------------------------------------------------------------------------------------------------------


def model_names_of_stages(stages: Sequence[Mapping[str, str]], is_cut: bool = False) -> list[dict[str, str]]:
    """Return for every stage its name of each entry -> the name in the uncut model.

    `stages`: their `state_names_without_compile_prefix`.

    Stages that were cut from one model (`is_cut`) keep its names. So do others, unless the same name is in two stages: then
    they are separate modules, and all names begin with the number of the stage, as in `nn.Sequential(*stages)`.
    """
    all_names = [name for names in stages for name in names.values()]
    keep = is_cut or len(all_names) == len(set(all_names))
    return [
        {stage_name: name if keep else f"{stage}.{name}" for stage_name, name in names.items()}
        for stage, names in enumerate(stages)
    ]


def state_names_without_compile_prefix(module: nn.Module) -> dict[str, str]:
    """Return the names of a stage's state -> the same without the prefix that torch.compile adds."""
    return {name: strip_compiled_prefix(name) for name in module.state_dict()}


# -- units -------------------------------------------------------------------------------------------------------------

CONTAINERS_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (*CONTAINERS_WITHOUT_FORWARD, nn.Sequential)


def find_units(model: nn.Module, cuts: Collection[str]) -> dict[str, nn.Module]:
    """Return the units of `model` by name, in the order of their definition.

    The elements of the outermost `ModuleList`, `ModuleDict` and `Sequential` modules are units (of a list in a list, its
    elements), and so is every submodule that neither contains one of these nor is inside one. A cut inside a unit makes units
    of its children instead.
    """
    visited_ids: set[int] = set()
    return dict(_find_units("", model, cuts, visited_ids, in_container=False))


def _find_units(
    name: str, module: nn.Module, cuts: Collection[str], visited_ids: set[int], in_container: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units inside `module`. `in_container`: so it is a unit, unless a cut goes through it."""
    if id(module) in visited_ids:  # under its first name, as in named_parameters()
        return
    visited_ids.add(id(module))
    has_containers = any(isinstance(submodule, CONTAINERS) for submodule in module.modules())
    is_unit = (in_container and not isinstance(module, CONTAINERS_WITHOUT_FORWARD)) or not has_containers
    if name and is_unit and not any(cut.startswith(name + ".") for cut in cuts):
        yield name, module
        return
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        yield from _find_units(path, child, cuts, visited_ids, in_container or isinstance(module, CONTAINERS))


def _hooked_module_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if name and has_hooks(module)]
