"""Keyword arguments of a step that later stages take as well: they ride along what the stages hand on.

Where the user gives the stages as a list, each keyword of `step(..., mask=mask)` goes to every stage whose forward has a
parameter of that name. It travels with the output of the stage before, as far as the last stage that takes it.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from penstock.errors import MismatchError
from penstock.partition.graph_stage import GraphStage


class WithKeywords(NamedTuple):
    """What a stage hands on, and the keywords that ride along."""

    value: Any
    kwargs: dict[str, Any]


class Keywords:
    """What keywords a stage takes, and which of those that came it hands on."""

    def __init__(self, module: nn.Module, later: Collection[str] = ()) -> None:
        self.later = frozenset(later)  # taken by some later stage
        parameters = inspect.signature(bare(module).forward).parameters.values()
        self.names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        self.any = any(each.kind is each.VAR_KEYWORD for each in parameters)

    def own(self, kwargs: Mapping[str, Any], args: Sequence[Any], named: Collection[str] = ()) -> dict[str, Any]:
        """Those of `kwargs` that this stage takes, besides `args` and what it gets by name."""
        taken = {*self.names[: len(args)], *named}
        return {name: value for name, value in kwargs.items() if (self.any or name in self.names) and name not in taken}

    def first(self, kwargs: Mapping[str, Any], args: Sequence[Any]) -> dict[str, Any]:
        """As `own`, on the first stage. Raises MismatchError for a keyword that no stage takes."""
        own = self.own(kwargs, args)
        for name in kwargs:
            if name not in own and name not in self.later:
                raise MismatchError(f"no stage's forward takes {name}=: the first takes {', '.join(self.names) or 'nothing'}")
        return own

    def hand_on(self, output: Any, kwargs: Mapping[str, Any]) -> Any:
        """What goes to the next stage."""
        onward = {name: value for name, value in kwargs.items() if name in self.later}
        return WithKeywords(output, onward) if onward else output


def bare(module: nn.Module) -> nn.Module:
    """The user's module inside what torch.compile made of it."""
    while (inner := getattr(module, "_orig_mod", None)) is not None:
        module = inner
    return module


def takes(module: nn.Module) -> list[str]:
    """The keywords that a stage's forward takes; a piece of a graph gets its own straight from where they are."""
    return [] if isinstance(module, GraphStage) else Keywords(module).names
