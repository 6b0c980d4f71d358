r"""Text from a model that is cut over ranks: pass after pass of forwards, each of which adds a token to every row.

    rank 0   compare  0F0  0F1         tokens  0F0  0F1         tokens  ..
                         \    \       /           \    \       /
    rank 1   compare      1F0  1F1  tokens         1F0  1F1  tokens     ..

Two microbatches of rows on two ranks. A pass is the forwards of an evaluation without its agreement: the options are compared
once. The logits stay on the last stage's rank, which chooses a token for each row and sends it to all ranks.

If every layer supports the cache (`cache.py`), the first pass brings the prompt and each further one the newest token. If not,
or if the text is longer than the model's context, each pass brings all tokens that the model can see. A pipeline of slices
runs a prompt for the cache in slices: the first ones reach the last stage while the others pass the stages before it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batch.call import Call
from penstock.batch.pieces import split_sizes, token_lengths
from penstock.comms.transport.channels import Channels
from penstock.comms.wait_errors import convert_errors
from penstock.digest import hash_bytes
from penstock.engine.actions import messages_of
from penstock.engine.cache import TokenCache, max_context, supports_incremental_decoding
from penstock.engine.clock import ActionClock
from penstock.engine.observers import StepFunctions
from penstock.engine.step import Engine
from penstock.errors import MismatchError, is_whole_number, require_equal
from penstock.mesh.parallelize import begin_gathering_parameters
from penstock.randomness import mix_seed
from penstock.schedule.table import Action, Kind
from penstock.trees import tensors


class GenerationOptions(NamedTuple):
    """The options of `Pipeline.generate`, equal on all ranks."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    eos: int | None = None
    seed: int = 0

    def validate(self) -> "GenerationOptions":
        """Return the same options with Python's integers. Raise MismatchError for a value out of range."""
        integers = dict[str, int]()
        for name, minimum, optional in (("max_new_tokens", 1, False), ("top_k", 1, True), ("eos", 0, True), ("seed", 0, False)):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if not is_whole_number(value, minimum):
                allowed = f"a whole number of {minimum} or more{' or None' if optional else ''}"
                raise MismatchError(f"generate() takes {allowed} as {name}, got {value!r}")
            integers[name] = int(value)

        if not isinstance(self.temperature, int | float) or not 0 <= self.temperature < float("inf"):
            raise MismatchError(
                f"generate() takes a number of 0 (always the likeliest token) or more as temperature, got {self.temperature!r}"
            )
        return self._replace(**integers)


class RankGenerationHeader(NamedTuple):
    """A rank's message to all others before the first pass."""

    options: GenerationOptions
    prompt: str  # shape and hash of the tokens
    rows: int
    supports_cache: bool  # whether all its stages do
    can_cut_prompt: bool  # whether the prompt is all that its call brings for each token
    max_context: int | None  # the most tokens that its stages can take at once


def generate_text(
    engine: Engine,
    tokens: Tensor,
    kwargs: Mapping[str, Any],
    options: GenerationOptions,
    on_token: Callable[[Tensor], object] | None,
    rows_dim: int,
) -> Tensor:
    """Return the text, prompt included: see `Pipeline.generate`."""
    channels = engine.open_channels()  # opened first: only then do the other ranks learn of a mistake made on this one
    engine.parameters.check_initialised()
    options = options.validate()
    if engine.reader.forward is not None:
        defaults = GenerationOptions(max_new_tokens=0)
        given = [name for name, value in options._asdict().items() if value != getattr(defaults, name)]
        engine.reader.forward.check_options("generate()", given, 1)
    if engine.position.cp_size > 1:
        raise MismatchError("generate() does not cut tokens along cp: build a pipeline of the same weights without that axis")
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2 or not tokens.numel():
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise MismatchError(f"generate() takes tokens as (batch, time) int64, one or more of each, got {got}")
    if rows_dim > 1:
        raise MismatchError(f"generate() gives the model tokens of two dimensions, and rows_dim={rows_dim} is none of them")

    generation = TextGeneration(engine, tokens, kwargs, options, rows_dim)
    engine.discard_step_state()
    begin_gathering_parameters([engine.stages[index] for index in generation.program.stages])

    for _ in range(options.max_new_tokens):
        column = generation.generate_next_token(channels)
        if on_token is not None:
            on_token(column)
        if generation.is_complete:
            break

    with convert_errors("for the replicas to generate"):
        for stage in engine.stages.values():
            stage.data_parallel.finish_step(training=False)
    return generation.text


