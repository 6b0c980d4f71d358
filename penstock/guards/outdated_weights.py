"""Find weights that are outdated on this rank, because another rank has trained them: of a model object, or of two pipelines.

Each rank records how its tensors were when the last pipeline of them was built: those that it ran, and those that others ran.
When the next one is built, the ranks tell each other which of theirs have changed since. A tensor is outdated on a rank that
did not run it, and where nobody has loaded it since, if it has changed where it was run.
"""

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.engine.observers import ObservedStep, Observer
from penstock.errors import MismatchError
from penstock.guards.tensor_snapshot import sample_shard
from penstock.torch_private import DisableTorchFunctionSubclass, is_persistent_buffer, tensor_slots, tensor_version
from penstock.trees import leaves

TensorKey = tuple[str, str]  # the first pipeline that had a tensor, and its name in the uncut model: the same on all ranks
OUTDATED_HINT = (
    "pipe.rebuild(schedule=..) goes on with the trained ones, checkpoint.export(pipe, path) writes a file of them to load into "
    "the model, and pipe.state_dict() has this rank's part"
)


class _TensorRecord:
    """A tensor's version and values when the last pipeline of it was built."""

    def __init__(self, key: TensorKey, tensor: Tensor, is_local: bool, was_outdated: bool) -> None:
        self.key, self.is_local, self.was_outdated = key, is_local, was_outdated
        self.tensor = weakref.ref(tensor)
        self.trained_model: weakref.ref[nn.Module] | None = None  # of a RemoteParameter
        self._version, self._sample = _version(tensor), sample_bytes(tensor)

    def has_changed(self) -> bool:
        """Whether a tensor that this rank runs was trained, or another one was loaded.

        A layer may write a buffer with the values that it has, which is no training; loaded, it may have the same values.
        """
        if (tensor := self.tensor()) is None:
            return False
        counts_writes = isinstance(tensor, nn.Parameter) or tensor.is_meta or not self.is_local
        was_written = _version(tensor) != self._version and counts_writes
        return was_written or not torch.equal(sample_bytes(tensor), self._sample)

    def begin_anew(self) -> None:
        """Compare with the values of now from here on."""
        if (tensor := self.tensor()) is not None:
            self._version, self._sample = _version(tensor), sample_bytes(tensor)

    def is_outdated(self, changed: Collection[TensorKey]) -> bool:
        """Whether another rank has newer values. `changed`: keys of tensors that have changed where they were run."""
        return not self.is_local and (self.was_outdated or self.key in changed) and not self.has_changed()


_records: dict[int, _TensorRecord] = {}  # by the tensor's id
_written_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # tensors of other ranks were written since the last step
_hooks: "weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]" = weakref.WeakKeyDictionary()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor_version(tensor)


def sample_bytes(tensor: Tensor) -> Tensor:
    """Return the `sample_shard` of a tensor, also of one that other ranks train."""
    with DisableTorchFunctionSubclass() if isinstance(tensor, RemoteParameter) else nullcontext():
        return sample_shard(tensor)


def _records_of(tensors: Iterable[Tensor]) -> list[_TensorRecord]:
    records = [_records[id(tensor)] for tensor in tensors if id(tensor) in _records]
    return [record for record in records if record.tensor() is not None]


def any_recorded(tensors: Iterable[Tensor]) -> bool:
    """Whether an earlier pipeline has had one of the tensors."""
    return bool(_records_of(tensors))


def changed_keys() -> set[TensorKey]:
    """Return the keys of the tensors that this rank has run and whose values have changed."""
    return {record.key for record in _records.values() if record.is_local and record.has_changed()}


def check_no_outdated_weights(tensors: Mapping[str, Tensor], changed: Collection[TensorKey], rank: int) -> None:
    """Raise MismatchError if one of `tensors`, which this rank is to run, is outdated. `changed`: the keys of all ranks."""
    names = [name for name, tensor in tensors.items() if any(record.is_outdated(changed) for record in _records_of([tensor]))]
    if names:
        raise MismatchError(
            f"a pipeline has trained this model, and rank {rank} would run {len(names)} tensors ({names[0]}, ..) whose new "
            f"values are on another rank: {OUTDATED_HINT}"
        )


def record_pipeline(
    pipeline_number: int,
    local_tensors: Mapping[str, Tensor],
    remote_tensors: Mapping[str, Tensor],
    changed: Collection[TensorKey],
    num_ranks: int,
) -> "TensorsSharedBetweenPipelines":
    """Record the tensors of a pipeline that was built: those that this rank runs, and those that others run, by name."""
    for tensor_id in [tensor_id for tensor_id, record in _records.items() if record.tensor() is None]:
        del _records[tensor_id]

    for name, tensor in [*local_tensors.items(), *remote_tensors.items()] if num_ranks > 1 else ():
        previous, is_local = _records.get(id(tensor)), name in local_tensors
        was_outdated = previous is not None and not is_local and previous.is_outdated(changed)
        key = (str(pipeline_number), name) if previous is None else previous.key
        _records[id(tensor)] = _TensorRecord(key, tensor, is_local, was_outdated)
    return TensorsSharedBetweenPipelines(local_tensors, remote_tensors)


