r"""Text from a model that is cut over ranks: pass after pass of forwards, each of which adds a token to every row.

    rank 0   agree  0F0  0F1         tell  0F0  0F1         tell  ..
                       \    \       /         \    \       /
    rank 1   agree      1F0  1F1  tell         1F0  1F1  tell     ..

Two microbatches of rows on two ranks. A pass is the forwards of an evaluation, without its votes: what is asked for is agreed
on once. The logits stay on the last stage's rank, which chooses a token for each row and tells it to all ranks.

Where every layer takes part in the cache (`cache.py`), the first pass brings the prompt and each further one the newest token.
Elsewhere, and when the text is longer than the model's context, each pass brings all tokens that the model can see.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comms.control_group import convert_transport_errors
from penstock.comms.transport.channels import Channels, MessageSpecs
from penstock.engine.actions import messages
from penstock.engine.batch import Call, digest, split
from penstock.engine.cache import Cache, context_of, takes_part
from penstock.engine.clock import Clock
from penstock.engine.step import Engine
from penstock.errors import MismatchError, is_whole_number
from penstock.mesh.fsdp import begin_step
from penstock.randomness import mix_seed
from penstock.schedule.table import Action, Kind
from penstock.stage.microbatch import split_sizes


class Request(NamedTuple):
    """What is asked for, alike on all ranks: see `Pipeline.generate`."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    eos: int | None = None
    seed: int = 0

    def checked(self) -> "Request":
        """The same, its whole numbers as Python's. Raises MismatchError for a value that cannot be."""
        whole = dict[str, int]()
        for name, least, optional in (("max_new_tokens", 1, False), ("top_k", 1, True), ("eos", 0, True), ("seed", 0, False)):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if is_whole_number(value, least):
                whole[name] = int(value)
                continue
            allowed = f"a whole number of {least} or more{' or None' if optional else ''}"
            raise MismatchError(f"generate() takes {allowed} as {name}, got {value!r}")
        if not isinstance(self.temperature, int | float) or not 0 <= self.temperature < float("inf"):
            raise MismatchError(
                f"generate() takes a number of 0 (always the likeliest token) or more as temperature, got {self.temperature!r}"
            )
        return self._replace(**whole)


class Told(NamedTuple):
    """What a rank says before the first pass."""

    request: Request
    prompt: str  # a digest of the tokens
    rows: int
    cached: bool  # whether its stages can use a cache
    context: int | None  # the most tokens that its stages can take at once


def generate(
    engine: Engine,
    tokens: Tensor,
    kwargs: Mapping[str, Any],
    request: Request,
    on_token: Callable[[Tensor], object] | None,
    rows_dim: int,
) -> Tensor:
    """The text, prompt and all: see `Pipeline.generate`."""
    channels = engine.channels  # open, so that a mistake made on this rank only reaches the others
    engine.check_model()
    request = request.checked()
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2 or not tokens.numel():
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise MismatchError(f"generate() takes tokens as (batch, time) int64, one or more of each, got {got}")
    if rows_dim > 1:
        raise MismatchError(f"generate() gives the model tokens of two dimensions, and rows_dim={rows_dim} is none of them")
    generation = Generation(engine, tokens, kwargs, request, rows_dim)
    engine.forget()
    with convert_transport_errors("for the replicas to begin to generate"):
        begin_step([engine.stages[index].replication for index in generation.program.stages])
    for _ in range(request.max_new_tokens):
        column = generation.add_token(channels)
        if on_token is not None:
            on_token(column)
        if generation.ended:
            break
    with convert_transport_errors("for the replicas to generate"):
        for stage in engine.stages.values():
            stage.replication.finish_step(training=False)
    return generation.text


