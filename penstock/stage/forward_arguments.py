"""The arguments that a stage's forward is called with: from the batch on the first stage, on others from their messages.

Where the user gives the stages as a list, each keyword of `step(.., mask=mask)` goes to every stage whose forward has a
parameter of that name. It travels with the output of the stage before, as far as the last stage that takes it. A stage that was
cut from a model's graph takes its messages unchanged: the cut has put into each what is needed.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from torch import nn

from penstock.errors import MismatchError
from penstock.partition.graph_stage import GraphStage
from penstock.torch_private import unwrap_compiled


class ValueWithKeywords(NamedTuple):
    """A message to the next stage, with the step's keywords that later stages take."""

    value: Any
    keywords: dict[str, Any]


class Arguments(NamedTuple):
    """The arguments of one call of a stage's forward."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    keywords: Mapping[str, Any] = {}  # all that arrived with them, also those for later stages


class ForwardSignature:
    """The parameters of a stage's forward. `later_keywords`: the keywords that some stage after it takes."""

    def __init__(self, module: nn.Module, later_keywords: Collection[str] = ()) -> None:
        self._is_graph, self._later_keywords = isinstance(module, GraphStage), frozenset(later_keywords)
        parameters = inspect.signature(unwrap_compiled(module).forward).parameters.values()
        kinds = [parameter.kind.name for parameter in parameters]

        self.keywords = [
            parameter.name for parameter in parameters if parameter.kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")
        ]
        takes_any_number = self._is_graph or "VAR_POSITIONAL" in kinds
        self._max_args = inf if takes_any_number else sum(kind.startswith("POSITIONAL") for kind in kinds)
        self._takes_any_keyword = "VAR_KEYWORD" in kinds
        self._takes_only_keywords = {*kinds} <= {"KEYWORD_ONLY", "VAR_KEYWORD"}
        self._takes_several = len(parameters) > 1 or "VAR_POSITIONAL" in kinds or self._takes_only_keywords

    def arguments_from_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the first stage's arguments, from a microbatch of the step's.

        Raises MismatchError for more arguments than the forward takes, and for a keyword that no stage takes.
        """
        if len(args) > self._max_args:
            raise MismatchError(
                f"step() was given {len(args)} inputs, but the first stage's forward takes {self._max_args}; the target is "
                "given by name, target=.."
            )
        if self._is_graph or not kwargs:
            return Arguments(args, kwargs)

        first_kwargs = self._select_taken_keywords(kwargs, args)
        if unknown := [name for name in kwargs if name not in first_kwargs and name not in self._later_keywords]:
            keywords = ", ".join(self.keywords) or "nothing"
            raise MismatchError(f"no stage's forward takes {unknown[0]}=: the first takes {keywords}")
        return Arguments(args, first_kwargs, kwargs)

    def arguments_from_values(self, values: Sequence[Any]) -> Arguments:
        """Return another stage's arguments, from the `values` that arrived.

        A forward of several parameters gets the elements of a tuple or list, and those of a dict by name; any other value is
        its one argument.
        """
        if self._is_graph or (not self._takes_several and type(values[0]) is not ValueWithKeywords):
            return Arguments(values, {})
        value, keywords = values[0] if type(values[0]) is ValueWithKeywords else (values[0], {})
        args, kwargs = self._spread_over_parameters(value)
        if keywords:
            kwargs = kwargs | self._select_taken_keywords(keywords, args, kwargs)
        return Arguments(args, kwargs, keywords)

    def add_later_keywords(self, output: Any, keywords: Mapping[str, Any]) -> Any:
        """Return what goes to the next stage: the output, with those of `keywords` that a later stage takes."""
        later = {name: value for name, value in keywords.items() if name in self._later_keywords}
        return ValueWithKeywords(output, later) if later else output

    def _spread_over_parameters(self, value: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        if self._takes_several and isinstance(value, tuple | list):
            return value, {}
        by_name = self._takes_several and isinstance(value, Mapping)
        if by_name and (self._takes_only_keywords or value.keys() <= set(self.keywords)):
            return (), dict(value)
        return (value,), {}

    def _select_taken_keywords(
        self, keywords: Mapping[str, Any], args: Sequence[Any], kwargs: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return those of `keywords` that this forward takes, without the parameters that `args` and `kwargs` already set."""
        set_already = {*self.keywords[: len(args)], *kwargs}
        return {
            name: value
            for name, value in keywords.items()
            if (self._takes_any_keyword or name in self.keywords) and name not in set_already
        }


def keyword_names(module: nn.Module) -> list[str]:
    """Return the keywords that a stage's forward takes; none for a stage of a graph, whose messages have all it needs."""
    return [] if isinstance(module, GraphStage) else ForwardSignature(module).keywords
