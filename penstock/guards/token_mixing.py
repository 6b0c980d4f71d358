"""Whether the tokens of a sequence meet in `ps.attention` alone: without half of them, the others must keep their values.

In the first step of a kind whose tokens are cut, each stage runs one piece of a microbatch three times more, without gradients:

    all tokens          every layer's inputs and output are recorded, and those of every call of `ps.attention`
    the first half      every layer's inputs and output are compared with those recorded; where equal, the recorded output
    the second half     takes the output's place, and `ps.attention` returns what it returned for these tokens

So the rounding of other kernels, for fewer tokens, does not add up from layer to layer, and the layer that is named is the
innermost one that makes a difference. A difference that does not reach the stage's output is none.

Nothing of this stays: buffers, attributes of modules and random number generators are as before.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.batch.pieces import Layout
from penstock.engine.observers import ObservedStep, Observer, StepFunctions
from penstock.errors import MismatchError
from penstock.python_objects import preserve_attributes
from penstock.randomness import GeneratorAccess, default_generator, list_generators, use_generator_states
from penstock.schedule.table import Action, Kind
from penstock.stage.attention import TIME, AttentionContext, attend, attention_context
from penstock.stage.backward.parameter_slot import replace_temporarily
from penstock.stage.stage import Stage
from penstock.torch_private import buffer_slots, is_compiled, storage_key, strip_compiled_prefix
from penstock.trees import flatten, leaves, unflatten

MAX_TOKENS = 256  # of the piece: enough for a layer to mix them, and little beside a microbatch
MIN_TOKENS = 4  # with fewer, a traced model cannot run half of them, a single one
MAX_READINGS = 16  # of messages in which several dimensions are as long as the tokens are many
ATTENTION = "ps.attention"


class TokenMixingCheck(Observer):
    """Checks each of a rank's `stages` in the first step of a kind, after its forward of one piece.

    `cp_index`: this rank's part of the tokens, if ranks along cp share them; None for slices.
    """

    only_in_new_steps = True

    def __init__(self, stages: Mapping[int, Stage], device: torch.device, layout: Layout, cp_index: int | None) -> None:
        self._stages, self._device, self._layout, self._cp_index = stages, device, layout, cp_index
        self._unchecked = set[int]()  # stages, in this step

    def wrap(self, step: ObservedStep, functions: StepFunctions) -> StepFunctions:
        """Check after the forwards."""
        if not step.has_agreed:
            return functions
        self._unchecked = set(self._stages)
        forward = partial(self._forward, step, functions.actions[Kind.F])
        return functions._replace(actions={**functions.actions, Kind.F: forward})

    def _forward(self, step: ObservedStep, function: Callable[..., Any], action: Action, values: Sequence[Any]) -> Any:
        piece = step.actions.piece_of(action)
        lengths = piece.lengths
        longest = max(range(1, len(lengths)), key=lengths.__getitem__)
        part = longest if self._cp_index is None else self._cp_index
        is_chosen = self._cp_index is not None or action.slice == longest
        if action.stage not in self._unchecked or not is_chosen or lengths[part] < 2:
            return function(action, values)
        self._unchecked.remove(action.stage)

        stage_check = _StageCheck(
            self._stages[action.stage],
            self._device,
            step.actions.inputs_of(action, values),
            step.actions.seed_of(piece),
            lengths[part],
            sum(lengths[:part]),
            self._layout.sequence_dim,
        )
        messages = function(action, values)  # it may change its inputs, of which the check has copies
        stage_check.run()
        return messages


class _StageCheck:
    """The check of one stage. `num_tokens`: of the piece, in `inputs`. `position`: that of its first token."""

    def __init__(
        self,
        stage: Stage,
        device: torch.device,
        inputs: Any,
        seed: int | None,
        num_tokens: int,
        position: int,
        sequence_dim: int,
    ) -> None:
        self._stage, self._device, self._seed = stage, device, seed
        self._position, self._dim = position, sequence_dim
        self._num_tokens = min(num_tokens, MAX_TOKENS)

        # Which dimension of a message has the tokens can be read in several ways, if others have the same size.
        flat, self._structure = flatten(inputs)
        dims = [_dims_of_tokens(leaf, num_tokens, sequence_dim, is_batch=stage.index == 0) for leaf in flat]
        self._readings = [
            (reading, [_take(leaf, dim, num_tokens, 0, self._num_tokens) for leaf, dim in zip(flat, reading, strict=True)])
            for reading in islice(product(*dims), MAX_READINGS)
        ]

    def run(self) -> None:
        """Raise MismatchError if tokens are mixed, however the messages are read. Warn if that cannot be found out."""
        outcomes: list[_Finding | Exception] = []
        for reading, whole_inputs in self._readings:
            try:
                finding = self._compare(reading, whole_inputs)
            except Exception as error:  # the model's own: with all tokens its forward has raised none
                outcomes.append(error)
            else:
                if finding is None:
                    return
                outcomes.append(finding)

        for outcome in outcomes:
            if isinstance(outcome, _Finding):
                raise outcome.error()
        if self._num_tokens < MIN_TOKENS:
            return
        warnings.warn(
            f"tokens are cut, but whether stage {self._stage.index} mixes them could not be tested: with half of the tokens it "
            f"raises {type(outcomes[0]).__name__}: {outcomes[0]}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _compare(self, reading: Sequence[int | None], whole_inputs: Sequence[Any]) -> "_Finding | None":
        """Run all tokens and each half. Return what differs first."""
        num_tokens = self._num_tokens
        lengths = (num_tokens // 2, num_tokens - num_tokens // 2)
        generator = default_generator(self._device)
        whole = _Run(self._stage, generator, None, (num_tokens,), 0, self._dim, self._position)
        whole.output = self._run(whole, whole_inputs)

        for part in range(2):
            half = _Run(self._stage, generator, whole, lengths, part, self._dim, self._position)
            inputs = [
                _take(leaf, dim, num_tokens, sum(lengths[:part]), lengths[part])
                for leaf, dim in zip(whole_inputs, reading, strict=True)
            ]
            half.output = self._run(half, inputs)
            if (finding := half.find_difference()) is not None:
                return finding
        return None

    def _run(self, run: "_Run", inputs: Sequence[Any]) -> Any:
        """Return the stage's output. Everything else stays as it was."""
        stage, copies = self._stage, [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in inputs]
        auxiliary_losses = stage.auxiliary_losses
        try:
            with _unchanged_state(stage.module, self._device), run.watch_layers(), attention_context(run):
                return stage.forward(0, unflatten(copies, self._structure), self._seed, with_backward=False)
        finally:
            stage.auxiliary_losses = auxiliary_losses


