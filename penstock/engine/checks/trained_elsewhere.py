"""What other ranks have trained is older here, and must not pass for it: of a model object, and of layers of two pipelines.

Each rank remembers how its tensors were when the last pipeline of them was built: those it ran, and those others ran. When the
next one is built, the ranks tell each other which of theirs have changed since. A tensor that this rank did not run, and that
nobody has loaded here since, is behind if it has changed where it was run.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.comms.encoding import view_as_bytes
from penstock.errors import MismatchError
from penstock.stage.dtensor import local_shard
from penstock.torch_private import tensor_slots, tensor_version

Key = tuple[str, str]  # the first pipeline that had a tensor, and its name in the uncut model: the same on all ranks
SAMPLE = 64  # values of a tensor that are compared: some optimizers change `.data`, of which autograd does not know
WAYS = (
    "pipe.rebuild(schedule=..) goes on with the trained ones, checkpoint.export(pipe, path) writes a file of them to load into "
    "the model, and pipe.state_dict() has this rank's part"
)


class _Snapshot:
    """A tensor as it was when the last pipeline of it was built."""

    def __init__(self, key: Key, tensor: Tensor, is_here: bool, is_behind: bool) -> None:
        self.key, self.is_here, self.is_behind = key, is_here, is_behind
        self.tensor = weakref.ref(tensor)
        self._version, self._sample = _version(tensor), sample(tensor)

    def has_changed(self) -> bool:
        """Whether its values are others now. Of a buffer that was written to, the values decide."""
        if (tensor := self.tensor()) is None:
            return False
        written = _version(tensor) != self._version and (isinstance(tensor, nn.Parameter) or tensor.is_meta)
        return written or not torch.equal(sample(tensor), self._sample)

    def stays_behind(self, changed: Collection[Key]) -> bool:
        """Whether another rank has newer values, given what has `changed` where it was run."""
        return not self.is_here and (self.is_behind or self.key in changed) and not self.has_changed()


_snapshots: dict[int, _Snapshot] = {}  # by the tensor's id
_guards: "weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]" = weakref.WeakKeyDictionary()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor_version(tensor)


def sample(tensor: Tensor) -> Tensor:
    """Some of its values, as bytes."""
    tensor = local_shard(tensor.detach())
    if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    step = -(-tensor.numel() // SAMPLE)
    return view_as_bytes(tensor.take(torch.arange(0, tensor.numel(), step, device=tensor.device)))


def _find(tensors: Iterable[Tensor]) -> list[_Snapshot]:
    found = [_snapshots[id(each)] for each in tensors if id(each) in _snapshots]
    return [each for each in found if each.tensor() is not None]


def is_known(tensors: Iterable[Tensor]) -> bool:
    """Whether a pipeline has had one of them before."""
    return bool(_find(tensors))


def changed() -> set[Key]:
    """What this rank has run and has other values now."""
    return {each.key for each in _snapshots.values() if each.is_here and each.has_changed()}


def check(tensors: Mapping[str, Tensor], changed: Collection[Key], rank: int) -> None:
    """Raises MismatchError if one of `tensors`, which this rank is to run, is behind; `changed`: of all ranks."""
    behind = [name for name, each in tensors.items() if any(known.stays_behind(changed) for known in _find([each]))]
    if behind:
        told = f"a pipeline has trained this model, and rank {rank} would run {len(behind)} tensors ({behind[0]}, ..)"
        raise MismatchError(f"{told} whose new values are on another rank: {WAYS}")


def note(
    pipeline: int, here: Mapping[str, Tensor], elsewhere: Mapping[str, Tensor], changed: Collection[Key], ranks: int
) -> "SharedLayers":
    """A pipeline of `ranks` was built: this one runs the tensors `here`, others those `elsewhere`, by name."""
    for place in [place for place, known in _snapshots.items() if known.tensor() is None]:
        del _snapshots[place]
    for name, tensor in [*here.items(), *elsewhere.items()] if ranks > 1 else ():
        before, is_here = _snapshots.get(id(tensor)), name in here
        is_behind = before is not None and not is_here and before.stays_behind(changed)
        key = (str(pipeline), name) if before is None else before.key
        _snapshots[id(tensor)] = _Snapshot(key, tensor, is_here, is_behind)
    return SharedLayers(here, elsewhere)


# -- two pipelines of one model -------------------------------------------------------------------------------------------


_all: "weakref.WeakSet[SharedLayers]" = weakref.WeakSet()


class SharedLayers:
    """The tensors of a pipeline's model that this rank runs, `here`, and those that others run, by name.

    Pipelines are built in the same order on all ranks, so each knows on every rank which others have trained since.
    """

    def __init__(self, here: Mapping[str, Tensor], elsewhere: Mapping[str, Tensor]) -> None:
        self.here = {id(tensor): (name, weakref.ref(tensor)) for name, tensor in here.items()}
        self.elsewhere = {id(tensor): weakref.ref(tensor) for tensor in elsewhere.values()}
        self.steps = 0  # of training
        self._others: list[tuple[weakref.ref[SharedLayers], str, weakref.ref[Tensor], int]] = []
        for other in _all:
            self._meet(other)
            other._meet(self)
        _all.add(self)

    def _meet(self, other: "SharedLayers") -> None:
        """Remember what this rank runs of what others run for `other`, which is trained."""
        for place, (name, tensor) in self.here.items():
            known = other.elsewhere.get(place)
            if known is not None and known() is not None and known() is tensor():
                self._others.append((weakref.ref(other), name, tensor, other.steps))

    def check(self) -> None:
        """Before a training step. Raises MismatchError if another pipeline has trained a layer on another rank."""
        for reference, name, tensor, steps in self._others:
            other, weight = reference(), tensor()
            if other is not None and weight is not None and weight.requires_grad and other.steps != steps:
                raise MismatchError(
                    f"another pipeline has {name} on another rank, and has trained since this one was built: neither sees what "
                    "the other does. Cut both so that a shared layer is on one rank, or go on with pipe.rebuild(..)"
                )


# -- the model by itself --------------------------------------------------------------------------------------------------


def guard(model: nn.Module) -> None:
    """After a step: from now on forward, `state_dict()`, copy and pickle of a `model` that is behind are refused."""
    if model not in _guards:
        refusal = _Refusal(model)
        _guards[model] = [model.register_forward_pre_hook(refusal), model.register_state_dict_pre_hook(refusal)]


@contextmanager
def unguarded(model: Any) -> Iterator[None]:
    """While another pipeline is built of `model`, whose forward is followed and whose names are read."""
    handles = _guards.pop(model, ()) if isinstance(model, nn.Module) else ()
    for handle in handles:
        handle.remove()
    try:
        yield
    finally:
        if handles:
            guard(model)


class _Refusal:
    """A hook of `model`, which goes along when the model is copied or pickled."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model and weakref.ref(model)

    def __call__(self, model: nn.Module, *_: Any) -> None:
        _refuse(model)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and deepcopy."""
        if self._model is not None and (model := self._model()) is not None:
            _refuse(model)
        return _Refusal, (None,)


def _refuse(model: nn.Module) -> None:
    """Where this rank's part has changed, those of others have."""
    known = _find(slot.tensor for slot in tensor_slots(model))
    if any(each.is_here and each.has_changed() for each in known):
        behind = [each.key[1] for each in known if not each.is_here and (each.is_behind or not each.has_changed())]
        if behind:
            told = f"a pipeline has trained this {type(model).__name__}, and {len(behind)} of its tensors ({behind[0]}, ..)"
            raise MismatchError(f"{told} have their new values on other ranks: {WAYS}")
