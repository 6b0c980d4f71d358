"""Microbatches cut into slices of their tokens: idle time, planned lengths, memory, and a long prompt.

    python benchmarks/slices.py                   all parts, about five minutes
    python benchmarks/slices.py --only idle memory

Emulated devices sleep for each token, and for each pair of a token and one before it. It asserts no time.
"""

import os
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import tyro
from measure import peak_bytes_of_process, reset_peak
from tables import Row, show
from torch import Tensor, nn

import penstock as ps
from penstock.model import GPT, GPTConfig
from penstock.schedule import Costs, build, simulate

RANKS, MICROBATCHES, SLICES, TOKENS = 4, 8, 4, 256
FORWARD_SECONDS = 0.2  # of a microbatch on a stage; a backward takes twice as long
ATTENTION_SHARE = 0.3  # of a forward
PROMPT_TOKENS, PROMPT_SLICES, PROMPT_SECONDS = 4096, 8, 0.8  # on a stage
WARM_UP = 2


@dataclass
class SliceOptions:
    """Measure steps whose microbatches are cut into slices."""

    only: tuple[str, ...] = ("idle", "lengths", "memory", "prompt")
    rounds: int = 3  # steps of each kind, in turns
    width: int = 256  # of the GPT whose memory is measured
    layers: int = 32
    time: int = 512  # tokens of its rows


class Sleep(torch.autograd.Function):
    """Hands on what it gets, in both directions, later."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:  # noqa: D102
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        time.sleep(2 * ctx.seconds)
        return gradient, None


class AttentionDevice(nn.Module):
    """A stage of one small attention that takes `seconds` for `tokens`, `share` of them for pairs of tokens."""

    uses_cache = True

    def __init__(self, seconds: float, tokens: int, share: float) -> None:
        super().__init__()
        self.per_token, self.per_pair = seconds * (1 - share) / tokens, seconds * share / (tokens**2 / 2)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, tokens, 1) -> the same."""
        length, first = hidden.shape[1], ps.cache.first_position()
        query = hidden * self.weight
        key, value = ps.cache.extended(query, query)
        mixed = ps.attention(query[:, None], key[:, None], value[:, None])[:, 0]
        return Sleep.apply(mixed, self.per_token * length + self.per_pair * length * (first + length / 2))


class FirstDevice(AttentionDevice):
    """Takes token numbers."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, tokens) -> (rows, tokens, 1)."""
        return super().forward(tokens[..., None].float())


def first_loss(output: Tensor, target: Tensor) -> Tensor:
    """(rows, tokens, 1), (rows, tokens) -> scalar; costs next to nothing."""
    return (output[..., 0] - target).square().mean()


def devices(seconds: float, tokens: int, share: float) -> nn.Sequential:
    """One for each rank."""
    kinds = [FirstDevice, *[AttentionDevice] * (RANKS - 1)]
    return nn.Sequential(*(kind(seconds, tokens, share) for kind in kinds))


def run_steps(pipes: dict[str, ps.Pipeline], rounds: int) -> dict[str, float]:
    """The median makespan of each pipeline's steps, in turns."""
    tokens = torch.zeros(MICROBATCHES, TOKENS, dtype=torch.long)
    makespans: dict[str, list[float]] = {name: [] for name in pipes}
    for number in range(WARM_UP + rounds):
        for name, pipe in pipes.items():
            pipe.step(tokens, target=tokens.float())
            if number >= WARM_UP:
                makespans[name].append(pipe.timeline().makespan)
    return {name: median(seconds) for name, seconds in makespans.items()}


def run_idle(options: SliceOptions) -> list[Row]:
    """1f1b in whole microbatches and in slices: measured, and what `simulate` says."""
    slice_counts = {"1f1b": 1, f"1f1b, {SLICES} slices": SLICES}
    pipes = {
        name: ps.Pipeline(devices(FORWARD_SECONDS, TOKENS, 0.0), first_loss, "1f1b", MICROBATCHES, slices=count)
        for name, count in slice_counts.items()
    }
    measured = run_steps(pipes, options.rounds)
    rows: list[Row] = []
    for name, count in slice_counts.items():
        ideal = simulate(
            build("1f1b", RANKS, MICROBATCHES, slices=count), Costs(FORWARD_SECONDS, FORWARD_SECONDS, FORWARD_SECONDS)
        )
        rows.append(
            {
                "schedule": name,
                "step, ms": measured[name] * 1e3,
                "simulated": ideal.makespan * 1e3,
                "longer, %": 100 * (measured[name] / ideal.makespan - 1),
                "idle, %": 100 * (1 - 3 * FORWARD_SECONDS * MICROBATCHES / measured[name]),
                "simulated idle, %": 100 * ideal.bubble,
                "in flight": max(pipes[name].timeline().peak_in_flight),
            }
        )
    return rows


