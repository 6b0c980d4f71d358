"""The main job: a model cut over ranks learns real data, step by step, and is compared with one process."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock import checkpoint, comms
from penstock.checkpoint.files import manifest
from penstock.checkpoint.saving import claim
from penstock.commands.train.again import for_world, job_name, may_begin_again
from penstock.commands.train.config import SAME, SETTINGS, TrainConfig
from penstock.commands.train.evaluation import sample, validation_loss
from penstock.commands.train.memory import memory_of_agent, memory_of_launch
from penstock.commands.train.metrics import Metrics, recorded
from penstock.commands.train.planned import advice, against_plan, kept, with_plan
from penstock.commands.train.progress import Progress, closing
from penstock.commands.train.result import TrainResult
from penstock.commands.train.setup import Setup, prepared
from penstock.comms.launch.launcher import launch
from penstock.comms.system import count_cores
from penstock.errors import PenstockError
from penstock.plan import load
from penstock.schedule import Costs, Timeline, simulate
from penstock.schedule.timing.measurement import Measurement
from penstock.view.files import write
from penstock.view.record import FILE, Record, save
from penstock.view.watch.server import watched

EXPLAINED = 5  # last steps: their timelines are kept and told in words
OFTEN, SELDOM = 10, 100  # steps between checkpoints
WAITS_EVERY = 10  # steps: what ranks waited for is gathered so often


def train(config: TrainConfig) -> None:
    """The whole job: train, compare if asked, say what came out and where it is.

    Under torchrun this process is one of its ranks; otherwise the ranks are started here.
    """
    config, chosen = with_plan(config)
    folder = _folder(config)
    with TemporaryDirectory() as until_begun:
        if chosen is not None and os.environ.get("RANK", "0") == "0":
            config = kept(config, chosen, Path(until_begun))
        _trained(config, folder)


def _trained(config: TrainConfig, folder: Path) -> None:
    if "RANK" in os.environ:
        for option, given in {"--compare": config.compare, "--restarts": config.restarts}.items():
            if given:
                raise PenstockError(f"{option} starts processes of its own: use it without torchrun")
        first = os.environ["RANK"] == "0"
        memory = memory_of_agent() if first and may_begin_again(config) else None
        with _seen(config, folder):
            result = train_rank(config, folder, memory)
        if memory is not None:
            shutil.rmtree(memory, ignore_errors=True)
        if first:
            closing(result, None, folder)
        comms.shutdown()
        _leave_if_preempted(result)
        return
    with _seen(config, folder), memory_of_launch(config.restarts > 0) as memory:
        launched = launch(train_rank, config.processes, config, folder, memory, restarts=config.restarts, least=config.least)
        result = launched[0]
    compare = config.compare and not result.preempted
    alone = launch(train_rank, 1, replace(config, ranks=1, dp=1, tp=1, resume=None, plan=None), None)[0] if compare else None
    closing(result, None if alone is None or alone.preempted else alone, folder)
    _leave_if_preempted(result)


@contextmanager
def _seen(config: TrainConfig, folder: Path) -> Iterator[None]:
    """Meanwhile the run's page is served, where that was asked for; under torchrun by rank 0."""
    if not config.watch or os.environ.get("RANK", "0") != "0":
        yield
        return
    with watched(folder) as address:
        print(f"watch it at {address}", flush=True)
        yield


def _leave_if_preempted(result: TrainResult) -> None:
    if result.preempted:
        sys.exit(os.EX_TEMPFAIL)


def _folder(config: TrainConfig) -> Path:
    if config.resume is not None:
        return config.resume
    if "RANK" in os.environ and may_begin_again(config):
        return config.out / f"{config.model}-{Path(config.schedule).stem}-{job_name()}"
    axes = "".join(f"-{axis}{size}" for axis, size in (("dp", config.dp), ("tp", config.tp)) if size > 1)
    size = f"{config.ranks}x{config.microbatches}{axes}"
    name = f"{config.model}-{Path(config.schedule).stem}-{size}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config.out / name


