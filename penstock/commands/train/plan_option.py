"""`penstock train --plan`: before the first step, measure the layers, plan, and try the best plans."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from statistics import fmean, median
from tempfile import TemporaryDirectory

import torch

from penstock.checkpoint.files import manifest
from penstock.commands.train.config import BETTER_PLAN, PLAN, TrainConfig
from penstock.commands.train.setup import set_up, task
from penstock.comms.system import count_cores
from penstock.comms.topology import init_distributed
from penstock.errors import PenstockError
from penstock.launcher.launch import launch
from penstock.partition.balance import Balance
from penstock.plan import ModelProfile, Overheads, Plan, load, measure, measure_overheads, parse_memory_size, plan
from penstock.plan.model_profile import COSTS_FILE
from penstock.plan.recut import fastest_cut, profile_of_run
from penstock.schedule import Measurement, Timeline
from penstock.schedule.memory import format_bytes
from penstock.timing.causes import NOTABLE_SHARE

EXAMPLE_MICROBATCHES = 4  # the example has the rows of a microbatch of this many
UNLIMITED_BYTES = 1e15
TRIAL_ROUNDS, TRIAL_STEPS = 2, 4


def apply_plan(config: TrainConfig) -> tuple[TrainConfig, Plan | None]:
    """Choose a plan and print it. Return the options that it sets, and the plan; without --plan, the options and None."""
    if config.plan is None or config.resume is not None:
        return config, None
    candidate = load(config.plan) if config.plan.endswith(".json") else _fastest(config, _candidates(config))
    if candidate.schedule.teacher is not None:
        raise PenstockError(f"{config.plan} is for a model and its teacher, and `penstock train` has no teacher: plan without")
    if os.environ.get("RANK", "0") == "0":
        print(f"planned: {candidate}", flush=True)
    return _with_plan_options(candidate, config), candidate


def _with_plan_options(candidate: Plan, config: TrainConfig) -> TrainConfig:
    dp = candidate.dp if candidate.dp > 1 else config.dp  # a plan for one replica is a plan for each of several
    return replace(config, ranks=candidate.ranks, dp=dp, microbatches=candidate.microbatches, schedule=candidate.schedule.name)


def _candidates(config: TrainConfig) -> list[Plan]:
    """Return the best plan, the best whose ranks do not share cores, and the best for the typed schedule."""
    if config.tp > 1 or "RANK" in os.environ:
        raise PenstockError("--plan starts processes to measure on: plan with `penstock plan`, and give its plan.json")
    limit = UNLIMITED_BYTES if config.plan == "auto" else parse_memory_size(str(config.plan))
    parallel = _parallel_ranks(config)
    ranks = launch(_measure_on_rank, min(config.ranks, max(2, parallel)), config)  # at the same time, as the ranks will compute
    layers, costs = ModelProfile.mean_of([layers for layers, _ in ranks]), ranks[0][1]
    planned = partial(
        plan,
        layers,
        memory=limit,
        batch=config.batch // config.dp * config.dp,
        dp=config.dp,
        effort="quick",
        send=costs.send,
        bandwidth=costs.bandwidth,
        action=costs.action,
        cores=parallel,
    )
    plans = planned(ranks=config.ranks * config.dp)[:1]
    with suppress(PenstockError):  # no plan fits on fewer ranks; the typed schedule does not fit, or is no family
        if plans[0].ranks * config.dp > parallel:
            plans += planned(ranks=max(1, parallel // config.dp) * config.dp)[:1]
        plans += planned(
            ranks=config.ranks * config.dp, schedules=[config.schedule], microbatches=config.microbatches, fewer=False
        )[:1]
    return plans


def _measure_on_rank(config: TrainConfig) -> tuple[ModelProfile, Overheads]:
    """Measure the layers on the device that trains them, and the overheads of a step."""
    topology = init_distributed(device=None if config.device == "auto" else config.device)
    source, model, loss_fn = task(config)
    inputs, target = source.batch(config.seed, 0, max(1, config.batch // config.dp // EXAMPLE_MICROBATCHES))
    model.to(topology.device)
    inputs, target = inputs.to(topology.device), target.to(topology.device)
    costs = measure_overheads()
    return costs.subtract_from(
        measure(model, (inputs,), loss_fn=loss_fn, target=target, device=topology.device, seconds=1.0)
    ), costs


def _fastest(config: TrainConfig, plans: Sequence[Plan]) -> Plan:
    """Run a few steps with each plan, in turn, and return the plan with the fastest steps."""
    times: list[list[float]] = [[] for _ in plans]
    with TemporaryDirectory() as folder:
        trials = [
            save_plan(_with_plan_options(candidate, config), candidate, Path(folder) / str(number))
            for number, candidate in enumerate(plans)
        ]
        for _ in range(TRIAL_ROUNDS):
            for trial, seconds in zip(trials, times, strict=True):
                seconds += launch(_time_steps, trial.processes, trial)[0]
    for candidate, seconds in zip(plans, times, strict=True):
        planned, step = 1e3 * candidate.seconds, 1e3 * median(seconds)
        print(f"tried: {_table(candidate)}: planned {planned:.4g} ms, a whole step {step:.4g} ms", flush=True)
    fastest = plans[min(range(len(plans)), key=lambda number: median(times[number]))]
    choice = fastest.schedule.name, fastest.ranks, fastest.microbatches
    is_typed = choice == (config.schedule, config.ranks, config.microbatches)
    shared = (
        f"; its {fastest.ranks} ranks share {count_cores()} cores"
        if fastest.ranks * config.dp > _parallel_ranks(config)
        else ""
    )
    print(
        f"chosen: {'what was typed, ' if is_typed else ''}{_table(fastest)}: the fastest of those tried{shared}",
        flush=True,
    )
    return fastest


def _table(candidate: Plan) -> str:
    return f"{candidate.schedule.name} on {candidate.ranks} ranks, {candidate.microbatches} microbatches"


def _parallel_ranks(config: TrainConfig) -> int:
    """Return how many ranks can compute at the same time: GPUs or cores."""
    return torch.cuda.device_count() if config.device == "cuda" else count_cores()


def _time_steps(config: TrainConfig) -> list[float]:
    """Return the seconds of a few whole steps on this rank."""
    init_distributed(device=None if config.device == "auto" else config.device)
    setup, seconds = set_up(config, None), []
    for step in range(TRIAL_STEPS + 1):  # one more: in the first step the ranks also agree on shapes
        begin = time.perf_counter()
        inputs, target = setup.share(setup.source.batch(config.seed, step, config.batch))
        setup.pipe.step(inputs, target=target)
        setup.update_weights()
        setup.pipe.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def save_plan(config: TrainConfig, candidate: Plan, folder: Path) -> TrainConfig:
    """Write the plan to the run's `folder`, for all ranks and for a resumed run. Return the options with that file."""
    folder.mkdir(parents=True, exist_ok=True)
    with manifest.atomic_replacement(folder / PLAN) as temporary:
        candidate.save(temporary)
    return replace(config, plan=str(folder / PLAN))