def run_lengths(options: SliceOptions) -> list[Row]:
    """What equal slices lose to attention, and what planned lengths win back."""
    equal = [TOKENS // SLICES] * SLICES
    pipe = ps.Pipeline(devices(FORWARD_SECONDS, TOKENS, ATTENTION_SHARE), first_loss, "1f1b", MICROBATCHES, slices=equal)
    run_steps({"": pipe}, 1)
    planned: list[Any] = [ps.plan.plan_slices(pipe.timeline(), equal)]
    dist.broadcast_object_list(planned)
    lengths: dict[str, tuple[list[int], float]] = {
        "no attention": (equal, 0.0),
        "equal": (equal, ATTENTION_SHARE),
        "planned": (planned[0], ATTENTION_SHARE),
    }
    pipes = {
        name: ps.Pipeline(devices(FORWARD_SECONDS, TOKENS, share), first_loss, "1f1b", MICROBATCHES, slices=list(slices))
        for name, (slices, share) in lengths.items()
    }
    measured = run_steps(pipes, options.rounds)
    lost = measured["equal"] - measured["no attention"]
    return [
        {
            "slices": name,
            "tokens": "/".join(map(str, lengths[name][0])),
            "step, ms": seconds * 1e3,
            "won back, %": 100 * (measured["equal"] - seconds) / lost,
        }
        for name, seconds in measured.items()
    ]


def run_memory(options: SliceOptions, count: int) -> tuple[float, float]:
    """Bytes of a GPT's activations and gradients on this rank: as told, and the process's peak above what it had before."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=256, context=options.time, width=options.width, layers=options.layers, heads=4))
    tokens = torch.randint(256, (2 * MICROBATCHES, options.time))
    pipe = ps.Pipeline(model, gpt_loss, "1f1b", MICROBATCHES, slices=count)
    for _ in range(WARM_UP):
        pipe.step(tokens, target=tokens)
        pipe.zero_grad()
    gradients = sum(parameter.nbytes for parameter in pipe.parameters())
    told = pipe.timeline().peak_memory[dist.get_rank()] + gradients
    reset_peak()
    before = peak_bytes_of_process()
    pipe.step(tokens, target=tokens)
    return told, peak_bytes_of_process() - before


def gpt_loss(output: Tensor, target: Tensor) -> Tensor:
    """(rows, tokens, vocabulary), (rows, tokens) -> scalar."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def run_prompt(options: SliceOptions) -> list[Row]:
    """Seconds until the first new token of a long prompt, in one slice and in several."""
    prompt, seconds = torch.zeros(1, PROMPT_TOKENS, dtype=torch.long), dict[int, list[float]]()
    pipes = {
        slices: ps.Pipeline(devices(PROMPT_SECONDS, PROMPT_TOKENS, 0.0), schedule="1f1b", microbatches=1, slices=slices)
        for slices in (1, PROMPT_SLICES)
    }
    for _ in range(options.rounds):
        for slices, pipe in pipes.items():
            dist.barrier()
            begin = time.perf_counter()
            pipe.generate(prompt, max_new_tokens=1)
            seconds.setdefault(slices, []).append(time.perf_counter() - begin)
    whole = median(seconds[1])
    return [
        {"slices": slices, "seconds": median(values), "times as fast": whole / median(values)}
        for slices, values in seconds.items()
    ]


PARTS = {"idle": run_idle, "lengths": run_lengths, "prompt": run_prompt}


def rank_main(options: SliceOptions, part: str) -> list[Row]:
    """What a rank runs of an emulated part."""
    torch.set_num_threads(1)
    return PARTS[part](options)


def main(options: SliceOptions) -> None:
    """Print a table for each part."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for part in options.only:
        if part != "memory":
            rows = ps.launch(rank_main, RANKS, options, part)[0]
        else:
            rows = [
                {
                    "slices": count,
                    "rank": rank,
                    "told, MB": told / 1e6,
                    "measured, MB": measured / 1e6,
                    "ratio": measured / told,
                }
                for count in (1, SLICES)
                for rank, (told, measured) in enumerate(ps.launch(run_memory, 2, options, count))
            ]
        print(f"\n{part}")
        show(rows, *rows[0])


if __name__ == "__main__":
    main(tyro.cli(SliceOptions))
