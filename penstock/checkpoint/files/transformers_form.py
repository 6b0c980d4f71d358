"""Tensors that transformers keeps in files in another form than in memory: made as `from_pretrained` makes them."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.cut import Origin


class Source(NamedTuple):
    """What a tensor is made of: the names of tensors in the files, and how it is made of those."""

    places: list[str]
    made: Callable[[list[Tensor]], Tensor]

    def of(self, there: Callable[[str], Tensor]) -> Tensor:
        """The tensor, where those in the files are `there`."""
        return self.made([there(place) for place in self.places])


def sources(origin: Origin, names: Iterable[str]) -> dict[str, Source] | None:
    """What each tensor of the model is made of, if transformers says so; `names`: of the files' tensors."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
        from transformers.modeling_utils import PreTrainedModel
    except ImportError:  # it is not there, or so old that it has no such forms
        return None
    if not issubclass(origin.kind, PreTrainedModel):
        return None
    with torch.device("meta"):
        model: Any = origin.kind(origin.config)
    rules, state = get_model_conversion_mapping(model), model.state_dict()
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings: list[Any] = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    pieces: dict[str, dict[str, str | None]] = {}  # a tensor, the first of those made together -> names, and what they match
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        pieces.setdefault(target, {})[name] = pattern
    found: dict[str, Source] = {}
    for first, patterns in pieces.items():
        converter = converter_of.get(next(iter(patterns.values())) or "")
        if converter is None:
            found[first] = Source(list(patterns), same)
            continue
        for target in converter.target_patterns:
            name = first.replace(converter.target_patterns[0], target)
            found[name] = Source(list(patterns), partial(_converted, converter, model, first, patterns, name))
    return found


def same(tensors: list[Tensor]) -> Tensor:
    """The one tensor that there is."""
    return tensors[0]


def _converted(
    converter: Any, model: Any, first: str, patterns: Mapping[str, str | None], name: str, tensors: list[Tensor]
) -> Tensor:
    """The tensor `name`, one of those that `converter` makes."""
    converter = deepcopy(converter)  # it keeps what it is given until it converts that
    for (place, pattern), tensor in zip(patterns.items(), tensors, strict=True):
        converter.add_tensor(first, place, pattern, tensor)
    made = converter.convert(first, model=model, config=model.config)[name]
    return made[0] if isinstance(made, list) else made