class _LayerCall(NamedTuple):
    """Copies of the leaves of a layer's inputs and output, and the state of the device's generator before and after it."""

    inputs: Sequence[Any]
    state_before: Tensor
    output: Sequence[Any] = ()
    state_after: Any = None


class _Finding(NamedTuple):
    """A layer that gives its tokens other values if half of them are not there."""

    layer: str
    what: str  # differs
    difference: float
    calls_torch_attention: bool

    def error(self) -> MismatchError:
        """Return the error, with what to do."""
        prefix = f"the tokens of a sequence cannot be cut before {self.layer}, "
        if self.calls_torch_attention:
            return MismatchError(f"{prefix}which calls scaled_dot_product_attention: call ps.attention there instead")
        return MismatchError(
            f"{prefix}which mixes them outside of ps.attention, or numbers them from 0: with half of the tokens {self.what} is "
            f"{self.difference:.2g} of its size off. Let them meet in ps.attention, begin at ps.cache.first_position(), or use "
            "slices=1 and a mesh without cp"
        )


class _Run(AttentionContext):
    """A run of a stage with a part of the tokens. `whole`: the run with all of them; None if this is it."""

    def __init__(
        self,
        stage: Stage,
        generator: torch.Generator,
        whole: "_Run | None",
        lengths: Sequence[int],
        part: int,
        sequence_dim: int,
        position: int,
    ) -> None:
        self._stage, self._generator, self._whole = stage, generator, whole
        self.lengths, self.part, self.sequence_dim, self._position = lengths, part, sequence_dim, position
        self.output: Any = None
        self._total, self._first, self._length = sum(lengths), sum(lengths[:part]), lengths[part]
        self._tolerance = _tolerance(stage.module)
        self._types = {name: type(layer).__name__ for name, layer in stage.module.named_modules()}

        self._num_calls = Counter[str]()  # by layer
        self._calls: dict[tuple[str, int], _LayerCall] = {}
        self._open_calls: list[tuple[str, int, int]] = []  # layer, number of its call, findings before it
        self._findings: list[_Finding] = []
        self._calls_torch_attention = set[str]()  # layers, by themselves
        self._attends = False  # `ps.attention` runs

    @property
    def first_position(self) -> int:
        """The number of tokens of the sequence before those of this run."""
        return self._position + self._first

    # -- layers --------------------------------------------------------------------------------------------------------

    @contextmanager
    def watch_layers(self) -> Iterator[None]:
        """Record or compare the layers that run inside."""
        with ExitStack() as stack:
            for name, layer in _layers_to_watch(self._stage.module):
                enter, leave = partial(self._enter_hook, name), partial(self._leave_hook, name)
                stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
                stack.callback(layer.register_forward_hook(leave).remove)
            if self._whole is None:
                stack.enter_context(_TorchAttentionWatch(self._record_torch_attention))
            yield

    def _enter_hook(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter(name, (args, kwargs), f"what it gives to {name}")

    def _enter(self, name: str, inputs: Any, what: str) -> _LayerCall | None:
        """Record a call's inputs, or compare them. Return the call of the run with all tokens."""
        number, num_findings = self._num_calls[name], len(self._findings)
        self._num_calls[name] += 1
        recorded = None
        if self._whole is None:
            self._calls[name, number] = _LayerCall(_copies(inputs), self._generator.get_state())
        elif (recorded := self._whole._calls.get((name, number))) is not None:
            self._generator.set_state(recorded.state_before)
            self._add_finding(self._difference(leaves(inputs), recorded.inputs), self._current_layer, what)
        self._open_calls.append((name, number, num_findings))
        return recorded

    def _leave_hook(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> Any:
        """Record a call's output, or compare it; where it is equal, return the recorded one in its place."""
        _, number, num_findings = self._open_calls.pop()
        if self._whole is None:
            self._record_output(name, number, output)
            return None
        recorded = self._whole._calls.get((name, number))
        if recorded is None:
            return None

        self._generator.set_state(recorded.state_after)
        difference = self._difference(leaves(output), recorded.output)
        if difference > self._tolerance:
            if len(self._findings) == num_findings:
                self._add_finding(difference, name, "its output")
            return None
        del self._findings[num_findings:]
        return self._replaced(output, recorded.output, inputs)

    def _record_output(self, name: str, number: int, output: Any) -> None:
        call = self._calls[name, number]
        self._calls[name, number] = call._replace(output=_copies(output), state_after=self._generator.get_state())

    def _replaced(self, output: Any, recorded: Sequence[Any], inputs: Any) -> Any:
        """Return `output` with the recorded values, unless it shares memory with an input that it would not follow then."""
        flat, structure = flatten(output)
        input_memory = {storage_key(leaf) for leaf in leaves(inputs) if _is_plain(leaf)}
        if any(_is_plain(leaf) and storage_key(leaf) in input_memory for leaf in flat):
            return None
        pairs = zip(flat, recorded, strict=True)
        return unflatten([leaf if (part := self._part_of(whole, leaf)) is None else part for leaf, whole in pairs], structure)

    # -- differences ---------------------------------------------------------------------------------------------------

    @property
    def _current_layer(self) -> str:
        return self._open_calls[-1][0] if self._open_calls else ""

    def _add_finding(self, difference: float, layer: str, what: str) -> None:
        if difference > self._tolerance:
            calls_torch = self._whole is not None and layer in self._whole._calls_torch_attention
            self._findings.append(_Finding(self._describe(layer), what, difference, calls_torch))

    def _describe(self, layer: str) -> str:
        if layer:
            return f"{strip_compiled_prefix(layer)}, a {self._types[layer]}"
        return f"the code of stage {self._stage.index} between its layers"

    def _difference(self, values: Sequence[Any], recorded: Sequence[Any], compare_without_tokens: bool = False) -> float:
        """Return by how much values of tokens differ from those recorded, in shares of their size; 0 if none are of tokens."""
        if len(values) != len(recorded):
            return 0.0
        differences = [0.0]
        for value, whole in zip(values, recorded, strict=True):
            if (part := self._part_of(whole, value)) is not None:
                [dim] = [dim for dim, sizes in enumerate(zip(whole.shape, value.shape, strict=True)) if sizes[0] != sizes[1]]
                differences.append(_relative_difference(value, part, dim))
            elif compare_without_tokens and _is_plain(value) and _is_plain(whole) and value.shape == whole.shape:
                differences.append(_relative_difference(value.flatten(), whole.flatten(), 0))
        return max(differences)

    def _part_of(self, whole: Any, value: Any) -> Tensor | None:
        """Return the part of a recorded tensor for this run's tokens; None if it has none, or `value` is of another shape."""
        if not (_is_plain(whole) and _is_plain(value) and whole.dim() == value.dim() and whole.dtype == value.dtype):
            return None
        dims = [dim for dim in range(whole.dim()) if whole.shape[dim] != value.shape[dim]]
        if len(dims) != 1 or whole.shape[dims[0]] % self._total:
            return None
        if value.shape[dims[0]] * self._total != whole.shape[dims[0]] * self._length:
            return None
        return _take(whole, dims[0], self._total, self._first, self._length)

    def find_difference(self) -> _Finding | None:
        """Return the first layer with another output, if the stage's output is another one."""
        assert self._whole is not None
        is_last = self._stage.loss_fn is not None
        difference = self._difference(leaves(self.output), leaves(self._whole.output), compare_without_tokens=not is_last)
        if difference <= self._tolerance:
            return None
        if not self._findings:
            self._add_finding(difference, "", "the stage's output")
        return self._findings[0]

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None, dropout: float
    ) -> Tensor:
        """Return the attention of all tokens to each other; for a part of them, what that was."""
        recorded = self._enter(ATTENTION, (query, key, value), "what it gives to ps.attention")
        _, number, _ = self._open_calls.pop()
        if recorded is not None:
            shape = (*query.shape[:-1], value.shape[-1])
            part = self._part_of(recorded.output[0], query.new_empty(shape))
            if part is not None:
                self._generator.set_state(recorded.state_after)
                return part

        if mask is not None and mask.dim() == 4 and mask.shape[-1] > key.shape[TIME]:  # columns for the whole sequence
            mask = mask[..., self._position : self._position + key.shape[TIME]]
        self._attends = True
        output = attend(query, key, value, causal, mask, scale, dropout)
        self._attends = False
        if self._whole is None:
            self._record_output(ATTENTION, number, output)
        return output

    def _record_torch_attention(self) -> None:
        if not self._attends:
            self._calls_torch_attention.add(self._current_layer)


class _TorchAttentionWatch(TorchFunctionMode):
    """Calls a function when torch's `scaled_dot_product_attention` is called."""

    def __init__(self, on_call: Callable[[], None]) -> None:
        super().__init__()
        self._on_call = on_call

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.scaled_dot_product_attention:
            self._on_call()
        return function(*args, **(kwargs or {}))


# -- state ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _unchanged_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a stage inside, uncompiled. Afterwards its buffers, its modules' attributes and all generators are as before."""
    buffers = [(slot, slot.tensor.clone()) for slot in buffer_slots(module)]
    generator = default_generator(device)
    generators = [*list_generators(module), GeneratorAccess(generator.get_state, generator.set_state)]
    states = [access.read() for access in generators]

    with (
        preserve_attributes(module.modules()),
        torch.no_grad(),
        _without_autocast_cache(device),
        _uncompiled(module),
        replace_temporarily(buffers),
        use_generator_states(generators, states),
    ):
        yield


def _without_autocast_cache(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast, if it is on, neither uses nor leaves casts of parameters: these have no graph."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


def _uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    if any(map(is_compiled, module.modules())):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _layers_to_watch(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules of a stage with their names, but for those inside of one that runs no Python."""
    opaque = [f"{name}." for name, layer in module.named_modules() if isinstance(layer, torch.jit.ScriptModule)]
    for name, layer in module.named_modules():
        if name and not any(name.startswith(prefix) for prefix in opaque):
            yield name, layer


# -- tokens of tensors ---------------------------------------------------------------------------------------------------


def _dims_of_tokens(leaf: Any, num_tokens: int, sequence_dim: int, is_batch: bool) -> Sequence[int | None]:
    """Return the dimensions of a tensor that may have the tokens, the likeliest first; [None] if none may.

    Those of the batch are known. A message's first dimension may have (rows * tokens).
    """
    shape = leaf.shape if isinstance(leaf, Tensor) else ()
    if is_batch:
        return [sequence_dim] if len(shape) > sequence_dim else [None]
    dims = [dim for dim, size in enumerate(shape) if size == num_tokens]
    dims.sort(key=lambda dim: dim != sequence_dim)
    if not dims and shape and shape[0] and shape[0] % num_tokens == 0:
        dims = [0]
    return dims or [None]


def _take(leaf: Any, dim: int | None, num_tokens: int, first: int, length: int) -> Any:
    """Return a copy of a tensor with some of its `num_tokens` tokens, in dimension `dim`; other leaves as they are."""
    if dim is None or not isinstance(leaf, Tensor):
        return leaf
    parts = leaf.detach().unflatten(dim, (-1, num_tokens)).narrow(dim + 1, first, length)
    return parts.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


def _is_plain(leaf: Any) -> bool:
    """Return whether it is a dense tensor of this rank alone."""
    return type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided


def _copies(tree: Any) -> list[Any]:
    """Return the leaves of `tree`, the tensors copied: a later operation may change them in place."""
    return [leaf.detach().clone() if _is_plain(leaf) else None for leaf in leaves(tree)]


def _relative_difference(value: Tensor, expected: Tensor, dim: int) -> float:
    """Return the largest difference of a token's values, which are those at an index of `dim`, as a share of their size.

    The size is the root of the mean square, of the token's and of all tokens' values. Where either is not finite there is no
    difference.
    """
    if not value.numel():
        return 0.0
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0 if torch.equal(value, expected) else 1.0
    if value.is_complex():
        value, expected = torch.view_as_real(value), torch.view_as_real(expected)
    dtype = torch.float32 if value.dtype.itemsize < 4 else value.dtype
    pair = torch.stack([tensor.to(dtype).movedim(dim, 0).reshape(value.shape[dim], -1) for tensor in (value, expected)])
    pair = torch.where(pair.isfinite().all(0), pair, 0)
    differences = (pair[0] - pair[1]).square().mean(1).sqrt()
    sizes = pair.square().mean((0, 2)).sqrt() + pair.square().mean().sqrt()
    return float((differences / sizes).nan_to_num(0.0).max())


def _tolerance(module: nn.Module) -> float:
    """Return the difference up to which values count as equal.

    A layer's inputs are equal, so only its own rounding differs: it adds in another order, mostly in float32, and rounds to its
    dtype. That are a few units of the latter, and little of 1e-4 in float32 and float64.
    """
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    for device_type in {parameter.device.type for parameter in module.parameters()}:
        if torch.is_autocast_enabled(device_type):
            dtypes.add(torch.get_autocast_dtype(device_type))
    return 1e-4 + 4 * max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps)
