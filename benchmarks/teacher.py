"""A teacher in the idle time of a pipeline, beside two pipelines one after the other: their steps in turns, and predicted.

python benchmarks/teacher.py                    all schedules, about three minutes
python benchmarks/teacher.py --only 1f1b --rounds 5
python benchmarks/teacher.py --gpt              a GPT and its teacher that compute, on two ranks, about two minutes

Four emulated devices sleep: a rank's forward of a microbatch 10 ms, its backward 20 ms, and the teacher's forward 10 ms. Times
are from the first rank's start, just after a barrier, to the last rank's end. They are predicted at these costs, and at those
measured in steps of the model alone and steps with the teacher, with what the model's own step takes outside its actions. With
`--gpt` two ranks compute, a thread each; beside them one process with one thread, while the other rank waits. It asserts no
time.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import tyro
from tables import Row, show
from torch import Tensor, nn

import penstock as ps
from penstock.learn.devices import EmulatedDevice
from penstock.timing.teacher_stages import costs_with_teacher, teacher_ranks

RANKS, MICROBATCHES = 4, 8
SECONDS = 0.01  # of a rank's forward, of each half of its backward, and of the teacher's forward, for one microbatch
PARAMETERS_PER_SECOND = 100_000  # by which a pipeline compares the sizes of the model and its teacher
WARM_UP = 3  # steps of each kind
MEASURED_STEPS = 3  # for predictions


@dataclass
class TeacherOptions:
    """Measure steps with a teacher."""

    only: tuple[str, ...] = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
    rounds: int = 10  # steps of each kind
    size: float = 1.0  # of the teacher, in times the model
    gpt: bool = False  # that computes, in place of emulated devices


def model_loss(output: Tensor, target: Tensor) -> Tensor:
    """(rows, 1) twice -> scalar; costs next to nothing."""
    return (output - target).square().mean()


def teacher_loss(output: Tensor, target: Tensor, teacher_output: Tensor) -> Tensor:
    """The same, of the teacher's output too."""
    return (output - target - teacher_output).square().mean()


def pair_loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The same, where the teacher's output is a part of the target."""
    return teacher_loss(output, *target)


def run(options: TeacherOptions, name: str) -> list[Row]:
    """What a rank runs: all kinds of steps of a schedule, in turns. Return a row for each."""
    torch.set_num_threads(1)
    table = ps.schedule.build(name, RANKS, MICROBATCHES)
    part = SECONDS * RANKS / table.stages  # of a stage
    inputs, target = torch.zeros(MICROBATCHES, 1), torch.zeros(MICROBATCHES, 1)

    def device(forward: float, backward: float = 0.0) -> nn.Module:
        return EmulatedDevice(forward, backward, backward, parameters=round(forward * PARAMETERS_PER_SECOND))

    def student() -> list[nn.Module]:
        return [device(part, part) for _ in range(table.stages)]

    def teacher() -> nn.Sequential:
        return nn.Sequential(*[device(SECONDS * options.size / 2) for _ in range(2 * RANKS)])

    alone, after = (ps.Pipeline(student(), loss_fn, table) for loss_fn in (model_loss, pair_loss))
    frozen = ps.Pipeline([device(part * options.size) for _ in range(table.stages)], None, table)
    now, ahead = (ps.Pipeline(student(), teacher_loss, table, teacher=teacher()) for _ in range(2))

    def step_after_teacher() -> None:
        outputs = frozen.eval(inputs)
        after.step(inputs, target=None if outputs is None else (target, outputs))

    steps: dict[str, Callable[[], Any]] = {
        "the model alone": lambda: alone.step(inputs, target=target),
        "two pipelines": step_after_teacher,
        "teacher in this step": lambda: now.step(inputs, target=target),
        "teacher ahead": lambda: ahead.step(inputs, target=target, next_args=(inputs,)),
    }
    seconds = measure(steps, options.rounds)
    fastest = {kind: min(values) for kind, values in seconds.items()}  # the least disturbed
    planned = simulated(table, ps.schedule.Costs(part, part, part), options.size, part * options.size)
    timelines: dict[str, list[Any]] = {kind: [] for kind in ("the model alone", "teacher ahead")}
    for kind in [*timelines] * MEASURED_STEPS:
        steps[kind]()
        timelines[kind].append((alone if kind == "the model alone" else ahead).timeline())
    costs, forward = measured_costs(*timelines.values())
    predicted = simulated(table, costs, options.size, forward)
    outside = fastest["the model alone"] - predicted["the model alone"]  # of the actions: what the ranks agree on
    return [
        {
            "schedule": name,
            "step": kind,
            "median ms": 1e3 * median(values),
            "fastest ms": 1e3 * fastest[kind],
            "of the model's": fastest[kind] / fastest["the model alone"],
            "by planned costs": planned[kind] / planned["the model alone"],
            "by measured costs": (predicted[kind] + outside) / fastest["the model alone"],
            "off by %": 100 * (fastest[kind] / (predicted[kind] + outside) - 1),
        }
        for kind, values in seconds.items()
    ]


