"""Rows have lengths: padding, groups as they arrive, a planned order and planned groups, their steps in turns.

python benchmarks/lengths.py                        all parts, about six minutes
python benchmarks/lengths.py --only emulated --draws 2 --rounds 1

Of 64 rows, 16 microbatches are made. Emulated devices sleep in proportion to the padded tokens of a microbatch. Every step is
also predicted, at costs that `pipe.plan_costs()` has fitted to the steps before. It asserts no time.
"""

import os
import pydoc_data.topics
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
import tyro
from tables import Row, show
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock as ps

ROWS, MICROBATCHES, RANKS = 64, 16, 4
FORWARD_SECONDS = 0.01  # of a group of four as they arrive, in the mean; a backward takes twice as long
WARM_UP = 2  # steps of each kind
TORCH = "padded, torch"
Batch = tuple[list[Tensor], list[Tensor]]  # the entries of a list: inputs and targets


@dataclass
class LengthOptions:
    """Measure steps over rows of unequal lengths."""

    only: tuple[str, ...] = ("emulated", "shapes", "compute")
    sources: tuple[str, ...] = ("lognormal", "reference")
    draws: int = 12  # batches of each source of lengths
    seed: int = 0  # of the first batch
    rounds: int = 2  # steps of each kind over a batch
    shape_steps: int = 20  # steps over new shapes, and over equal ones


def lognormal_lengths(seed: int) -> list[int]:
    """Lengths of 64 rows: sigma 1, the median 148."""
    rng = random.Random(seed)
    return [max(1, int(rng.lognormvariate(5, 1))) for _ in range(ROWS)]


