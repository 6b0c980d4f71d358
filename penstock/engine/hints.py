"""Errors with a hint for what people try on a pipeline because modules have it: `pipe.to(..)`, `pipe(x)`, `loss.backward()`."""

import difflib
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from penstock.errors import PenstockError
from penstock.options import STAYS, option_names

_DEVICE_HINT = "its stages are on pipe.topology.device, which ps.comms.init_distributed(device=..) chooses"
_DTYPE_HINT = "give it a model of that dtype, or call step() under torch.autocast"
_STAGES_HINT = "its modules on this rank are pipe.stages.values(): call that of every stage"
HINTS = {
    **dict.fromkeys(("to", "to_empty"), f"{_DEVICE_HINT}; for another dtype, {_DTYPE_HINT}"),
    **dict.fromkeys(("cuda", "cpu", "device"), _DEVICE_HINT),
    **dict.fromkeys(("half", "bfloat16", "float", "double", "type", "dtype"), _DTYPE_HINT),
    **dict.fromkeys(("modules", "named_modules", "children", "named_children", "buffers", "named_buffers"), _STAGES_HINT),
    **dict.fromkeys(("apply", "requires_grad_", "compile", "get_submodule", "get_parameter"), _STAGES_HINT),
    "register_forward_hook": _STAGES_HINT,
    "module": "pipe.stages has this rank's modules, and pipe.state_dict() the uncut model's names",
    "forward": "pipe.step(inputs, target=..) trains on a batch, pipe.eval(inputs) computes its outputs",
    "backward": "step() does forward and backward; gradients are in the parameters' .grad",
}
MIN_SIMILARITY = 0.8  # from which on a name counts as a misspelt option


class ModuleMisuseHints:
    """Base of Pipeline, which is no module: its parts are on several ranks, where a forward of one alone would hang."""

    _is_built = False  # from then on its options cannot be set

    if not TYPE_CHECKING:  # type checkers find missing attributes by themselves

        def __setattr__(self, name: str, value: Any) -> None:
            """Raise AttributeError for an option of the pipeline, or for a new name that is nearly one."""
            is_known, names = name.startswith("_") or name in vars(self), option_names() if self._is_built else ()
            matches = [name] if is_known else difflib.get_close_matches(name, names, 1, MIN_SIMILARITY)
            if matches and (option := matches[0]) in names:
                remedy = f"make a new Pipeline(.., {option}=..)" if option in STAYS else f"pipe.rebuild({option}=..)"
                guess = "" if option == name else f" (did you mean {option}?)"
                message = f"a Pipeline's {name}{guess} cannot be set once it is built: {remedy}"
                raise AttributeError(message, name=name, obj=self)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> NoReturn:
            if end_reason := vars(self).get("_end_reason"):
                raise PenstockError(end_reason)
            hint = f": {HINTS[name]}" if name in HINTS else ""
            raise AttributeError(f"a Pipeline has no {name}{hint}", name=name, obj=self)

    def _end(self, reason: str) -> None:
        """Release everything that this pipeline has. Any later use raises PenstockError with `reason`."""
        vars(self).clear()
        self._end_reason = reason

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise PenstockError."""
        raise PenstockError(f"a pipeline is not called: {HINTS['forward']}")

    def __reduce__(self) -> NoReturn:
        """Raise PenstockError, for pickle, torch.save and deepcopy."""
        raise PenstockError(
            "a pipeline is not copied or pickled, it is connected to other ranks: "
            "save it with penstock.checkpoint.save, or pipe.state_dict(), which is this rank's part; "
            "average its weights over pipe.parameters(), on each rank (docs/howto/validate.md)"
        )


class _BackwardThatRaises:
    """The `backward` of a step's loss. A loss that is saved or sent pickles it as an empty set, which torch.load allows."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PenstockError(f"there is no backward left to do: {HINTS['backward']}; leave out loss.backward()")

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return set, ()


def add_backward_hint(loss: Tensor) -> Tensor:
    """Make `loss.backward()` raise an error that says that step() has done it. Returns `loss`."""
    loss.__dict__["backward"] = _BackwardThatRaises()
    return loss