def measured_costs(alone: Sequence[Any], ahead: Sequence[Any]) -> tuple[ps.schedule.Costs, float]:
    """Return the costs of the model in steps of its own, and the teacher's forward in other steps, by stage of the model."""
    measured = ps.schedule.Measurement.from_timelines(*alone)
    teacher = ahead[0].stage_chains.teacher
    times = defaultdict[int, list[float]](list)
    for event in (event for timeline in ahead for event in timeline.events if event.action.stage >= teacher):
        times[event.action.stage].append(event.end - event.start)
    engine = median(measured.engine_seconds[ps.schedule.Kind.F])
    return measured.costs, sum(median(values) + engine for values in times.values()) / measured.schedule.stages


def simulated(table: ps.schedule.Schedule, costs: ps.schedule.Costs, size: float, forward: float) -> dict[str, float]:
    """Return the seconds of each kind of step at these `costs` of the model. `forward`: of as small a part of the teacher."""
    placement = teacher_ranks(table, forward_ratio=size)
    model_forward = costs.action_costs(table.stages)[ps.schedule.Kind.F]
    times = costs_with_teacher(costs, table.stages, len(placement), forward * table.stages / sum(model_forward))
    orders = costs_with_teacher(ps.schedule.Costs(), table.stages, len(placement), size)  # as the pipeline assumes
    own = ps.schedule.simulate(table, costs).makespan
    forwards = table.filter_actions(lambda action: action.kind is ps.schedule.Kind.F)
    now, ahead = (ps.schedule.with_teacher(table, placement, ahead, orders) for ahead in (False, True))
    return {
        "the model alone": own,
        "two pipelines": own + ps.schedule.simulate(forwards, replace(costs, forward=forward)).makespan,
        "teacher in this step": ps.schedule.simulate(now, times).makespan,
        "teacher ahead": ps.schedule.simulate(ahead, times).makespan,
    }


def run_gpt(options: TeacherOptions) -> list[Row]:
    """What each of two ranks runs with `--gpt`: steps of a GPT with a teacher, in turns. Return a row for each kind."""
    torch.set_num_threads(1)
    shape = ps.model.GPTConfig(vocabulary=512, context=64, width=192, layers=8, heads=4)
    tokens = torch.randint(512, (2 * MICROBATCHES, 65))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    def distillation(logits: Tensor, target: Tensor, teacher_logits: Tensor) -> Tensor:
        soft = nn.functional.kl_div(
            logits.flatten(0, 1).log_softmax(-1), teacher_logits.flatten(0, 1).softmax(-1), reduction="batchmean"
        )
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) + soft

    def from_target(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return distillation(logits, *target)

    def pipeline(loss_fn: Any, teacher: Any = None, **place: Any) -> Any:
        return ps.Pipeline(ps.model.GPT(shape), loss_fn, "1f1b", MICROBATCHES, teacher=teacher, seed=None, **place)

    after, frozen = pipeline(from_target), pipeline(None)
    now, ahead = (pipeline(distillation, ps.model.GPT(shape)) for _ in range(2))
    one = pipeline(distillation, ps.model.GPT(shape), topology=ps.Topology()) if dist.get_rank() == 0 else None

    def step_after_teacher() -> None:
        outputs = frozen.eval(inputs)
        after.step(inputs, target=None if outputs is None else (labels, outputs))

    seconds = measure(
        {
            "one process": lambda: one and one.step(inputs, target=labels),
            "two pipelines": step_after_teacher,
            "teacher in this step": lambda: now.step(inputs, target=labels),
            "teacher ahead": lambda: ahead.step(inputs, target=labels, next_args=(inputs,)),
        },
        options.rounds,
    )
    return [
        {
            "schedule": "1f1b",
            "step": kind,
            "median ms": 1e3 * median(values),
            "tokens a second": inputs.numel() / median(values),
            "spread %": 100 * (max(values) - min(values)) / median(values),
            "of two pipelines": median(seconds["two pipelines"]) / median(values),
        }
        for kind, values in seconds.items()
    ]


def measure(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of step, which run in turns."""
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for number in range(WARM_UP + rounds):
        for kind in steps if number % 2 else reversed(steps):
            dist.barrier()
            begin = time.perf_counter()
            steps[kind]()
            spans: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(spans, (begin, time.perf_counter()))
            if number >= WARM_UP:
                seconds[kind].append(max(end for _, end in spans) - min(start for start, _ in spans))
    return seconds


def main(options: TeacherOptions) -> None:
    """Print a table."""
    os.environ |= {"OMP_NUM_THREADS": "1"}
    if options.gpt:
        rows = ps.launch(run_gpt, 2, options)[0]
    else:
        rows = [row for name in options.only for row in ps.launch(run, RANKS, options, name)[0]]
    show(rows, *rows[0])


if __name__ == "__main__":
    main(tyro.cli(TeacherOptions))
