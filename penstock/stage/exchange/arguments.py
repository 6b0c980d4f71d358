"""What a stage's forward is called with: what the stage before gave, and the keywords of the step that it takes.

Where the user gives the stages as a list, each keyword of `step(.., mask=mask)` goes to every stage whose forward has a
parameter of that name. It travels with the output of the stage before, as far as the last stage that takes it.
A stage of a graph takes its messages as they are: the cut has seen to it that each brings what is needed.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from torch import nn

from penstock.errors import MismatchError
from penstock.partition.graph_stage import GraphStage
from penstock.torch_private import uncompiled


class WithKeywords(NamedTuple):
    """What a stage hands on, and the keywords that ride along."""

    value: Any
    keywords: dict[str, Any]


class Arguments(NamedTuple):
    """Of one call of a stage's forward."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    keywords: Mapping[str, Any] = {}  # that came; those that later stages take ride along


class Signature:
    """What the forward of `module` takes; `later` are the keywords that some stage after it takes."""

    def __init__(self, module: nn.Module, later: Collection[str] = ()) -> None:
        self._of_graph, self._later = isinstance(module, GraphStage), frozenset(later)
        parameters = inspect.signature(uncompiled(module).forward).parameters.values()
        self.keywords = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        kinds = [each.kind.name for each in parameters]
        self._most = (
            inf if self._of_graph or "VAR_POSITIONAL" in kinds else sum(kind.startswith("POSITIONAL") for kind in kinds)
        )
        self._any = "VAR_KEYWORD" in kinds
        self._by_name_only = {*kinds} <= {"KEYWORD_ONLY", "VAR_KEYWORD"}
        self._several = len(parameters) > 1 or "VAR_POSITIONAL" in kinds or self._by_name_only

    def of_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """On the first stage. Raises MismatchError for more arguments than it takes, and for a keyword that no stage takes."""
        if len(args) > self._most:
            told = f"step() was given {len(args)} inputs, but the first stage's forward takes {self._most}"
            raise MismatchError(f"{told}; the target is given by name, target=..")
        if self._of_graph or not kwargs:
            return Arguments(args, kwargs)
        own = self._own(kwargs, args)
        if unknown := [name for name in kwargs if name not in own and name not in self._later]:
            takes = ", ".join(self.keywords) or "nothing"
            raise MismatchError(f"no stage's forward takes {unknown[0]}=: the first takes {takes}")
        return Arguments(args, own, kwargs)

    def of_values(self, values: Sequence[Any]) -> Arguments:
        """From what other stages gave.

        A forward of several parameters gets a tuple or list spread over them, a dict by name; else the value is one.
        """
        if self._of_graph or (not self._several and type(values[0]) is not WithKeywords):
            return Arguments(values, {})
        value, keywords = values[0] if type(values[0]) is WithKeywords else (values[0], {})
        args, kwargs = self._spread(value)
        if keywords:
            kwargs = kwargs | self._own(keywords, args, kwargs)
        return Arguments(args, kwargs, keywords)

    def hand_on(self, output: Any, keywords: Mapping[str, Any]) -> Any:
        """What goes to the next stage: the output, and those of the keywords that came which a later one takes."""
        onward = {name: value for name, value in keywords.items() if name in self._later}
        return WithKeywords(output, onward) if onward else output

    def _spread(self, value: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        if self._several and isinstance(value, tuple | list):
            return value, {}
        if self._several and isinstance(value, Mapping) and (self._by_name_only or value.keys() <= set(self.keywords)):
            return (), dict(value)
        return (value,), {}

    def _own(self, keywords: Mapping[str, Any], args: Sequence[Any], named: Collection[str] = ()) -> dict[str, Any]:
        """Those of `keywords` that this stage takes, besides `args` and what it gets by name."""
        given = {*self.keywords[: len(args)], *named}
        return {name: each for name, each in keywords.items() if (self._any or name in self.keywords) and name not in given}


def takes(module: nn.Module) -> list[str]:
    """The keywords that a stage's forward takes; a stage of a graph gets its own straight from where they are."""
    return [] if isinstance(module, GraphStage) else Signature(module).keywords
