"""What people try on a pipeline because modules have it, and what to do instead, in a sentence each."""

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from penstock.engine.redistribute import FIXED
from penstock.errors import PenstockError

_MOVED = "its stages are on pipe.topology.device, which ps.comms.init_distributed(device=..) chooses"
_CAST = "give it a model of that dtype, or call step() under torch.autocast"
_EACH = "its modules on this rank are pipe.stages.values(), call that of each"
INSTEAD = {
    **dict.fromkeys(("to", "to_empty"), f"{_MOVED}; for another dtype, {_CAST}"),
    **dict.fromkeys(("cuda", "cpu", "device"), _MOVED),
    **dict.fromkeys(("half", "bfloat16", "float", "double", "type", "dtype"), _CAST),
    **dict.fromkeys(("modules", "named_modules", "children", "named_children", "buffers", "named_buffers"), _EACH),
    **dict.fromkeys(("apply", "requires_grad_", "compile", "get_submodule", "get_parameter", "register_forward_hook"), _EACH),
    "module": "pipe.stages has this rank's modules, and pipe.state_dict() the uncut model's names",
    "forward": "pipe.step(inputs, target=..) trains on a batch, pipe.eval(inputs) computes its outputs",
    "backward": "step() does forward and backward; gradients are in the parameters' .grad",
}
NEAR = 0.8  # similarity from which on a name is taken for a misspelt option


class NoModule:
    """A pipeline is no module: its parts are on several ranks, and a forward by itself would leave the others waiting."""

    _options: Sequence[str] = ()  # names that cannot be set, once the pipeline is built

    if not TYPE_CHECKING:  # which finds by itself what a pipeline has not

        def __setattr__(self, name: str, value: Any) -> None:
            """Raises AttributeError for an option of the pipeline, or for a new name that is nearly one."""
            known = name.startswith("_") or name in vars(self)
            near = [name] if known else difflib.get_close_matches(name, self._options, 1, NEAR)
            if near and (option := near[0]) in self._options:
                way = f"make a new Pipeline(.., {option}=..)" if option in FIXED else f"pipe.rebuild({option}=..)"
                hint = "" if option == name else f" (did you mean {option}?)"
                raise AttributeError(f"a Pipeline's {name}{hint} cannot be set once it is built: {way}", name=name, obj=self)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> NoReturn:
            if ended := vars(self).get("_ended"):
                raise PenstockError(ended)
            told = f": {INSTEAD[name]}" if name in INSTEAD else ""
            raise AttributeError(f"a Pipeline has no {name}{told}", name=name, obj=self)

    def _end(self, why: str) -> None:
        """Let go of all that this pipeline has; whoever uses it from now on is told `why` that is in vain."""
        vars(self).clear()
        self._ended = why

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises PenstockError."""
        raise PenstockError(f"a pipeline is not called: {INSTEAD['forward']}")

    def __reduce__(self) -> NoReturn:
        """Raises PenstockError, for pickle, torch.save and deepcopy."""
        raise PenstockError(
            "a pipeline is not copied or pickled, it is connected to other ranks: "
            "save it with penstock.checkpoint.save, or pipe.state_dict(), which is this rank's part"
        )


class _Done:
    """The `backward` of a step's loss. A loss that is saved or sent leaves it behind: an empty set, which torch.load allows."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PenstockError(f"there is no backward left to do: {INSTEAD['backward']}; leave out loss.backward()")

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return set, ()


def learned_from(loss: Tensor) -> Tensor:
    """`loss`, whose `backward` says that it is done."""
    loss.__dict__["backward"] = _Done()
    return loss