# -- two pipelines of one model -------------------------------------------------------------------------------------------


_pipelines: "weakref.WeakSet[TensorsSharedBetweenPipelines]" = weakref.WeakSet()


class TensorsSharedBetweenPipelines(Observer):
    """The tensors of a pipeline's model, by name, to find those that another pipeline trains on another rank.

    Pipelines are built in the same order on all ranks, so each rank knows which others have trained since.
    """

    def __init__(self, local_tensors: Mapping[str, Tensor], remote_tensors: Mapping[str, Tensor]) -> None:
        self.local = {id(tensor): (name, weakref.ref(tensor)) for name, tensor in local_tensors.items()}
        self.remote = {id(tensor): weakref.ref(tensor) for tensor in remote_tensors.values()}
        self.steps = 0  # of training
        self._remote_elsewhere: list[tuple[weakref.ref[TensorsSharedBetweenPipelines], str, weakref.ref[Tensor], int]] = []
        for pipeline in _pipelines:
            self._record_overlap(pipeline)
            pipeline._record_overlap(self)
        _pipelines.add(self)

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Raise MismatchError, before a training step, if another pipeline has trained a layer on another rank."""
        for reference, name, tensor, steps in self._remote_elsewhere if step.call.is_training else ():
            pipeline, weight = reference(), tensor()
            if pipeline is not None and weight is not None and weight.requires_grad and pipeline.steps != steps:
                raise MismatchError(
                    f"another pipeline has {name} on another rank, and has trained since this one was built: neither sees what "
                    "the other does. Cut both so that a shared layer is on one rank, or go on with pipe.rebuild(..)"
                )
        return ()

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Count training steps."""
        self.steps += step.call.is_training

    def _record_overlap(self, pipeline: "TensorsSharedBetweenPipelines") -> None:
        """Record the tensors that this rank runs here and that other ranks run for `pipeline`, with its step count."""
        for tensor_id, (name, tensor) in self.local.items():
            remote = pipeline.remote.get(tensor_id)
            if remote is not None and remote() is not None and remote() is tensor():
                self._remote_elsewhere.append((weakref.ref(pipeline), name, tensor, pipeline.steps))


# -- the model by itself --------------------------------------------------------------------------------------------------


class OutdatedUseRefusal(Observer):
    """Refuses to read, copy or pickle `model` and other ranks' parameters after a training step: they are outdated."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def after(self, step: ObservedStep, numbers: Sequence[float]) -> None:
        """Refuse from now on. What was loaded before the step is outdated again."""
        if not step.call.is_training:
            return
        if self._model in _written_models:
            _written_models.discard(self._model)
            for record in _records_of(slot.tensor for slot in tensor_slots(self._model)):
                if not record.is_local:
                    record.begin_anew()
        _install_refusal(self._model)


def _install_refusal(model: nn.Module) -> None:
    if model not in _hooks:
        hook = _RefusalHook(model)
        _hooks[model] = [model.register_forward_pre_hook(hook), model.register_state_dict_pre_hook(hook)]
        for parameter in model.parameters():
            for record in _records_of([parameter]):
                if type(parameter) is nn.Parameter and not record.is_local:
                    parameter.__class__, record.trained_model = RemoteParameter, weakref.ref(model)


@contextmanager
def allow_outdated_use(model: Any) -> Iterator[None]:
    """Allow outdated use while another pipeline of `model` is built: this traces its forward and reads its names."""
    handles = _hooks.pop(model, ()) if isinstance(model, nn.Module) else ()
    for handle in handles:
        handle.remove()
    for parameter in model.parameters() if handles else ():
        if type(parameter) is RemoteParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        if handles:
            _written_models.add(model)
            _install_refusal(model)


class RemoteParameter(nn.Parameter):
    """A parameter of a model that a pipeline has trained, of a stage of another rank: refuses to be read while it is outdated.

    What a script does to all parameters alike is allowed: to count, freeze, load or initialise them, also through `.data`.
    `.grad` is for torch's optimizers, modules and scalers, which skip a parameter without one.
    """

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for each function of such parameters. Raises MismatchError if it would read outdated values."""
        with DisableTorchFunctionSubclass():
            if function.__name__ == "__get__" and getattr(function, "__self__", None) is Tensor.grad:
                _check_gradient_is_not_remote(args[0], inspect.currentframe())
            elif function.__name__ == "__get__" and getattr(function, "__self__", None) is Tensor.data:
                return RemoteData.of(args[0])
            elif not _reads_no_values(function):
                _check_use(function, [*args, *(kwargs or {}).values()])
            return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter; refused as a read is."""
        copy = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copy
        return copy


class RemoteData(Tensor):
    """The `.data` of a RemoteParameter: a script may write into it, and read it where it may read the parameter."""

    parameter: RemoteParameter

    @classmethod
    def of(cls, parameter: RemoteParameter) -> Tensor:
        """Return the data of a parameter; call this without subclasses' functions."""
        data = parameter.data.as_subclass(cls)
        data.parameter = parameter
        return data

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As a RemoteParameter's."""
        with DisableTorchFunctionSubclass():
            if not _reads_no_values(function):
                _check_use(function, [*args, *(kwargs or {}).values()])
            return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain tensor; refused as a read is."""
        return self.clone(memory_format=torch.preserve_format)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor; refused as a read is."""
        _check_parameter_not_outdated(self.parameter)
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _remote_parameter_of(value: Any) -> RemoteParameter | None:
    if type(value) is RemoteData:
        return value.parameter
    return value if type(value) is RemoteParameter else None


