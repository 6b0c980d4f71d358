"""Cutting: a model as a whole, where it can be cut, and the stages it is cut into."""

import difflib
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import MismatchError, PenstockError, is_whole_number
from penstock.partition import graph_stage
from penstock.partition.attributes import AttributeSnapshot, attribute_reads_recorded, attributes_restored
from penstock.partition.balance import PARAMETERS, Balance
from penstock.partition.graph_stage import GraphStage
from penstock.partition.model_graph import ModelGraph, first_line
from penstock.partition.rows import unwrap_tree
from penstock.partition.unit_times import measure_unit_seconds, record_unit_inputs
from penstock.torch_private import children_by_name, has_hooks, strip_compiled_prefix

_SHARED = "_penstock_shared"  # an attribute of a stage


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
    elements of its `ModuleList`, `ModuleDict` and `Sequential` containers and the modules beside these. The stages share its
    parameters and buffers, which are not copied, and keep their names.
    `stages`: how many, 1 to the number of layers or units.
    `cuts`: the name of the submodule that each stage but the first begins with, `stages - 1` of them in the order in which
    they run. A name inside a unit cuts the unit there. Without `cuts`, the cut is chosen whose slowest stage is the fastest:
    by the seconds that every unit takes on the example, or without one by its parameters.
    `example_args`, `example_kwargs`: the forward's arguments for one microbatch. Later batches may have tensors of other sizes,
    except where the example has a size of 1 that is not its rows. Arguments that are no tensors must stay the same. The
    first stage refuses a batch that does not fit the example.

    A model that is no `nn.Sequential` is traced, in training and in evaluation. With an example `torch.export` does it: the
    forward must not decide by the values of tensors. Without one `torch.fx` does it: the forward must not decide by shapes
    either, and its parameters with a default keep that.
    Raises MismatchError for more stages than units, unknown or unordered cuts, and a forward that cannot be traced.
    """
    whole = CuttableModel(model, cuts, example_args, example_kwargs)
    return whole.cut(whole.choose_starts(stages))


def run(stages: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """The output of the whole model, its `stages`, as `split` made them, run one after the other.

    `args`, `kwargs`: the arguments of the model's forward. Raises MismatchError if they do not fit the example of `split`.
    """
    messages: dict[tuple[int, int], Any] = {}
    output: Any = None
    for index, stage in enumerate(stages):
        graph = stage.penstock if isinstance(stage, GraphStage) else None
        sources, takers = (graph.sources, graph.destinations) if graph else ([index - 1], [index + 1])
        output = stage(*[messages.pop((source, index)) for source in sources]) if index else stage(*args, **kwargs)
        given = output if len(takers) > 1 else (output,)
        messages |= {(index, taker): message for taker, message in zip(takers, given, strict=False)}
    return output


def as_cuttable(
    model: nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module],
    cuts: Sequence[str] | None,
    example_args: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    rows_dim: int = 0,
) -> "CuttableModel | None":
    """`model` if it is one to be cut: an `nn.Sequential`, or one with cuts or an example. None if it is stages already."""
    asked = any(each is not None for each in (cuts, example_args, example_kwargs))
    if isinstance(model, nn.Sequential) or (asked and isinstance(model, nn.Module) and type(model) is not nn.ModuleList):
        return CuttableModel(model, cuts, example_args, example_kwargs, rows_dim)
    if asked:
        given = "by number" if isinstance(model, Mapping) else "as a list"
        raise MismatchError(f"cuts= and example_args= are for a whole model, but the stages were given {given}")
    return None


class CuttableModel:
    """A model that is to be cut; the arguments are those of `split`.

    `order`: the names of the layers or units it can be cut before, in the order in which they run.
    `attributes`: what the forwards around the units read of their modules' attributes, which is compared later.
    `balance`: how even the cut is that `starts` chose; None where it was given by names.
    `example`: the arguments and keywords that the forward is called with, as far as they were given, `Rows` and `Replicated`
    around them if they were. `rows_dim`: the dimension of the other tensors' rows.
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
        self.model, self.cuts = model, _checked_cuts(model, cuts)
        cuts = self.cuts
        self.balance: Balance | None = None
        self._has_example = example_args is not None or example_kwargs is not None
        example_args = (example_args,) if isinstance(example_args, Tensor) else example_args
        if not isinstance(example_args or (), Sequence):
            raise MismatchError(f"example_args are a tuple of the forward's arguments, got {type(example_args).__name__}")
        if not isinstance(example_kwargs or {}, Mapping):
            raise MismatchError(f"example_kwargs are a dict of the forward's keywords, got {type(example_kwargs).__name__}")
        self.example, self.rows_dim = (tuple(example_args or ()), dict(example_kwargs or {})), rows_dim
        chain = type(model).forward is nn.Sequential.forward and children_by_name(model).keys() >= set(cuts or ())
        if chain or not self._has_example:  # an export calls them
            _check_whole(model)
        self._times: dict[nn.Module, float] = {}  # of the units, once they are measured
        with attributes_restored(model) as changed, attribute_reads_recorded(model) as read:
            self._graph = None if chain else self._followed()
        self.unit_order = list(children_by_name(model)) if self._graph is None else self._graph.unit_order()
        self.read_attributes = AttributeSnapshot(model, self.unit_order, () if chain else read - changed)

    @property
    def depends_on_measurement(self) -> bool:
        """Whether the cut depends on measured times, which differ from one process to the next."""
        return self.cuts is None and self._has_example

    def _followed(self) -> ModelGraph:
        from penstock.partition import export, trace  # torch.export takes a second to import

        units = find_units(self.model, self.cuts or ())
        if not self._has_example:
            return trace.trace_graph(self.model, units)
        try:
            return export.export_graph(self.model, units, *self.example, self.rows_dim)
        except MismatchError:  # perhaps for what hooks inside units have taken out of them, as transformers' router logits
            opened = find_units(self.model, [*(self.cuts or ()), *hooked(self.model)])
            if opened.keys() == units.keys():
                raise
        return export.export_graph(self.model, opened, *self.example, self.rows_dim)

    def choose_starts(self, stages: int, device: torch.device | None = None) -> list[str]:
        """The unit that each of `stages` stages but the first begins with: of the cuts, or of the best balance.

        Times are measured on `device`, where the stages will run; by default where the model is.
        """
        if not is_whole_number(stages):
            raise MismatchError(f"a model is cut into a whole number of stages, not {stages!r}")
        if self.cuts is not None:
            return self._named(self.cuts, stages)
        if not 1 <= stages <= len(self.unit_order):
            count = len(self.unit_order)
            raise MismatchError(f"cannot cut {count} layers into {stages} stages: use 1 to {count} stages")
        with attributes_restored(self.model):
            self.balance = self._best(stages, device)
        return [self.unit_order[start] for start in self.balance.starts[1:]]

    def with_cuts(self, cuts: Sequence[str] | None) -> "CuttableModel":
        """The same model with other cuts; its forward is followed again only if they make other units of it."""
        cuts = _checked_cuts(self.model, cuts)
        if self._graph is None:
            is_alike = set(cuts or ()) <= set(self.unit_order)
        else:
            is_alike = find_units(self.model, cuts or ()).keys() == find_units(self.model, self.cuts or ()).keys()
        if not is_alike:
            args, kwargs = self.example if self._has_example else (None, None)
            return CuttableModel(self.model, cuts, args, kwargs, self.rows_dim)
        other = copy(self)
        other.cuts, other.balance = cuts, None
        return other

    def _named(self, cuts: Sequence[str], stages: int) -> list[str]:
        starts = [next((unit for unit in self.unit_order if unit == cut or unit.startswith(f"{cut}.")), cut) for cut in cuts]
        for cut, start in zip(cuts, starts, strict=True):
            if start not in self.unit_order:
                raise MismatchError(f"cannot cut before {cut!r}: the forward of {type(self.model).__name__} does not call it")
        places = [0, *map(self.unit_order.index, starts)]
        if places != sorted(set(places)) or len(places) != stages:
            wanted = f"name {stages - 1} layers after the first, in the order in which they run"
            raise MismatchError(f"cuts {list(cuts)} do not make {stages} stages: {wanted}")
        return starts

    def _best(self, stages: int, device: torch.device | None) -> Balance:
        modules = {name: self.model.get_submodule(name) for name in self.unit_order}
        if not self._has_example:
            sizes = [1 + sum(parameter.numel() for parameter in module.parameters()) for module in modules.values()]
            return Balance.best(self.unit_order, sizes, stages, PARAMETERS)
        if not self._times:
            self._times = self._measured(modules, device)
        return Balance.best(self.unit_order, [self._times[module] for module in modules.values()], stages)

    def _measured(self, modules: dict[str, nn.Module], device: torch.device | None) -> dict[nn.Module, float]:
        first = {module: name for name, module in reversed(modules.items())}  # a layer may stand in several places
        try:
            units = record_unit_inputs(self.model, {name: module for module, name in first.items()}, *unwrap_tree(self.example))
        except PenstockError:
            raise
        except Exception as error:
            told = f"the forward of {type(self.model).__name__} fails on the example ({first_line(error)})"
            raise MismatchError(f"{told}: give a microbatch that it takes") from error
        return dict(zip([unit.module for unit in units], measure_unit_seconds(units, device), strict=True))

    def cut(self, starts: Sequence[str]) -> list[nn.Module]:
        """The stages that begin so. Raises MismatchError if a parameter or buffer of the model is in none of them, and for
        running statistics that several would move.
        """
        if self._graph is None:
            layers = list(children_by_name(self.model).items())
            places = [0, *map(self.unit_order.index, starts), len(layers)]
            stages: list[nn.Module] = [nn.Sequential(OrderedDict(layers[start:end])) for start, end in pairwise(places)]
        else:
            stages = list(graph_stage.cut_graph(self._graph, starts))
        for stage in stages:
            stage.training = self.model.training
        lost = self.model.state_dict().keys() - {name for stage in stages for name in stage.state_dict()}
        if lost:
            raise MismatchError(f"the cut loses {', '.join(sorted(lost))}")
        _check_statistics(stages)
        _note_shared(stages)
        return stages


