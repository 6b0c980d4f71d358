"""Cutting: a model as a whole, where it can be cut, and the stages it is cut into."""

import difflib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from penstock.errors import MismatchError
from penstock.partition import graph_stage
from penstock.partition.balance import PARAMETERS, Balance
from penstock.partition.model_graph import ModelGraph
from penstock.partition.unit_times import measure, record
from penstock.partition.units import units_of


def split(
    model: nn.Module,
    stages: int,
    cuts: Sequence[str] | None = None,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> list[nn.Module]:
    """Cut `model` into `stages` stages; its parts are shared, not copied, and keep their names.

    `cuts` names the submodule that every stage but the first begins with. Without it, the slowest stage is made as fast as
    any cut can make it: by the time that forward and backward of every unit take on `example_args` and `example_kwargs`, one
    microbatch, or without an example by parameters.

    A model that is no `nn.Sequential` is followed through its forward: with an example by `torch.export`, which needs one
    that decides nothing by the values of tensors; without, symbolically by `torch.fx`, which also needs one that decides
    nothing by shapes, and leaves every parameter of the forward that has a default at that. Sizes of an example stay open,
    except those of 1 that are not rows; what is no tensor is taken to be always the same. The first stage refuses a batch for
    which the example does not speak. The stages are run one after the other by `run`, or by `Pipeline`.

    Raises MismatchError for fewer units than stages, unknown or unordered cuts, and a forward that cannot be followed.
    """
    whole = Whole(model, cuts, example_args, example_kwargs)
    return whole.cut(whole.starts(stages))


def whole(
    model: nn.Module | Sequence[nn.Module],
    cuts: Sequence[str] | None,
    example_args: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
) -> "Whole | None":
    """`model` if it is one to be cut: an `nn.Sequential`, or one with cuts or an example. None if it is stages already."""
    asked = cuts is not None or example_args is not None or example_kwargs is not None
    if isinstance(model, nn.Sequential) or (isinstance(model, nn.Module) and asked):
        return Whole(model, cuts, example_args, example_kwargs)
    if asked:
        raise MismatchError("cuts= and example_args= are for a whole model, but the stages were given as a list")
    return None


def run(stages: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """The output of the whole model, its stages, as `split` made them, run one after the other."""
    messages: dict[tuple[int, int], Any] = {}
    output: Any = None
    for index, stage in enumerate(stages):
        sources = stage.penstock.sources if isinstance(stage, graph_stage.GraphStage) else range(max(0, index - 1), index)
        output = stage(*[messages.pop((source, index)) for source in sources]) if index else stage(*args, **kwargs)
        takers = stage.penstock.takers if isinstance(stage, graph_stage.GraphStage) else (index + 1,)
        given = output if len(takers) > 1 else (output,)
        messages |= {(index, taker): message for taker, message in zip(takers, given, strict=False)}
    return output


@dataclass
class Whole:
    """A model that is to be cut, and where that is possible."""

    model: nn.Module
    cuts: Sequence[str] | None = None
    example_args: Sequence[Any] | None = None
    example_kwargs: Mapping[str, Any] | None = None
    balance: Balance | None = None  # of the cut that `starts` found

    def __post_init__(self) -> None:
        self.has_example = self.example_args is not None or self.example_kwargs is not None
        names = [name for name, _ in self.model.named_modules() if name]
        for cut in self.cuts or ():
            if cut not in names:
                near = difflib.get_close_matches(cut, names, n=3) or names[:5]
                raise MismatchError(f"cannot cut before {cut!r}: {type(self.model).__name__} has {', '.join(near)}, ..")
        self._traced: ModelGraph | None = None
        chain = type(self.model).forward is nn.Sequential.forward
        if chain and self.model._modules.keys() >= set(self.cuts or ()):
            self.order = list(self.model._modules)
        else:
            self._traced = self._followed()
            self.order = self._traced.order()

    @property
    def measures(self) -> bool:
        """Whether the cut depends on measured times, which differ from one process to the next."""
        return self.cuts is None and self.has_example

    def _followed(self) -> ModelGraph:
        from penstock.partition import export, trace  # torch.export takes a second to import

        units = units_of(self.model, self.cuts or ())
        if self.has_example:
            return export.exported(self.model, units, self.example_args or (), self.example_kwargs or {})
        return trace.symbolic(self.model, units)

    def starts(self, stages: int) -> list[str]:
        """The unit that each of `stages` stages but the first begins with: of the cuts, or of the best balance."""
        if self.cuts is None:
            if not 1 <= stages <= len(self.order):
                count = len(self.order)
                raise MismatchError(f"cannot cut {count} layers into {stages} stages: use 1 to {count} stages")
            self.balance = self._balance(stages)
            return [self.order[start] for start in self.balance.starts[1:]]
        starts = [next((unit for unit in self.order if unit == cut or unit.startswith(f"{cut}.")), cut) for cut in self.cuts]
        for cut, start in zip(self.cuts, starts, strict=True):
            if start not in self.order:
                raise MismatchError(f"cannot cut before {cut!r}: the forward of {type(self.model).__name__} does not call it")
        places = [0, *map(self.order.index, starts)]
        if places != sorted(set(places)) or len(places) != stages:
            wanted = f"name {stages - 1} layers after the first, in the order in which they run"
            raise MismatchError(f"cuts {list(self.cuts)} do not make {stages} stages: {wanted}")
        return starts

    def _balance(self, stages: int) -> Balance:
        modules = {name: self.model.get_submodule(name) for name in self.order}
        if not self.has_example:
            sizes = [1 + sum(parameter.numel() for parameter in module.parameters()) for module in modules.values()]
            return Balance.best(self.order, sizes, stages, PARAMETERS)
        once = {module: name for name, module in reversed(modules.items())}
        units = {name: module for name, module in modules.items() if once[module] == name}
        recorded = record(self.model, units, self.example_args or (), self.example_kwargs or {})
        times = dict(zip([unit.module for unit in recorded], measure(recorded), strict=True))
        return Balance.best(self.order, [times[module] for module in modules.values()], stages)

    def cut(self, starts: Sequence[str]) -> list[nn.Module]:
        """The stages that begin so. Raises MismatchError if a parameter or buffer of the model is in none of them."""
        if self._traced is None:
            layers = _layers(self.model)
            places = [0, *map(self.order.index, starts), len(layers)]
            stages: list[nn.Module] = [nn.Sequential(OrderedDict(layers[start:end])) for start, end in pairwise(places)]
        else:
            stages = list(graph_stage.cut(self._traced, starts))
        for stage in stages:
            stage.training = self.model.training
        lost = self.model.state_dict().keys() - {name for stage in stages for name in stage.state_dict()}
        if lost:
            raise MismatchError(f"the cut loses {', '.join(sorted(lost))}")
        return stages


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of an `nn.Sequential`; one that stands in several places has several names, unlike in `named_children`."""
    return [(name, layer) for name, layer in model._modules.items() if layer is not None]


def names_of(stages: Sequence[Mapping[str, str]], whole: bool = False) -> list[dict[str, str]]:
    """For every stage, its own name of each entry -> the name in the uncut model, from the plain names (see `plain`).

    Stages cut from one model (`whole`) keep its names. So do others, unless the same name stands in two stages: then they are
    modules of their own, and all names begin with the number of the stage, as in `nn.Sequential(*stages)`.
    """
    every = [name for names in stages for name in names.values()]
    keep = whole or len(every) == len(set(every))
    return [{own: name if keep else f"{stage}.{name}" for own, name in names.items()} for stage, names in enumerate(stages)]


def plain(module: nn.Module) -> dict[str, str]:
    """The names of a stage's state -> the same without what torch.compile adds to them."""
    return {name: name.replace("_orig_mod.", "") for name in module.state_dict()}