def train_rank(config: TrainConfig, folder: Path | None, memory: Path | None = None) -> TrainResult:
    """One rank's part, or with one rank the whole; rank 0 makes `folder` and writes into it, if there is to be one.

    `memory`: a folder in memory, for a checkpoint after each step.
    """
    topology = comms.init_distributed(device=None if config.device == "auto" else config.device)
    config, told = for_world(config, topology.world_size)
    if told and topology.rank == 0:
        print(told, flush=True)
    setup = prepared(config, folder, memory)
    run = _begun(setup)
    timelines = _train(setup, run)
    if run.preempted:
        return run
    run.validation_loss = validation_loss(setup)
    run.prompt, run.sample = sample(setup)
    if setup.speaks and timelines and not setup.alone:
        run.clock_error = setup.pipe.clock_error
        run.explanation = _explained(setup, timelines)
        run.planned = against_plan(config, timelines)
    if setup.folder is not None:
        checkpoint.export(setup.pipe, setup.folder / "model.safetensors")
        if setup.speaks:
            _write_settings(setup.folder, config, asdict(run))
    return run


def _begun(setup: Setup) -> TrainResult:
    """What the run has come to: nothing yet, or what was recorded of the one that goes on from its newest whole checkpoint."""
    config, pipe = setup.config, setup.pipe
    run = TrainResult(setup.topology.world_size, pipe.position.copies > 1)
    run.rows_per_step, run.tokens_per_step = config.batch, config.batch * (config.context if config.model == "gpt" else 1)
    planned = simulate(pipe.schedule, Costs())
    run.planned_bubble, run.planned_idle = planned.bubble, planned.idle_share
    folder = config.resume or (setup.folder if setup.begun else None)
    if folder is None:
        return run
    folders = folder if setup.memory is None else [setup.memory, folder]
    checkpoint.resume(folders, pipe, setup.optimizer, setup.rate)
    if pipe.step_count > config.steps:
        raise PenstockError(
            f"{folder} has come to step {pipe.step_count}: give --steps {pipe.step_count} or more, not {config.steps}"
        )
    records = recorded(folder, pipe.step_count)
    for record in records if len(records) == pipe.step_count else ():  # else some are lost: it is told from here on
        run.losses.append(record["loss"])
        run.seconds.append(record["seconds"])
        run.idle_shares.append(record["idle_share"])
    return run


def _train(setup: Setup, run: TrainResult) -> list[Timeline]:
    """All steps: each is told and, where it is due, followed by a checkpoint. The last ones' timelines."""
    timelines: list[Timeline] = []
    if setup.folder is not None:
        claim(setup.folder, setup.pipe)
    with ExitStack() as stack:
        listeners, trail = _listeners(setup, run, stack), _trail(setup)
        for record in _steps(setup, run, trail):
            if record["step"] > setup.config.steps - EXPLAINED:
                timelines.append(setup.pipe.timeline())
            if setup.config.watch and (record["step"] % WAITS_EVERY == 0 or record["step"] == 1):
                _show(setup, record["step"])
            for listen in listeners:
                listen(record)
            setup.save_in_memory()
            if setup.pipe.preempted and record["step"] < setup.config.steps:
                run.preempted = True
                break
            if _is_due(record["step"], setup.config):
                setup.save(wait=False)
    setup.save()
    return timelines


def _show(setup: Setup, step: int) -> None:
    """Leave this step's timeline in the folder of the run, for those who watch it. All ranks call it."""
    timeline = setup.pipe.timeline()
    if setup.speaks and setup.folder is not None:
        with manifest.replaced(setup.folder / FILE) as beside:
            save(timeline, None, beside, (f"step {step}",), setup.pipe.balance.stage_costs if setup.pipe.balance else ())