def _check_whole(model: nn.Module) -> None:
    if has_hooks(model) or "forward" in vars(model):
        raise MismatchError(
            f"a hook of the whole {type(model).__name__}, or a forward put in the place of its own, would run on none of its"
            " stages: give it to one of its parts"
        )


def _check_statistics(stages: Sequence[nn.Module]) -> None:
    homes = defaultdict[nn.Module, dict[int, str]](dict)  # a module with running statistics -> stage -> its name there
    for stage, module in enumerate(stages):
        for name, each in module.named_modules():
            if getattr(each, "running_mean", None) is not None:
                homes[each][stage] = name
    for found in homes.values():
        if len(found) > 1:
            name, where = next(iter(found.values())), " and ".join(map(str, found))
            raise MismatchError(f"{name} runs in stages {where}, which cannot share its running statistics: cut elsewhere")


def _note_shared(stages: Sequence[nn.Module]) -> None:
    owners = defaultdict[int, list[int]](list)  # id of a parameter -> its stages
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            owners[id(parameter)].append(number)
    for stage in stages:
        numbers = {name: owners[id(parameter)] for name, parameter in stage.named_parameters()}
        vars(stage)[_SHARED] = {name: owned for name, owned in numbers.items() if len(owned) > 1}


def shared_parameters(stage: nn.Module) -> Mapping[str, list[int]]:
    """Names of parameters that `split` has put into several stages, `stage` among them -> these stages."""
    return vars(stage).get(_SHARED, {})


