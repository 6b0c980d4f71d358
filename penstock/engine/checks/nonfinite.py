"""The first value of a step that is not finite, by its place: in what stages, layers and the loss give, or in gradients.

A sum is one pass over a tensor, and finite unless something in it is not: so that is what is looked at, as the values come.
Only where it is not finite more is asked. What is NaN once stays so in all that is made of it; therefore each rank notes the
first place only, and of all ranks' notes the first one in time that was not received from another is where it began: in the
parameters, in the batch, or in the step's own computation.
"""

import cmath
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from penstock.comms.control_group import ControlGroup
from penstock.errors import MismatchError
from penstock.schedule.table import Action, Kind
from penstock.stage.dtensor import local_shard
from penstock.stage.rank_parameters import RankParameters
from penstock.stage.stage import Stage
from penstock.torch_private import is_compiled, storage_key, strip_compiled_prefix
from penstock.trees import tensors

OWN, SHARED, RECEIVED = range(3)  # made here; averaged with other ranks'; given by another rank. The first is the best to blame
STATE, DATA, COMPUTED = "parameters", "data", "computed"
CAUSES = {STATE: "and was before the step began", DATA: "which came with the batch", COMPUTED: "and came up in the step"}
OnNonfinite = Literal["raise", "skip", "retry"]
LOSS = "the loss"
SMALL = 2**14  # elements: gradients that are looked at after each backward, so that the microbatch is known; all are at the end

Acts = Mapping[Kind, Callable[..., Any]]  # what the engine does for each kind of action


def check_choice(on_nonfinite: OnNonfinite | None) -> None:
    """Raises MismatchError for what is no choice."""
    if on_nonfinite is not None and on_nonfinite not in get_args(OnNonfinite):
        raise MismatchError(f"on_nonfinite={on_nonfinite!r}: use 'raise', 'skip', 'retry' or None")


class Finding(NamedTuple):
    """The first value on a rank that was not finite."""

    origin: int  # OWN, SHARED or RECEIVED
    when: float  # seconds of the shared clock
    rank: int
    stage: int
    action: str
    microbatch: int
    layer: str  # the submodule's name in the uncut model, "" where it is the stage's own code or the loss
    what: str  # "layers.3 gave nan"

    def __str__(self) -> str:
        action = f", action {self.action}, microbatch {self.microbatch}" if self.action else ""
        others = " at the end of the step" if self.origin == SHARED else ""
        return f"rank {self.rank}, stage {self.stage}{action}: {self.what}{others}"

    @property
    def place(self) -> tuple[Any, ...]:
        """What is the same if it happens again."""
        return self.rank, self.action, self.layer, self.what


def value_of(tensor: Tensor, may_be_mask: bool = False) -> str:
    """What in `tensor` is not finite, `nan` or `inf`; "" if nothing is.

    `may_be_mask`: of minus infinity and zeros only it is a mask, which is as it should be.
    """
    tensor = local_shard(tensor.detach())
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize < 2:
        return ""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if cmath.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all()):  # a sum may overflow
        return ""
    if bool(tensor.isnan().any()):
        return "nan"
    return "" if may_be_mask and bool(((tensor == 0) | (tensor == -torch.inf)).all()) else "inf"


def in_tree(value: Any, may_be_mask: bool = True) -> str:
    """The same of the tensors in a tree."""
    return next(filter(None, (value_of(tensor, may_be_mask) for tensor in tensors(value))), "")