def _check_use(function: Callable[..., Any], values: Sequence[Any]) -> None:
    """Raise MismatchError if a function of these arguments would read outdated values. Note what it writes."""
    is_write = _is_write(function)
    for value in leaves(values[1:] if is_write else values):
        if (parameter := _remote_parameter_of(value)) is not None:
            _check_parameter_not_outdated(parameter)
    if is_write and (parameter := _remote_parameter_of(values[0])) is not None:
        _written_models.update(_trained_models_of(parameter))


VALUE_ATTRIBUTES = {Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag}
METADATA_FUNCTIONS = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex"),
    *("is_inference", "is_contiguous", "data_ptr", "register_hook", "register_post_accumulate_grad_hook", "__hash__"),
}


def _reads_no_values(function: Callable[..., Any]) -> bool:
    """Whether a function of tensors needs no values: it gives a shape, a flag, or registers a hook."""
    if function.__name__ == "__get__":
        return getattr(function, "__self__", None) not in VALUE_ATTRIBUTES
    return function.__name__ in METADATA_FUNCTIONS


def _is_write(function: Callable[..., Any]) -> bool:
    """Whether a function writes into its first argument, as `copy_` and `parameter.data = ..` do."""
    name = function.__name__
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _trained_models_of(parameter: RemoteParameter) -> list[nn.Module]:
    references = [record.trained_model for record in _records_of([parameter]) if record.trained_model is not None]
    return [model for reference in references if (model := reference()) is not None]


def _check_parameter_not_outdated(parameter: RemoteParameter) -> None:
    """Raise MismatchError if the rank that runs `parameter` has changed it, and it has not been loaded here since."""
    if not all(record.has_changed() for record in _records_of([parameter])):
        for model in _trained_models_of(parameter):
            _check_model_not_outdated(model)


GRADIENT_READERS = ("torch.optim.", "torch.nn.modules.", "torch.amp.", "torch.distributed.", "penstock.")  # they skip None


def _check_gradient_is_not_remote(parameter: Tensor, frame: FrameType | None) -> None:
    """Raise MismatchError if a script reads `.grad` of a parameter of another rank while this rank's parameters have gradients.

    `frame`: of the function that was called to read it.
    """
    caller = None if frame is None else frame.f_back
    if caller is not None and str(caller.f_globals.get("__name__")).startswith(GRADIENT_READERS):
        return
    for record in _records_of([parameter]):
        model = None if record.trained_model is None else record.trained_model()
        trained = [] if model is None else [local for local in _local_tensors(model) if local.requires_grad]
        if model is not None and (not trained or any(local.grad is not None for local in trained)):
            raise MismatchError(
                f"a pipeline trains this {type(model).__name__}, and the gradient of {record.key[1]} is on another rank: "
                "pipe.named_parameters() has the parameters of this rank, and pipe.clip_grad_norm_(float('inf')) returns the "
                "norm of all ranks' gradients"
            )


def _local_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors of `model` that this rank runs."""
    tensors = [slot.tensor for slot in tensor_slots(model)]
    return [tensor for tensor in tensors if any(record.is_local for record in _records_of([tensor]))]


class _RefusalHook:
    """A hook of `model` that raises if it is outdated. It is copied and pickled with the model, and raises then too."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model and weakref.ref(model)

    def __call__(self, model: nn.Module, *_: Any) -> None:
        _check_model_not_outdated(model)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and deepcopy the hook with its model."""
        if self._model is not None and (model := self._model()) is not None:
            _check_model_not_outdated(model)
        return _RefusalHook, (None,)


def _check_model_not_outdated(model: nn.Module) -> None:
    """Raise MismatchError if a tensor that this rank runs has changed: then those of other ranks have changed there.

    Buffers that are no part of the model's state, as tables of positions, cannot be loaded, and need not be.
    """
    slots = [slot for slot in tensor_slots(model) if isinstance(slot.tensor, nn.Parameter) or is_persistent_buffer(*slot[1:3])]
    records = _records_of(slot.tensor for slot in slots)
    if any(record.has_changed() if record.is_local else record.was_outdated for record in records):
        names = [record.key[1] for record in records if not record.is_local and not record.has_changed()]
        if names:
            raise MismatchError(
                f"a pipeline has trained this {type(model).__name__}, and {len(names)} of its tensors ({names[0]}, ..) have "
                f"their new values on other ranks: {OUTDATED_HINT}"
            )
