"""`penstock train --plan`: before the first step the layers are measured, ways to run them planned, and the best ones tried."""

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
from penstock.commands.train.config import PLAN, TrainConfig
from penstock.commands.train.setup import prepared, task
from penstock.comms.launch.launcher import launch
from penstock.comms.system import count_cores
from penstock.comms.topology import init_distributed
from penstock.errors import PenstockError
from penstock.partition.balance import Balance
from penstock.plan import Layers, Overheads, Plan, bytes_of, load, measure, overheads, plan
from penstock.plan.estimating import COSTS, of_run
from penstock.schedule import Measurement, Timeline
from penstock.schedule.timing.explanation import NOTABLE, bytes_told

EXAMPLE = 4  # microbatches: the example has the rows of one of so many
MOST = 1e15  # bytes: where no limit was given
ROUNDS, STEPS = 2, 4  # in which plans are tried


def with_plan(config: TrainConfig) -> tuple[TrainConfig, Plan | None]:
    """The options as the plan has them, and the plan; without --plan as they are. Says what it chose, and why."""
    if config.plan is None or config.resume is not None:
        return config, None
    chosen = load(config.plan) if config.plan.endswith(".json") else _fastest(config, _made(config))
    if os.environ.get("RANK", "0") == "0":
        print(f"planned: {chosen}", flush=True)
    return _as_planned(config, chosen), chosen


def _as_planned(config: TrainConfig, chosen: Plan) -> TrainConfig:
    dp = chosen.dp if chosen.dp > 1 else config.dp  # a plan for one replica is a plan for each of several
    return replace(config, ranks=chosen.ranks, dp=dp, microbatches=chosen.microbatches, schedule=chosen.schedule.name)