class TextGeneration:
    """Text of (batch, time) tokens, to which every pass adds one token a row."""

    def __init__(
        self, engine: Engine, tokens: Tensor, kwargs: Mapping[str, Any], options: GenerationOptions, rows_dim: int
    ) -> None:
        self.engine, self.text, self.kwargs, self.options = engine, tokens, dict(kwargs), options
        self.rows_dim = rows_dim  # of what the model takes and gives
        headers = _exchange_headers(engine, tokens, options, self.kwargs)

        replica_rows = [headers[ranks[0]].rows for ranks in engine.position.replica_pipelines]
        self.first_row = sum(replica_rows[: engine.position.replica])  # rows of all replicas are numbered
        self.sizes = split_sizes(len(tokens), min(len(tokens), engine.schedule.microbatches))
        self.program = engine.programs.select(training=False, num_microbatches=len(self.sizes), in_one_slice=True)

        contexts = [header.max_context for header in headers if header.max_context is not None]
        self.max_context = min(contexts, default=None)
        self.is_complete = False  # whether all rows of all replicas have ended
        self._uses_cache = all(header.supports_cache for header in headers)
        self._cuts_prompt = self._uses_cache and all(header.can_cut_prompt for header in headers)
        self._cuts_prompt &= 1 < engine.schedule.slices <= tokens.shape[1]
        self._caches: dict[tuple[int, int], TokenCache] = defaultdict(TokenCache)  # by stage and microbatch
        self._prompt_length = tokens.shape[1]

    def generate_next_token(self, channels: Channels) -> Tensor:
        """Run one pass. Return the token that each row has got, (batch,)."""
        engine, length = self.engine, self.text.shape[1]

        # 1. Which tokens the model gets. Beyond its context all positions change with each token, so nothing can be cached.
        visible = min(length, self.max_context or length)
        if visible < length:
            self._uses_cache = False
            self._caches.clear()
        self._num_inputs = num_inputs = 1 if self._uses_cache and length > self._prompt_length else visible
        tokens = self.text[:, -num_inputs:].transpose(0, self.rows_dim)

        # 2. The forwards.
        slices = engine.schedule.slices if self._cuts_prompt and self._uses_cache and num_inputs > 1 else 1
        layout = engine.layout._replace(sequence_dim=1 - self.rows_dim, rows_per_sample=1)
        reader = replace(engine.reader, layout=layout, token_parts=slices)
        self._batch = reader.read(Call("generate()", False, (tokens,), self._model_kwargs(num_inputs)))
        self._slice_lengths = token_lengths(slices, num_inputs)
        program = self.program if slices == 1 else engine.programs.select(False, len(self.sizes))
        self._new_tokens: dict[int, Tensor] = {}  # by microbatch
        repeats = num_inputs == 1  # with a cache; messages of any other pass have a size of their own, not to be remembered
        channels.begin_step([("generate", len(self.text), rows) if repeats else None for rows in self.sizes])
        functions = StepFunctions({Kind.F: self._forward}, channels.receive, channels.send)
        engine.run_program(program.lines, functions, channels, ActionClock())

        # 3. The new tokens, on all ranks.
        column = self._exchange_tokens()
        channels.end_step()
        self.text = torch.cat([self.text, column[:, None]], dim=1)
        return column

    def _model_kwargs(self, num_inputs: int) -> dict[str, Any]:
        """Return the model's further arguments. An `attention_mask` of the prompt is extended: new tokens are seen."""
        mask = self.kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != (len(self.text), self._prompt_length):
            return self.kwargs
        ones = mask.new_ones(len(mask), self.text.shape[1] - self._prompt_length)
        return {**self.kwargs, "attention_mask": torch.cat([mask, ones], 1)[:, -num_inputs:]}

    def _forward(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """Run a forward. Return a message for each receiver; none on the last stage, whose logits become tokens."""
        _, index, microbatch, slice_ = action
        lengths = self._slice_lengths
        inputs = values if index else self._batch.inputs_of(action)
        stage, position = self.engine.stages[index], self.text.shape[1] - self._num_inputs + sum(lengths[:slice_])
        with self._caches[index, microbatch].forward_at(position) if self._uses_cache else nullcontext():
            output = stage.forward(microbatch, inputs, with_backward=False)
        if index < self.engine.schedule.stages - 1:
            return messages_of(stage, output)
        if slice_ < len(lengths) - 1:
            return ()

        logits = logits_at_last_time_index(output, self.sizes[microbatch], lengths[slice_], self.rows_dim)
        first_row = self.first_row + sum(self.sizes[:microbatch])
        self._new_tokens[microbatch] = sample_tokens(logits, self.options, first_row, self.text.shape[1])
        return ()

    def _exchange_tokens(self) -> Tensor:
        """Return the new tokens, sent by the rank that has the last stage. Rows that have ended go on with eos."""
        engine, eos, message = self.engine, self.options.eos, None
        last_rank = engine.schedule.placement[-1]
        if self._new_tokens:
            column, is_complete = torch.cat([self._new_tokens[microbatch] for microbatch in range(len(self.sizes))]), False
            if eos is not None:
                had_ended = (self.text[:, self._prompt_length :].cpu() == eos).any(1)
                column = column.masked_fill(had_ended, eos)
                is_complete = bool((had_ended | (column == eos)).all())
            message = column.tolist(), is_complete

        messages = engine.control.all_gather_value(message, "to choose the next tokens")
        self.is_complete = all(messages[ranks[last_rank]][1] for ranks in engine.position.replica_pipelines)
        tokens, _ = messages[engine.position.replica_pipelines[engine.position.replica][last_rank]]
        return torch.tensor(tokens, device=self.text.device)


def _exchange_headers(
    engine: Engine, tokens: Tensor, options: GenerationOptions, kwargs: Mapping[str, Any]
) -> Sequence[RankGenerationHeader]:
    """Return all ranks' headers. Raise MismatchError if options differ, or prompts within a replica."""
    modules = [stage.module for stage in engine.stages.values()]
    prompt_hash = hash_bytes(tokens.cpu().contiguous().numpy().tobytes())
    prompt = f"{tuple(tokens.shape)} {prompt_hash}"
    supports_cache, can_cut_prompt = all(map(supports_incremental_decoding, modules)), not tensors(kwargs)
    header = RankGenerationHeader(options, prompt, len(tokens), supports_cache, can_cut_prompt, max_context(modules))
    headers = engine.control.all_gather_value(header, "to generate")

    for name in GenerationOptions._fields:
        values = [getattr(rank_header.options, name) for rank_header in headers]
        require_equal(values, "do not generate alike", f"has {name}={{}}", "; give the same")
    for pipelines in engine.position.pipelines:
        first_rank, *ranks = [rank for pipeline in pipelines for rank in pipeline]
        for rank in ranks:
            if headers[rank].prompt != headers[first_rank].prompt:
                raise MismatchError(f"generate() has other tokens on rank {rank} than on rank {first_rank}: give the same")
    return headers


def logits_at_last_time_index(output: Any, rows: int, time: int, rows_dim: int) -> Tensor:
    """Return the logits of the last position, (batch, vocabulary). Raise MismatchError if `output` has no logits."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    shape = (time, rows) if rows_dim else (rows, time)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != shape or not logits.is_floating_point():
        got = f"{logits.dtype} of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        layout = "time, batch" if rows_dim else "batch, time"
        raise MismatchError(
            f"generate() needs a model that gives logits, ({layout}, vocabulary), itself or as `logits`, "
            f"here ({shape[0]}, {shape[1]}, ..), got {got}"
        )
    return logits.select(1 - rows_dim, -1)


def sample_tokens(logits: Tensor, options: GenerationOptions, first_row: int, position: int) -> Tensor:
    """Choose a token for each row of `logits`, (batch, vocabulary): the likeliest, or drawn. Returns (batch,).

    Random numbers depend on seed, row and position only, not on which rank draws, or with which other rows.
    """
    if not options.temperature:
        return logits.argmax(-1).cpu()
    scores = logits.cpu().double()
    if options.top_k is not None and options.top_k < scores.shape[-1]:
        least = scores.topk(options.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)

    cumulative = ((scores - scores.amax(-1, keepdim=True)) / options.temperature).exp().cumsum(-1)
    uniform = [(mix_seed(options.seed, first_row + row, position) >> 11) / 2**53 for row in range(len(logits))]  # 0 up to 1
    points = torch.tensor(uniform, dtype=torch.float64, device=cumulative.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, points, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