def compare_with_plan(config: TrainConfig, timelines: Sequence[Timeline]) -> str:
    """Return a comparison of the plan with the median of these steps; without a plan, an empty text."""
    if config.plan is None:
        return ""
    candidate = load(config.plan)
    planned, usual = candidate.timeline, sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]
    seconds, measured = candidate.seconds, usual.makespan + (max(usual.averaging, default=0.0) if candidate.dp > 1 else 0.0)
    shortest, longest = (limit(timeline.makespan for timeline in timelines) for limit in (min, max))
    spread = f"{1e3 * shortest:.4g} to {1e3 * longest:.4g} in {len(timelines)} steps" if len(timelines) > 1 else "one step"
    lines = [
        f"a step of the table: planned {1e3 * seconds:.4g} ms, measured {1e3 * measured:.4g} ms ({spread}), "
        f"{measured / seconds - 1:+.1%}"
    ]
    for rank, (busy, measured_busy) in enumerate(zip(planned.busy, usual.busy, strict=True)):
        sizes = [format_bytes(line.peak_memory[rank]) for line in (planned, usual) if line.memory_unit == "bytes"]
        memory = f"; holds {sizes[0]} of activations, {sizes[1]}" if len(sizes) == 2 else ""
        lines.append(f"  rank {rank} works {1e3 * busy:.4g} ms, {1e3 * measured_busy:.4g} ms{memory}")
    return "\n".join(lines)


def advice(config: TrainConfig, folder: Path, balance: Balance, parameters: Mapping[str, float], measured: Measurement) -> str:
    """Return lines about a faster cut of the table that ran, and about a better plan within the memory that it uses.

    Write to the run's `folder` its costs, for `penstock plan --costs`, and the better plan. `parameters`: bytes of each layer.
    """
    batch, sizes = config.batch // config.dp, [parameters[name] for name in balance.names]
    layers = profile_of_run(measured, balance, sizes, -(-batch // config.microbatches))
    layers.save(folder / COSTS_FILE)
    if config.ranks * config.dp > count_cores() and config.device != "cuda":
        return "the planner: `--plan auto` tries whether fewer ranks, which do not share cores, are faster"
    return f"the cut: {fastest_cut(measured, balance)}\n{_planner_advice(config, folder, layers, measured)}".rstrip()


def _planner_advice(config: TrainConfig, folder: Path, layers: ModelProfile, measured: Measurement) -> str:
    batch = config.batch // config.dp
    with suppress(PenstockError):  # the table is of no family
        send = float(f"{fmean(measured.message_seconds or (0.0,)):.4g}")  # as it is printed
        planned = partial(plan, layers, config.ranks, batch=batch, effort="quick", send=send)
        plans_of_run = partial(planned, schedules=[config.schedule], microbatches=config.microbatches, fewer=False)
        memory = math.ceil(max(plans_of_run(memory=UNLIMITED_BYTES)[0].peak_memory))
        best, predicted_step = planned(memory=memory)[0], measured.predict(measured.schedule).makespan
        if best.seconds < (1 - NOTABLE_SHARE) * predicted_step:
            best.save(folder / BETTER_PLAN)
            less = f"{1e3 * best.seconds:.4g} ms, {1 - best.seconds / predicted_step:.1%} less"
            paths = f"--resume {quote(str(folder))} --plan {quote(str(folder / BETTER_PLAN))}"
            return f"the planner: {_table(best)}: {less}; penstock train {paths} --steps {2 * config.steps} goes on with it"
        return f"the planner: no cut, schedule or microbatches in the same memory would be {NOTABLE_SHARE:.0%} faster"
    return ""