class Watch:
    """Looks at what this rank's `stages` do in a step; `names`: as in `Parameters`.

    Layers are looked at by hooks that are there during a step only; of a compiled module, the whole.
    """

    def __init__(self, rank: int, stages: Mapping[int, Stage], names: Sequence[Mapping[str, str]]) -> None:
        self.found: Finding | None = None
        self._rank, self._stages, self._names = rank, stages, names
        clash = any(whole != strip_compiled_prefix(own) for each in names for own, whole in each.items())
        self._prefix = {index: f"{index}." if clash else "" for index in stages}
        self._action: Action | None = None  # that runs
        self._passed = ""  # who gave the last gradient in it that was finite
        self._seen: Callable[[], Any] = lambda: None  # the last output that was looked at, while it is there
        self.active, self._gradients, self._offset = False, True, 0.0  # set anew for each step
        for stage in stages.values():
            if stage.loss_fn is not None:
                stage.loss_fn = partial(self._loss, stage.loss_fn)

    @contextmanager
    def on(self, gradients: bool, offset: float) -> Iterator[None]:
        """During a step; `gradients`: look at them too. `offset` makes this rank's clock the shared one."""
        self.active, self.found, self._gradients, self._offset = True, None, gradients, offset
        hooks = [hook for index, stage in self._stages.items() for hook in self._hooked(index, stage.module)]
        try:
            yield
        finally:
            self.active, self._action = False, None
            for hook in hooks:
                hook.remove()

    def _hooked(self, index: int, module: nn.Module) -> Iterator[Any]:
        compiled = [
            name for name, each in module.named_modules() if is_compiled(each) or isinstance(each, torch.jit.ScriptModule)
        ]
        for name, each in module.named_modules():
            inside = any(name == other or not other or name.startswith(f"{other}.") for other in compiled)
            if not inside and (name or type(module) is not nn.Sequential):  # whose output is that of its last layer
                hook = partial(self._layer, self._prefix[index] + name if name else "")
                yield each.register_forward_hook(hook, with_kwargs=True)

    def around(self, acts: Acts) -> Acts:
        """What the engine does for each kind of action, looked at."""
        return {kind: partial(self._act, act) for kind, act in acts.items()} if self.active else acts

    def _act(self, act: Callable[..., Any], action: Action, values: Any) -> Any:
        stage, backward = self._stages[action.stage], action.kind is not Kind.F
        self._action, self._passed = action, LOSS if stage.loss_fn is not None else ""
        looks = self._gradients or not backward
        if looks and self.found is None and (value := in_tree(values, not backward)):
            self._note("", f"what it received has {value}", RECEIVED)
        made = act(action, values)
        if looks and self.found is None:
            if backward and (value := in_tree(made, may_be_mask=False)):
                self._blame_backward(value, "")
            elif backward:
                self._look_at_gradients((action.stage,), shared=stage.replication.hooks_gradients, largest=SMALL)
            elif value := in_tree(made):
                self._note("", f"the stage gave {value}")
        self._action = None
        return made

    def _layer(self, name: str, module: nn.Module | None, args: Any, kwargs: Any, output: Any) -> None:
        """After a layer's forward, or a stage's. What it was given is looked at only if what it gave is not finite."""
        if self._action is None or self.found is not None or not self._is_new(output):
            return
        if value := in_tree(output):
            given = [tensor for tensor in tensors((args, kwargs)) if not _within(tensor, output)]
            outside = name.rpartition(".")[0]
            if earlier := in_tree(given):  # so it was made between layers
                self._note(outside, f"the forward of {outside or 'the stage'} gave {earlier} to {name}")
            else:
                self._note(name, f"{name or 'the stage'} gave {value}")
        else:
            self._await_gradient(name, output)

    def _loss(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any) -> Any:
        self._layer("", None, (), {}, output)
        loss = loss_fn(output, target)
        if self._action is not None and self.found is None and isinstance(loss, Tensor) and (value := value_of(loss)):
            self._note("", f"{LOSS} gave {value}")
        return loss

    def _is_new(self, output: Any) -> bool:
        """Whether it is not what the layer before gave: a container gives what the last in it gave."""
        if output is self._seen():
            return output is None
        self._seen = weakref.ref(output) if isinstance(output, Tensor) else lambda: None
        return True

    def _await_gradient(self, name: str, output: Any) -> None:
        for tensor in tensors(output) if self._gradients else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._gradient, name))

    def _gradient(self, name: str, gradient: Tensor) -> None:
        """The gradient of what `name` gave, on its way back to it."""
        if self._action is None or self.found is not None:
            return
        if value := value_of(gradient):
            self._blame_backward(value, f" to {name}" if name else "")
        else:
            self._passed = name

    def _blame_backward(self, value: str, to: str) -> None:
        giver = self._passed
        self._note("" if giver == LOSS else giver, f"the backward of {giver or 'the stage'} gave {value}{to}")

    def at_the_end(self) -> bool:
        """Whether something of the step is not finite: once more the gradients, which are complete now."""
        if self.active and self.found is None:
            self._look_at_gradients(self._stages, shared=True)
        return self.found is not None

    def _look_at_gradients(self, stages: Iterable[int], shared: bool, largest: float = math.inf) -> None:
        """Look at those of parameters of up to `largest` elements; `shared`: other ranks' may be in them by now."""
        for index in stages if self._gradients and self.found is None else ():
            for name, parameter in self._stages[index].module.named_parameters():
                gradient = parameter.grad if parameter.numel() <= largest else None
                if gradient is not None and (value := value_of(gradient)):
                    whole = self._names[index].get(name, name)
                    what = f"the gradient of {whole} has {value}"
                    self._note(whole.rpartition(".")[0], what, SHARED if shared else OWN, index)
                    return

    def _note(self, layer: str, what: str, origin: int = OWN, stage: int = 0) -> None:
        action = self._action
        where = (stage, "", -1) if action is None else (action.stage, str(action), action.microbatch)
        self.found = Finding(origin, time.perf_counter() + self._offset, self._rank, *where, layer, what)


def _within(tensor: Tensor, output: Any) -> bool:
    """Whether it lies where a part of `output` does: a layer that works in place leaves nothing of its input."""
    memory = storage_key(tensor)
    return any(storage_key(tensor) == memory for tensor in tensors(output))


# -- what all ranks know together -----------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """Where the first value that was not finite came from, the same on every rank."""

    cause: str  # STATE, DATA or COMPUTED
    text: str
    place: tuple[Any, ...]  # the same if it happens there again


def verdict(control: ControlGroup, watch: Watch, parameters: RankParameters, batch: Mapping[str, Sequence[Any]]) -> Verdict:
    """What all ranks come to once one of them has found something; all call it, when all have ended the step.

    `batch`: microbatches of inputs and of targets, as far as this rank reads them.
    """
    rank = control.topology.rank
    state, data = ([f"rank {rank}: {each}" for each in told] for told in (_state(parameters), _data(batch)))
    everyone = control.all_gather_object((watch.found, state, data), "to tell what is not finite")
    first = min((found for found, *_ in everyone if found), key=lambda each: each[:2])
    for cause, told in ((STATE, [each for _, each, _ in everyone]), (DATA, [each for *_, each in everyone])):
        if several := [each for mine in told for each in mine]:
            more = f" (and {len(several) - 1} more)" if len(several) > 1 else ""
            return Verdict(cause, f"{several[0]}{more}; first seen in {first}", first.place)
    return Verdict(COMPUTED, str(first), first.place)


def _state(parameters: RankParameters) -> Iterator[str]:
    """What cannot have come of this step, since no step changes a parameter."""
    for name, parameter in parameters.named_parameters():
        if value := value_of(parameter):
            yield f"{name} has {value} since the last optimizer step, or was loaded so"


def _data(batch: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    for what, microbatches in batch.items():
        for number, each in enumerate(microbatches):
            if value := in_tree(each):
                yield f"the batch's {what} in microbatch {number} have {value}"
