"""Cut a model into stages."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn

from penstock.errors import MismatchError


def split(
    model: nn.Module, stages: int, cuts: Sequence[str] | None = None, example_args: tuple[Any, ...] | None = None
) -> list[nn.Module]:
    """Cut `model`, an `nn.Sequential`, into `stages` stages of consecutive layers; the layers are shared, not copied.

    Each stage is an `nn.Sequential` whose layers keep their names, so parameters are called in a stage as in the model.
    `cuts` names the first layer of every stage but the first. Without it the parameters are spread as evenly as they can
    be (the smallest sum of squares). `example_args` is for models whose cost must be measured; layers need none.
    Raises MismatchError for fewer layers than stages, unknown or unordered cuts, or a model that is no `nn.Sequential`.
    """
    if not isinstance(model, nn.Sequential):
        raise MismatchError(
            f"cannot cut a {type(model).__name__}: give an nn.Sequential, or a list with one module for each stage"
        )
    layers = list(model.named_children())
    if not 1 <= stages <= len(layers):
        raise MismatchError(f"cannot cut {len(layers)} layers into {stages} stages: use 1 to {len(layers)} stages")
    if cuts is None:
        starts = balanced([1 + sum(p.numel() for p in layer.parameters()) for _, layer in layers], stages)
    else:
        starts = _starts_of([name for name, _ in layers], cuts, stages)
    ends = [*starts[1:], len(layers)]
    return [nn.Sequential(OrderedDict(layers[start:end])) for start, end in zip(starts, ends, strict=True)]


def _starts_of(names: list[str], cuts: Sequence[str], stages: int) -> list[int]:
    for cut in cuts:
        if cut not in names:
            raise MismatchError(f"cannot cut before {cut!r}: the layers are {', '.join(names)}")
    starts = [0, *map(names.index, cuts)]
    if starts != sorted(set(starts)) or len(starts) != stages:
        raise MismatchError(
            f"cuts {list(cuts)} do not make {stages} stages: name {stages - 1} layers after the first, in order"
        )
    return starts


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Where each of `parts` consecutive parts starts so that the sum of their squared costs is smallest.

    Dynamic programming over (parts, first layer), O(parts n^2). On a tie the earlier parts are the longer ones.
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    count = len(costs)
    best = [(total[count] - total[start]) ** 2 for start in range(count)]  # one part from `start` to the end
    cut_after: list[list[int]] = []
    for rest in range(1, parts):  # `rest` further parts follow this one
        choices = [
            min(
                (((total[end] - total[start]) ** 2 + best[end], -end) for end in range(start + 1, count - rest + 1)),
                default=(float("inf"), 0),
            )
            for start in range(count)
        ]
        best = [cost for cost, _ in choices]
        cut_after.append([-end for _, end in choices])
    starts = [0]
    for cut in reversed(cut_after):
        starts.append(cut[starts[-1]])
    return starts


def names_of(stages: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """For every stage, its own name of each entry -> the name in the uncut model.

    Stages cut from one model keep its names. Where the same name stands in two stages, they are modules of their own, and
    all names begin with the number of the stage, as in `nn.Sequential(*stages)`.
    """
    every = [name for names in stages for name in names]
    unique = len(every) == len(set(every))
    return [{name: name if unique else f"{stage}.{name}" for name in names} for stage, names in enumerate(stages)]