class Generation:
    """Rows of text that grow by a token at a time."""

    def __init__(self, engine: Engine, tokens: Tensor, kwargs: Mapping[str, Any], request: Request, rows_dim: int = 0) -> None:
        self.engine, self.text, self.kwargs, self.request = engine, tokens, dict(kwargs), request
        self.rows_dim = rows_dim  # of what the model takes and gives
        told = _agreed(engine, tokens, request)
        rows = [told[ranks[0]].rows for ranks in engine.position.replica_pipelines]
        self.first_row = sum(rows[: engine.position.replica])  # rows of all replicas are numbered
        self.sizes = split_sizes(len(tokens), min(len(tokens), engine.schedule.microbatches))
        self.program = engine.programs.of(training=False, microbatches=len(self.sizes))
        self.context = min((each.context for each in told if each.context is not None), default=None)
        self.ended = False  # all rows of all replicas have
        self._cached = all(each.cached for each in told)
        self._caches: dict[tuple[int, int], Cache] = defaultdict(Cache)  # by stage and microbatch
        self._prompt = tokens.shape[1]
        self._known: tuple[int, MessageSpecs | None] = 0, None  # what messages are like, for so many tokens

    def add_token(self, channels: Channels) -> Tensor:
        """One pass: returns the token that each row has got, (batch,)."""
        engine, length = self.engine, self.text.shape[1]
        seen = min(length, self.context or length)
        if seen < length:
            self._cached = False  # all positions change with each token
            self._caches.clear()
        self._given = given = 1 if self._cached and length > self._prompt else seen
        tokens = self.text[:, -given:].transpose(0, self.rows_dim)
        call = Call(False, (tokens,), self._arguments(given), None, 0, False, rows_dim=self.rows_dim)
        self._batch = split(call, engine.position, engine.schedule)
        self._chosen: dict[int, Tensor] = {}  # by microbatch
        specs = self._known[1] if self._known[0] == given else None
        channels.begin(specs)
        engine.run(self.program.steps, {Kind.F: self._forward}, channels, Clock())
        column = self._told()
        channels.end()
        self._known = given, specs or channels.learned()
        self.text = torch.cat([self.text, column[:, None]], dim=1)
        return column

    def _arguments(self, given: int) -> dict[str, Any]:
        """The model's further arguments; an `attention_mask` of the prompt grows with the text: new tokens are seen."""
        mask = self.kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != (len(self.text), self._prompt):
            return self.kwargs
        more = mask.new_ones(len(mask), self.text.shape[1] - self._prompt)
        return {**self.kwargs, "attention_mask": torch.cat([mask, more], 1)[:, -given:]}

    def _forward(self, action: Action, values: Sequence[Any]) -> Sequence[Any]:
        """What the stage makes for each of its takers; nothing on the last stage, whose logits become tokens."""
        _, index, microbatch = action
        stage, first = self.engine.stages[index], self.text.shape[1] - self._given
        with self._caches[index, microbatch].at(first) if self._cached else nullcontext():
            output = stage.forward(microbatch, self._batch.given(action, values), with_backward=False)
        if index < self.engine.schedule.stages - 1:
            return messages(stage, output)
        logits = last_logits(output, self.sizes[microbatch], self._given, self.rows_dim)
        start = self.first_row + sum(self.sizes[:microbatch])
        self._chosen[microbatch] = choose(logits, self.request, start, self.text.shape[1])
        return ()

    def _told(self) -> Tensor:
        """The new tokens, from the rank that has the last stage; rows that have ended go on with eos."""
        engine, eos, mine = self.engine, self.request.eos, None
        last = engine.schedule.placement[-1]
        if self._chosen:
            column, ended = torch.cat([self._chosen[microbatch] for microbatch in range(len(self.sizes))]), False
            if eos is not None:
                before = (self.text[:, self._prompt :].cpu() == eos).any(1)
                column = column.masked_fill(before, eos)
                ended = bool((before | (column == eos)).all())
            mine = column.tolist(), ended
        everyone = engine.control.all_gather_object(mine, "to choose the next tokens")
        self.ended = all(everyone[ranks[last]][1] for ranks in engine.position.replica_pipelines)
        tokens, _ = everyone[engine.position.replica_pipelines[engine.position.replica][last]]
        return torch.tensor(tokens, device=self.text.device)


def _agreed(engine: Engine, tokens: Tensor, request: Request) -> Sequence[Told]:
    """What all ranks say. Raises MismatchError unless they are asked for the same, those of a replica with the same prompt."""
    modules = [stage.module for stage in engine.stages.values()]
    prompt = digest(tokens.cpu().contiguous().numpy().tobytes())
    context = min((limit for limit in map(context_of, modules) if limit is not None), default=None)
    mine = Told(request, f"{tuple(tokens.shape)} {prompt}", len(tokens), all(map(takes_part, modules)), context)
    everyone = engine.control.all_gather_object(mine, "to generate")
    for rank, each in enumerate(everyone):
        for name, value in each.request._asdict().items():
            if value != (expected := getattr(everyone[0].request, name)):
                raise MismatchError(
                    f"generate() has {name}={expected} on rank 0, but {name}={value} on rank {rank}: give the same"
                )
    for pipelines in engine.position.pipelines:
        first, *others = [rank for ranks in pipelines for rank in ranks]
        for rank in others:
            if everyone[rank].prompt != everyone[first].prompt:
                raise MismatchError(f"generate() has other tokens on rank {rank} than on rank {first}: give the same")
    return everyone


def last_logits(output: Any, rows: int, time: int, rows_dim: int = 0) -> Tensor:
    """Those of the last position, (batch, vocabulary). Raises MismatchError if `output` has no logits."""
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


def choose(logits: Tensor, request: Request, first_row: int, position: int) -> Tensor:
    """A token for each row of (batch, vocabulary) `logits`: the likeliest, or drawn, with a random number made of seed, row and
    position, so that it does not matter which rank draws with which other rows.
    """
    if not request.temperature:
        return logits.argmax(-1).cpu()
    scores = logits.cpu().double()
    if request.top_k is not None and request.top_k < scores.shape[-1]:
        least = scores.topk(request.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    weights = ((scores - scores.amax(-1, keepdim=True)) / request.temperature).exp().cumsum(-1)
    drawn = [(mix_seed(request.seed, first_row + row, position) >> 11) / 2**53 for row in range(len(logits))]  # 0 up to 1
    points = torch.tensor(drawn, dtype=torch.float64, device=weights.device)[:, None] * weights[:, -1:]
    return torch.searchsorted(weights, points, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
