"""`penstock train --plan`: before the first step, the layers are measured and the fastest way to run them is planned."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from penstock.commands.train.config import TrainConfig
from penstock.commands.train.setup import task
from penstock.comms.starting.launcher import launch
from penstock.comms.topology import init_distributed
from penstock.errors import PenstockError
from penstock.plan import Layers, Plan, bytes_of, load, measure, plan
from penstock.schedule import Timeline

FILE = "plan.json"  # its name in the folder of a run
EXAMPLE = 4  # microbatches: the example has the rows of one of so many
MOST = 1e15  # bytes: where no limit was given
SEND, ACTION = 100e-6, 500e-6  # seconds that a message, and an action besides its layers, take on ranks of one machine


def with_plan(config: TrainConfig) -> tuple[TrainConfig, Plan | None]:
    """The options as the plan has them, and the plan; without --plan as they are. Says what it chose, and why."""
    if config.plan is None or config.resume is not None:
        return config, None
    chosen = load(config.plan) if config.plan.endswith(".json") else _made(config)
    print(f"planned: {chosen}", flush=True)
    table = chosen.schedule.name
    return replace(config, ranks=chosen.ranks, microbatches=chosen.microbatches, schedule=table), chosen


def _made(config: TrainConfig) -> Plan:
    if config.tp > 1 or "RANK" in os.environ:
        raise PenstockError("--plan measures on one process of its own: plan with `penstock plan`, and give its plan.json")
    limit = MOST if config.plan == "auto" else bytes_of(str(config.plan))
    layers = launch(_measured, 1, config)[0]
    cores = float(os.cpu_count() or 1) if config.device in ("auto", "cpu") else float("inf")
    return plan(
        layers, config.ranks, limit, batch=config.batch // config.dp, effort="quick", send=SEND, action=ACTION, cores=cores
    )[0]


def _measured(config: TrainConfig) -> Layers:
    """On one process, like those that will train."""
    topology = init_distributed(device=None if config.device == "auto" else config.device)
    source, model, loss_fn = task(config)
    inputs, target = source.batch(config.seed, 0, max(1, config.batch // config.dp // EXAMPLE))
    model.to(topology.device)
    inputs, target = inputs.to(topology.device), target.to(topology.device)
    return measure(model, (inputs,), loss_fn=loss_fn, target=target, device=topology.device)


def kept(config: TrainConfig, chosen: Plan, folder: Path) -> TrainConfig:
    """The options, with the plan as a file in the run's `folder`, where every rank and a resumed run find it."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen.save(folder / FILE)
    return replace(config, plan=str(folder / FILE))


def against_plan(config: TrainConfig, timelines: Sequence[Timeline]) -> str:
    """What a step was planned to take beside what these took; nothing without a plan."""
    if config.plan is None:
        return ""
    seconds, took = load(config.plan).seconds, median(timeline.makespan for timeline in timelines)
    return f"a step of the table: planned {1e3 * seconds:.4g} ms, measured {1e3 * took:.4g} ms ({took / seconds - 1:+.1%})"