def _listeners(setup: Setup, run: TrainResult, stack: ExitStack) -> list[Callable[[dict[str, Any]], None]]:
    """Who is told of every step, as long as `stack` is open: on rank 0 the console, and where there is a folder its metrics."""
    if not setup.speaks:
        return []
    progress = stack.enter_context(Progress(setup.config, run))
    if setup.pipe.balance is not None and len(setup.pipe.balance.stage_costs) > 1:
        progress.say(f"cut by measured times of a microbatch:\n{setup.pipe.balance}")
    if setup.folder is None:
        return [progress.step]
    metrics = stack.enter_context(Metrics(setup.folder, setup.pipe.step_count))
    _write_settings(setup.folder, setup.config, {})
    return [progress.step, metrics.write]


def _trail(setup: Setup) -> checkpoint.Trail | None:
    """What keeps the run's digests, if any are to be kept."""
    config = setup.config
    if setup.folder is None or not config.digests_every:
        return None
    settings = {name: value for name, value in config.described().items() if name in (*SAME, "steps")}
    every = min(config.digests_every, config.steps)
    return checkpoint.Trail(setup.folder, setup.pipe, setup.optimizer, every, settings)


def _steps(setup: Setup, run: TrainResult, trail: checkpoint.Trail | None) -> Iterator[dict[str, Any]]:
    """Train, and after each step say how it went."""
    config, pipe = setup.config, setup.pipe
    for step in range(pipe.step_count, config.steps):
        begin = time.perf_counter()
        inputs, target = setup.share(setup.source.batch(config.seed, step, config.batch))
        loss = pipe.step(inputs, target=target)
        setup.optimizer.step()
        if trail is not None:
            trail.note()
        setup.optimizer.zero_grad()
        setup.rate.step()
        seconds = time.perf_counter() - begin
        report = pipe.report
        assert report is not None
        run.losses.append(loss.item())
        run.seconds.append(seconds)
        run.idle_shares.append(report.idle_share)
        run.peak_memory = max(report.peak_memory)
        yield {
            "step": step + 1,
            "loss": loss.item(),
            "seconds": seconds,
            "tokens_per_second": run.tokens_per_step / seconds,
            "bubble": report.bubble,
            "bubble_of_the_table": run.planned_bubble,
            "idle_share": report.idle_share,
            "idle_share_of_the_table": run.planned_idle,
            "peak_memory_bytes": run.peak_memory,
            **(pipe.metrics() if step % WAITS_EVERY == 0 or step + 1 == config.steps else {}),
        }


def _is_due(step: int, config: TrainConfig) -> bool:
    """Whether a checkpoint is written after this step; the one after the last step is written in any case."""
    default = OFTEN if may_begin_again(config) else SELDOM
    every = default if config.checkpoint_every is None else config.checkpoint_every
    return every > 0 and step % every == 0 and step < config.steps


def _write_settings(folder: Path, config: TrainConfig, results: dict[str, Any]) -> None:
    """What is run, and what it came to."""
    if config.plan is not None:
        config = kept(config, load(config.plan), folder)
    with manifest.replaced(folder / SETTINGS) as beside:
        beside.write_text(json.dumps({"config": config.described(), **results}, indent=1))


def _explained(setup: Setup, timelines: list[Timeline]) -> str:
    """Where the time of these steps went, in words; and drawn in the folder, over what their own costs make of the table."""
    config, folder, balance = setup.config, setup.folder, setup.pipe.balance
    measured = Measurement.of(*timelines, layers=balance.stage_costs if balance else ())
    labels = tuple(f"step {config.steps - len(timelines) + 1 + number}" for number in range(len(timelines)))
    record = Record(tuple(timelines), measured.predict(measured.schedule), "s", labels, measured.layers)
    if folder is not None and config.timeline:
        record.save(folder / FILE)
        list(write([record], html=folder / "timeline.html"))
    told = record.explanation
    many = crowding(timelines[0].ranks, count_cores()) if config.device != "cuda" else ""
    better = advice(config, folder, balance, setup.parameters, measured) if folder is not None and balance else ""
    return f"{told.verdict_told}\n{told}{better}{many}" if told else ""


def crowding(ranks: int, cores: int) -> str:
    """What to bear in mind where ranks on the CPU outnumber its cores."""
    if ranks <= cores:
        return ""
    return f"\n{ranks} ranks share {cores} cores: an action's time contains waiting for a core, which no table can shorten"