def corpus_lengths(seed: int) -> list[int]:
    """Words in each of 64 random paragraphs of Python's reference, as CPython ships it for `help()`, in a random order."""
    paragraphs = [text for topic in sorted(pydoc_data.topics.topics) for text in pydoc_data.topics.topics[topic].split("\n\n")]
    words = [len(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]
    return random.Random(seed).sample(words, ROWS)


SOURCES: dict[str, Callable[[int], list[int]]] = {"lognormal": lognormal_lengths, "reference": corpus_lengths}


class Sleep(torch.autograd.Function):
    """Hands on what it gets, in both directions, later."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, seconds: float) -> Tensor:  # noqa: D102
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: D102
        time.sleep(2 * ctx.seconds)
        return gradient.view_as(gradient), gradient.flatten()[:1], None


class LengthDevice(nn.Module):
    """Sleeps for so long a token, or so long an action."""

    def __init__(self, per_token: float = 0.0, per_action: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.weight = (per_token, per_action), nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, time) -> the same."""
        per_token, per_action = self.seconds
        return Sleep.apply(hidden, self.weight, per_token * hidden.numel() + per_action)


def first_loss(output: Tensor, target: Tensor) -> Tensor:
    """(rows, time) twice -> scalar; costs next to nothing."""
    return (output[:, 0] - target[:, 0]).square().mean()


def pad(groups: Sequence[Sequence[int]], lengths: Sequence[int], longest: int = 0) -> Batch:
    """Microbatches of zeros, each padded to its longest row, or all to `longest`."""
    shapes = [(len(group), longest or max(lengths[row] for row in group)) for group in groups]
    return [torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes]


def fours() -> list[range]:
    """Rows as they arrive, four to a microbatch."""
    return [range(start, start + ROWS // MICROBATCHES) for start in range(0, ROWS, ROWS // MICROBATCHES)]


def timed_step(pipe: ps.Pipeline, batch: Batch, order: str = "given") -> float:
    """Seconds from the first rank's start, just after a barrier, to the last rank's end."""
    dist.barrier()
    begin = time.perf_counter()
    pipe.step_microbatches(*batch, order=order)
    spans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(spans, (begin, time.perf_counter()))
    return max(end for _, end in spans) - min(start for start, _ in spans)


def run_emulated(options: LengthOptions, source: str) -> list[dict[str, tuple[float, float]]]:
    """Of each batch and kind of step: the fastest step's seconds from first action to last, and those predicted."""
    tokens = [entry.numel() for draw in range(options.draws) for entry in pad(fours(), SOURCES[source](draw))[0]]
    devices = [LengthDevice(per_token=FORWARD_SECONDS / fmean(tokens)) for _ in range(RANKS)]
    pipe = ps.Pipeline(devices, first_loss, "1f1b", MICROBATCHES)
    found = []
    for draw in range(-1, options.draws):
        lengths = SOURCES[source](options.seed + draw)
        planned = ps.plan.group_rows(lengths, MICROBATCHES, cost=pipe.plan_costs() if draw >= 0 else None)
        kinds = {
            "padded": (pad(fours(), lengths, max(lengths)), "given"),
            "arrival": (pad(fours(), lengths), "given"),
            "order": (pad(fours(), lengths), "planned"),
            "groups": (pad(planned, lengths), "planned"),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(WARM_UP if draw < 0 else options.rounds):
            for kind, (batch, order) in kinds.items():
                timed_step(pipe, batch, order)
                report = pipe.report
                assert report is not None
                seconds[kind].append(report.makespan)
        if draw >= 0:
            found.append({kind: (min(seconds[kind]), predict(pipe, *kinds[kind])) for kind in kinds})
    return found


def predict(pipe: ps.Pipeline, batch: Batch, order: str) -> float:
    """What the simulator says of a step over the list, in the order that runs, at the fitted costs."""
    costs, sizes = pipe.plan_costs(), [(len(entry), entry.shape[1]) for entry in batch[0]]
    if order == "planned":
        from penstock.plan.microbatch_order import plan_order

        order_planned = plan_order([costs(*size) for size in sizes], pipe.schedule, costs.step_costs(sizes))
        sizes = [sizes[index] for index in order_planned]
    return ps.schedule.simulate(pipe.schedule, costs.step_costs(sizes)).makespan


def emulated(options: LengthOptions) -> None:
    """Four devices whose actions take as long as their microbatch is large."""
    rows: list[Row] = []
    for source in options.sources:
        found = ps.launch(run_emulated, RANKS, options, source)[0]

        def ratios(above: str, below: str, found: Any = found) -> list[float]:
            return [times[above][0] / times[below][0] for times in found]

        errors = [abs(told / took - 1) for times in found for took, told in times.values()]
        for name, values in {
            "planned order / arrival order": ratios("order", "arrival"),
            "planned groups / groups of four": ratios("groups", "arrival"),
            "planned groups / padded to the longest": ratios("groups", "padded"),
            "predicted, off by": errors,
        }.items():
            rows.append({"lengths": source, "": name, "mean": fmean(values), "least": min(values), "most": max(values)})
    print(f"Four emulated devices, 1F1B, {ROWS} rows in {MICROBATCHES} microbatches; {options.draws} batches of each source.")
    show(rows, "lengths", "", "mean", "least", "most")


def run_shapes(steps: int) -> tuple[list[float], list[float]]:
    """Seconds of steps over 16 equal microbatches, and over 16 of shapes that are new in each step."""
    pipe = ps.Pipeline([LengthDevice(per_action=FORWARD_SECONDS) for _ in range(RANKS)], first_loss, "1f1b", MICROBATCHES)
    equal: list[float] = []
    unequal: list[float] = []
    for step in range(WARM_UP + steps):
        same = [(4, 300)] * MICROBATCHES
        new = [(1 + index % 8, 100 + step * MICROBATCHES + index) for index in range(MICROBATCHES)]
        for shapes, into in ((same, equal), (new, unequal)):
            into.append(timed_step(pipe, ([torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes])))
    return equal[WARM_UP:], unequal[WARM_UP:]


def shapes(options: LengthOptions) -> None:
    """What it costs that no shape was seen before."""
    equal, unequal = ps.launch(run_shapes, RANKS, options.shape_steps)[0]
    ideal = ps.schedule.simulate(
        ps.schedule.build("1f1b", ranks=RANKS, microbatches=MICROBATCHES),
        ps.schedule.Costs(FORWARD_SECONDS, FORWARD_SECONDS, FORWARD_SECONDS),
    ).makespan
    print(f"\nSteps of {MICROBATCHES} microbatches of {1e3 * FORWARD_SECONDS:g} ms a forward on {RANKS} ranks, ms:")
    for name, values in {"equal": equal, "never seen": unequal}.items():
        print(f"  {name:12} median {1e3 * median(values):.1f}, fastest {1e3 * min(values):.1f}; ideal {1e3 * ideal:.1f}")
    pairs = sorted(new / old for old, new in zip(equal, unequal, strict=True))
    print(f"  never seen / equal: {median(unequal) / median(equal):.4f}; of neighbours {median(pairs):.4f}")


def gpt_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens that count."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def gpt_batches(config: ps.model.GPTConfig) -> tuple[dict[str, Batch], int]:
    """The same rows, padded to the longest, in groups of four, and in planned groups; how many tokens count."""
    lengths = [min(length, config.context) for length in lognormal_lengths(0)]
    rows = [torch.randint(config.vocabulary, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]

    def batch(groups: Sequence[Sequence[int]], longest: int = 0) -> Batch:
        inputs, targets = [], []
        for group in groups:
            width = longest or max(lengths[row] for row in group)
            padding = [width - lengths[row] for row in group]
            pairs = zip(group, padding, strict=True)
            inputs.append(torch.stack([nn.functional.pad(rows[row], (0, more)) for row, more in pairs]))
            pairs = zip(group, padding, strict=True)
            targets.append(torch.stack([nn.functional.pad(rows[row], (0, more), value=-100) for row, more in pairs]))
        return inputs, targets

    planned = ps.plan.group_rows(lengths, MICROBATCHES)
    kinds = {"padded": batch(fours(), max(lengths)), "arrival": batch(fours()), "groups": batch(planned)}
    return kinds, sum(lengths)


def make_torch_step(config: ps.model.GPTConfig, padded: Batch) -> Callable[[], object]:
    """Return a step of torch.distributed.pipelining over the same rows: all padded to the longest, since shapes are static."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(ps.partition.split(ps.model.GPT(config), ranks)[rank], rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=gpt_loss)
    args = (torch.cat(padded[0]),) if rank == 0 else ()
    target = torch.cat(padded[1]) if rank == ranks - 1 else None

    def step() -> None:
        schedule.step(*args, target=target)
        stage.submod.zero_grad()

    return step


def run_compute(rounds: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Tokens that count a second, of each kind of step; and the gradients of the last."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ps.model.GPTConfig(context=512, layers=4)
    pipe = ps.Pipeline(ps.model.GPT(config), gpt_loss, "1f1b", MICROBATCHES, loss_weight=ps.tokens())
    kinds, tokens = gpt_batches(config)
    seconds: dict[str, list[float]] = {kind: [] for kind in (*kinds, *([TORCH] if pipe.topology.world_size > 1 else []))}
    torch_step = make_torch_step(config, kinds["padded"]) if TORCH in seconds else None
    for _ in range(1 + rounds):
        for kind, batch in kinds.items():
            begin = time.perf_counter()
            pipe.step_microbatches(*batch)
            seconds[kind].append(time.perf_counter() - begin)
            if kind != "groups":
                pipe.zero_grad()
        if torch_step is not None:
            begin = time.perf_counter()
            torch_step()
            seconds[TORCH].append(time.perf_counter() - begin)
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}
    return {kind: tokens / min(times[1:]) for kind, times in seconds.items()}, grads


def compute(options: LengthOptions) -> None:
    """A GPT on two ranks, one thread each, beside one process."""
    two = ps.launch(run_compute, 2, options.rounds)
    one, expected = ps.launch(run_compute, 1, options.rounds)[0]
    grads = {name: grad for _, part in two for name, grad in part.items()}
    same = all(torch.equal(grads[name], grad) for name, grad in expected.items())
    rows: list[Row] = [
        {"": kind, "two ranks": two[0][0][kind], "one process": one[kind], "ratio": two[0][0][kind] / one[kind]} for kind in one
    ]
    rows.append({"": TORCH, "two ranks": two[0][0][TORCH], "one process": None, "ratio": None})
    print(f"\nTokens that count a second of a GPT; gradients have {'the same bits' if same else 'OTHER BITS'}:")
    show(rows, "", "two ranks", "one process", "ratio")


def main(options: LengthOptions) -> None:
    """Run the parts that were asked for."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for part in (emulated, shapes, compute):
        if part.__name__ in options.only:
            part(options)


if __name__ == "__main__":
    main(tyro.cli(LengthOptions))