def _checked_cuts(model: nn.Module, cuts: Sequence[str] | None) -> list[str] | None:
    """`cuts` as a list. Raises MismatchError unless they are names of submodules."""
    cuts = [cuts] if isinstance(cuts, str) else cuts
    if not isinstance(cuts, Sequence | None):
        raise MismatchError(f"cuts are names of submodules, where each stage but the first begins, got {cuts!r}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for cut in cuts or ():
        if cut not in names:
            near = difflib.get_close_matches(str(cut), names, n=3) or names[:5]
            raise MismatchError(f"cannot cut before {cut!r}: {type(model).__name__} has {', '.join(near)}, ..")
    return None if cuts is None else list(cuts)


def model_names_of_stages(stages: Sequence[Mapping[str, str]], whole: bool = False) -> list[dict[str, str]]:
    """For every stage, its own name of each entry -> the name in the uncut model, from the plain names (see `plain`).

    Stages cut from one model (`whole`) keep its names. So do others, unless the same name stands in two stages: then they are
    modules of their own, and all names begin with the number of the stage, as in `nn.Sequential(*stages)`.
    """
    every = [name for names in stages for name in names.values()]
    keep = whole or len(every) == len(set(every))
    return [{own: name if keep else f"{stage}.{name}" for own, name in names.items()} for stage, names in enumerate(stages)]


def uncompiled_names(module: nn.Module) -> dict[str, str]:
    """The names of a stage's state -> the same without what torch.compile adds to them."""
    return {name: strip_compiled_prefix(name) for name in module.state_dict()}


UNCALLED = (nn.ModuleList, nn.ModuleDict)  # containers without a forward
CONTAINERS = (*UNCALLED, nn.Sequential)


def find_units(model: nn.Module, cuts: Collection[str] = ()) -> dict[str, nn.Module]:
    """Names -> units, in the order of their definition.

    The elements of the outermost `ModuleList`, `ModuleDict` and `Sequential` modules are units (of a list in a list, its
    elements), and so is every submodule that neither contains such a container nor is inside one. A cut inside a unit makes
    units of its children instead.
    """
    seen: set[int] = set()
    return dict(_units("", model, cuts, seen, element=False))


def hooked(model: nn.Module) -> list[str]:
    """The names of the modules in which somebody listens."""
    return [name for name, module in model.named_modules() if name and has_hooks(module)]


def _units(
    name: str, module: nn.Module, cuts: Collection[str], seen: set[int], element: bool
) -> Iterator[tuple[str, nn.Module]]:
    """`element`: an element of a container, or a part of one, which stays whole unless a cut goes through it."""
    if id(module) in seen:  # under its first name, as in named_parameters()
        return
    seen.add(id(module))
    contains = any(isinstance(each, CONTAINERS) for each in module.modules())
    whole = (element and not isinstance(module, UNCALLED)) or not contains
    if name and whole and not any(cut.startswith(name + ".") for cut in cuts):
        yield name, module
        return
    for child_name, child in module.named_children():
        inside = element or isinstance(module, CONTAINERS)
        yield from _units(f"{name}.{child_name}" if name else child_name, child, cuts, seen, inside)