def _made(config: TrainConfig) -> list[Plan]:
    """The best plan, the best whose ranks need not share cores, and what was typed, with its best cut."""
    if config.tp > 1 or "RANK" in os.environ:
        raise PenstockError("--plan measures on processes of its own: plan with `penstock plan`, and give its plan.json")
    limit = MOST if config.plan == "auto" else bytes_of(str(config.plan))
    at_once = _at_once(config)
    ranks = launch(_measured, min(config.ranks, max(2, at_once)), config)  # they compute as the ranks will: at once
    layers, beside = Layers.mean([layers for layers, _ in ranks]), ranks[0][1]
    planned = partial(
        plan,
        layers,
        memory=limit,
        batch=config.batch // config.dp * config.dp,
        dp=config.dp,
        effort="quick",
        send=beside.send,
        bandwidth=beside.bandwidth,
        action=beside.action,
        cores=at_once,
    )
    plans = planned(ranks=config.ranks * config.dp)[:1]
    with suppress(PenstockError):  # it does not fit on fewer ranks; what was typed does not fit, or is no family
        if plans[0].ranks * config.dp > at_once:
            plans += planned(ranks=max(1, at_once // config.dp) * config.dp)[:1]
        plans += planned(
            ranks=config.ranks * config.dp, schedules=[config.schedule], microbatches=config.microbatches, fewer=False
        )[:1]
    return plans


def _measured(config: TrainConfig) -> tuple[Layers, Overheads]:
    """What the layers take where they will be trained, and what a step takes besides."""
    topology = init_distributed(device=None if config.device == "auto" else config.device)
    source, model, loss_fn = task(config)
    inputs, target = source.batch(config.seed, 0, max(1, config.batch // config.dp // EXAMPLE))
    model.to(topology.device)
    inputs, target = inputs.to(topology.device), target.to(topology.device)
    beside = overheads()
    return beside.without(
        measure(model, (inputs,), loss_fn=loss_fn, target=target, device=topology.device, seconds=1.0)
    ), beside


def _fastest(config: TrainConfig, plans: Sequence[Plan]) -> Plan:
    """Of the plans the one whose steps are the fastest where they are run: a few of each, in turn."""
    took: list[list[float]] = [[] for _ in plans]
    with TemporaryDirectory() as folder:
        tried = [kept(_as_planned(config, each), each, Path(folder) / str(number)) for number, each in enumerate(plans)]
        for _ in range(ROUNDS):
            for each, seconds in zip(tried, took, strict=True):
                seconds += launch(_tried, each.processes, each)[0]
    for chosen, seconds in zip(plans, took, strict=True):
        planned, step = 1e3 * chosen.seconds, 1e3 * median(seconds)
        print(f"tried: {_table(chosen)}: planned {planned:.4g} ms, a whole step {step:.4g} ms", flush=True)
    fastest = plans[min(range(len(plans)), key=lambda number: median(took[number]))]
    asked = fastest.schedule.name, fastest.ranks, fastest.microbatches
    typed = asked == (config.schedule, config.ranks, config.microbatches)
    shared = f"; its {fastest.ranks} ranks share {count_cores()} cores" if fastest.ranks * config.dp > _at_once(config) else ""
    print(f"chosen: {'what was typed, ' if typed else ''}{_table(fastest)}: the fastest of those tried{shared}", flush=True)
    return fastest


def _table(chosen: Plan) -> str:
    return f"{chosen.schedule.name} on {chosen.ranks} ranks, {chosen.microbatches} microbatches"


def _at_once(config: TrainConfig) -> int:
    """How many ranks can compute at the same time."""
    return torch.cuda.device_count() if config.device == "cuda" else count_cores()


def _tried(config: TrainConfig) -> list[float]:
    """Seconds of a few whole steps, on one of the ranks that would train."""
    init_distributed(device=None if config.device == "auto" else config.device)
    setup, seconds = prepared(config, None), []
    for step in range(STEPS + 1):  # in the first the ranks agree on the shapes
        begin = time.perf_counter()
        inputs, target = setup.share(setup.source.batch(config.seed, step, config.batch))
        setup.pipe.step(inputs, target=target)
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def kept(config: TrainConfig, chosen: Plan, folder: Path) -> TrainConfig:
    """The options, with the plan as a file in the run's `folder`, where every rank and a resumed run find it."""
    folder.mkdir(parents=True, exist_ok=True)
    with manifest.replaced(folder / PLAN) as beside:
        chosen.save(beside)
    return replace(config, plan=str(folder / PLAN))


def against_plan(config: TrainConfig, timelines: Sequence[Timeline]) -> str:
    """The plan beside the usual one of these steps; nothing without a plan."""
    if config.plan is None:
        return ""
    chosen = load(config.plan)
    planned, usual = chosen.timeline, sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]
    seconds, took = chosen.seconds, usual.makespan + (max(usual.averaging, default=0.0) if chosen.dp > 1 else 0.0)
    lines = [f"a step of the table: planned {1e3 * seconds:.4g} ms, measured {1e3 * took:.4g} ms ({took / seconds - 1:+.1%})"]
    for rank, (works, worked) in enumerate(zip(planned.busy, usual.busy, strict=True)):
        held = [bytes_told(each.peak_memory[rank]) for each in (planned, usual) if each.memory_unit == "bytes"]
        holds = f"; holds {held[0]} of activations, {held[1]}" if len(held) == 2 else ""
        lines.append(f"  rank {rank} works {1e3 * works:.4g} ms, {1e3 * worked:.4g} ms{holds}")
    return "\n".join(lines)


def advice(config: TrainConfig, folder: Path, balance: Balance, parameters: Mapping[str, float], measured: Measurement) -> str:
    """What is planned at a run's own costs, in the memory it has; they are kept in its `folder`, for `penstock plan`.

    `parameters`: bytes of each layer.
    """
    batch, sizes = config.batch // config.dp, [parameters[name] for name in balance.names]
    layers = of_run(measured, balance, sizes, -(-batch // config.microbatches))
    layers.save(folder / COSTS)
    if config.ranks * config.dp > count_cores() and config.device != "cuda":
        return "\nthe planner: `--plan auto` tries whether fewer ranks, which need not share cores, do better"
    with suppress(PenstockError):  # its table is no family's
        send = float(f"{fmean(measured.send or (0.0,)):.4g}")  # as it is told
        planned = partial(plan, layers, config.ranks, batch=batch, effort="quick", send=send)
        same = partial(planned, schedules=[config.schedule], microbatches=config.microbatches, fewer=False)
        has = math.ceil(max(same(memory=MOST)[0].peak_memory))
        best, now = planned(memory=has)[0], measured.predict(measured.schedule).makespan
        if best.seconds < (1 - NOTABLE) * now:
            less = f"{1e3 * best.seconds:.4g} ms, {1 - best.seconds / now:.1%} less"
            asked = f"--ranks {config.ranks} --batch {batch} --memory {has} --send {1e3 * send:g} --effort quick"
            command = f"penstock plan --costs {quote(str(folder))} {asked} --out plan.json"
            return f"\nthe planner: {_table(best)}: {less}; {command} writes it"
        return f"\nthe planner: no cut, schedule or microbatches in the same memory would be {NOTABLE:.0%} faster"
    return ""
