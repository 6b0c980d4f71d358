"""Train a model over ranks on real data, step by step, and compare it with one process."""

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
from penstock.checkpoint.saving import lock_run_folder
from penstock.commands.train.config import FIXED_OPTIONS, REPORT, SETTINGS, TrainConfig
from penstock.commands.train.memory_folder import memory_of_agent, memory_of_launch
from penstock.commands.train.metrics import Metrics, read_records
from penstock.commands.train.plan_option import advice, apply_plan, compare_with_plan, save_plan
from penstock.commands.train.progress import Progress, print_result
from penstock.commands.train.restarts import job_name, may_restart, resize_for_processes
from penstock.commands.train.setup import Setup, set_up
from penstock.commands.train.training_result import TrainResult, sample, validation_loss
from penstock.comms.system import count_cores
from penstock.errors import PenstockError, first_line
from penstock.launcher.launch import launch
from penstock.plan import load
from penstock.schedule import Costs, Timeline, simulate
from penstock.timing.measurement import Measurement
from penstock.view.files import write
from penstock.view.record import TIMELINE_FILE, Record, save
from penstock.view.watch.watch_server import serve_in_background

EXPLAINED_STEPS = 5  # at the end, whose timelines are written and explained
CHECKPOINT_STEPS, RESTART_CHECKPOINT_STEPS = 100, 10  # between checkpoints; the second for runs that may restart
WAITS_STEPS = 10  # between steps whose waits are gathered from all ranks


def train(config: TrainConfig) -> None:
    """Train, with `--compare` also in one process, and print the result.

    Under torchrun this process is one of its ranks; otherwise the ranks are started here.
    """
    config, plan = apply_plan(config)
    folder = _folder(config)
    if plan is None or os.environ.get("RANK", "0") != "0":  # no folder that a killed process would leave behind
        _run(config, folder)
        return
    with TemporaryDirectory() as plan_folder:
        _run(save_plan(config, plan, Path(plan_folder)), folder)


def _run(config: TrainConfig, folder: Path) -> None:
    """Train on this rank of torchrun, or start the ranks here; then print the result."""
    if "RANK" in os.environ:
        for option, value in {"--compare": config.compare, "--restarts": config.restarts}.items():
            if value:
                raise PenstockError(f"{option} starts processes: use it without torchrun")
        is_rank_0 = os.environ["RANK"] == "0"
        memory = memory_of_agent() if is_rank_0 and may_restart(config) else None
        with _serve_page(config, folder):
            result = train_rank(config, folder, memory)
        if memory is not None:
            shutil.rmtree(memory, ignore_errors=True)
        if is_rank_0:
            print_result(result, None, folder)
        comms.shutdown()
        _leave_if_preempted(result)
        return
    with _serve_page(config, folder), memory_of_launch(config.restarts > 0) as memory:
        results = launch(train_rank, config.processes, config, folder, memory, restarts=config.restarts, least=config.least)
        result = results[0]
    single_run = None
    if config.compare and not result.preempted:
        single_run = launch(train_rank, 1, replace(config, ranks=1, dp=1, tp=1, resume=None, plan=None), None)[0]
    print_result(result, None if single_run is None or single_run.preempted else single_run, folder)
    _leave_if_preempted(result)


@contextmanager
def _serve_page(config: TrainConfig, folder: Path) -> Iterator[None]:
    """Serve the run's page during the block, with `--watch`; under torchrun rank 0 serves it."""
    if not config.watch or os.environ.get("RANK", "0") != "0":
        yield
        return
    with serve_in_background(folder) as address:
        print(f"watch it at {address}", flush=True)
        yield


def _leave_if_preempted(result: TrainResult) -> None:
    if result.preempted:
        sys.exit(os.EX_TEMPFAIL)


def _folder(config: TrainConfig) -> Path:
    """Return the run's folder: the resumed run's, one that all attempts of a job share, or a new one."""
    if config.resume is not None:
        return config.resume
    if "RANK" in os.environ and may_restart(config):
        return config.out / f"{config.model}-{Path(config.schedule).stem}-{job_name()}"
    axes = "".join(f"-{axis}{size}" for axis, size in (("dp", config.dp), ("tp", config.tp)) if size > 1)
    size = f"{config.ranks}x{config.microbatches}{axes}"
    name = f"{config.model}-{Path(config.schedule).stem}-{size}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config.out / name


def train_rank(config: TrainConfig, folder: Path | None, memory: Path | None = None) -> TrainResult:
    """Train on this rank. Rank 0 makes `folder`, unless it is None, and writes into it.

    `memory`: a folder in memory, for a checkpoint after each step.
    """
    topology = comms.init_distributed(device=None if config.device == "auto" else config.device)
    config, changes = resize_for_processes(config, topology.world_size)
    if changes and topology.rank == 0:
        print(changes, flush=True)
    setup = set_up(config, folder, memory)
    run = _initial_result(setup)
    timelines = _train(setup, run)
    if run.preempted:
        return run
    _write_results(setup, run)
    run.validation_loss = validation_loss(setup)
    run.prompt, run.sample = sample(setup)
    if setup.is_writer and timelines and not setup.is_single_process:
        _explain(setup, run, timelines)
    if setup.is_writer and setup.folder is not None:
        _write_settings(setup.folder, config, asdict(run))
    return run


def _write_results(setup: Setup, run: TrainResult) -> None:
    """Write the weights, and the losses so far, before anything is computed from them. All ranks call this."""
    if setup.folder is not None:
        checkpoint.export(setup.pipe, setup.folder / "model.safetensors")
        if setup.is_writer:
            _write_settings(setup.folder, setup.config, asdict(run))


def _explain(setup: Setup, run: TrainResult, timelines: list[Timeline]) -> None:
    """Explain the last steps in `run`, and in the report of the run's folder. A text that cannot be made says why."""
    config = setup.config
    run.clock_error = setup.pipe.clock_error
    run.planned = _text_or_reason("comparison with the plan", lambda: compare_with_plan(config, timelines))
    run.explanation = _text_or_reason("explanation", lambda: _explanation(setup, timelines))
    run.crowding = crowding(timelines[0].ranks, count_cores()) if config.device != "cuda" else ""
    if setup.folder is not None:
        lines = (run.planned, run.explanation, run.crowding)
        (setup.folder / REPORT).write_text("".join(f"{text}\n" for text in lines if text), encoding="utf-8")


def _text_or_reason(name: str, make_text: Callable[[], str]) -> str:
    """Return a text made from the run, or why it cannot be made: the run itself has succeeded."""
    try:
        return make_text()
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"no {name} ({reason}): the training is complete, its weights and losses are written"


def _initial_result(setup: Setup) -> TrainResult:
    """Return an empty result, or resume the newest whole checkpoint and return the records up to it."""
    config, pipe = setup.config, setup.pipe
    run = TrainResult(setup.topology.world_size, pipe.position.num_ranks_per_stage > 1)
    run.rows_per_step, run.tokens_per_step = config.batch, config.batch * (config.context if config.model == "gpt" else 1)
    planned = simulate(pipe.schedule, Costs())
    run.planned_bubble, run.planned_idle = planned.bubble, planned.idle_share
    folder = config.resume or (setup.folder if setup.has_checkpoint else None)
    if folder is None:
        return run
    folders = folder if setup.memory is None else [setup.memory, folder]
    checkpoint.resume(folders, pipe, setup.optimizers, setup.rates)
    if pipe.step_count > config.steps:
        raise PenstockError(
            f"{folder} is at step {pipe.step_count}: give --steps {pipe.step_count} or more, not {config.steps}"
        )
    records = read_records(folder, pipe.step_count)
    for record in records if len(records) == pipe.step_count else ():  # otherwise records are missing: results begin here
        run.losses.append(record["loss"])
        run.seconds.append(record["seconds"])
        run.idle_shares.append(record["idle_share"])
    return run


def _train(setup: Setup, run: TrainResult) -> list[Timeline]:
    """Run all steps, write records and due checkpoints. Return the timelines of the last steps."""
    timelines: list[Timeline] = []
    if setup.folder is not None:
        lock_run_folder(setup.folder, setup.pipe)
    with ExitStack() as stack:
        writers, digest_log = _writers(setup, run, stack), _open_digest_log(setup)
        for record in _steps(setup, run, digest_log):
            if record["step"] > setup.config.steps - EXPLAINED_STEPS:
                timelines.append(setup.pipe.timeline())
            if setup.config.watch and (record["step"] % WAITS_STEPS == 0 or record["step"] == 1):
                _save_timeline(setup, record["step"])
            for write_record in writers:
                write_record(record)
            setup.save_in_memory()
            if setup.pipe.preempted and record["step"] < setup.config.steps:
                run.preempted = True
                break
            if _is_due(record["step"], setup.config):
                setup.save(wait=False)
    setup.save()
    return timelines


def _save_timeline(setup: Setup, step: int) -> None:
    """Write this step's timeline to the run's folder, for its page. All ranks call this."""
    timeline = setup.pipe.timeline()
    if setup.is_writer and setup.folder is not None:
        with manifest.atomic_replacement(setup.folder / TIMELINE_FILE) as temporary:
            save(timeline, None, temporary, (f"step {step}",), setup.pipe.balance.stage_costs if setup.pipe.balance else ())


def _writers(setup: Setup, run: TrainResult, stack: ExitStack) -> list[Callable[[dict[str, Any]], None]]:
    """Return functions that write a step's record to the console and the metrics, on rank 0, until `stack` closes."""
    if not setup.is_writer:
        return []
    progress = stack.enter_context(Progress(setup.config, run))
    if setup.pipe.balance is not None and len(setup.pipe.balance.stage_costs) > 1:
        progress.say(f"cut by measured times of a microbatch:\n{setup.pipe.balance}")
    if setup.folder is None:
        return [progress.step]
    metrics = stack.enter_context(Metrics(setup.folder, setup.pipe.step_count))
    _write_settings(setup.folder, setup.config, {})
    return [progress.step, metrics.write]


def _open_digest_log(setup: Setup) -> checkpoint.DigestLog | None:
    """Return the writer of the run's digests, or None without digests."""
    config = setup.config
    if setup.folder is None or not config.digests_every:
        return None
    settings = {name: value for name, value in config.to_json().items() if name in (*FIXED_OPTIONS, "steps")}
    every = min(config.digests_every, config.steps)
    return checkpoint.DigestLog(setup.folder, setup.pipe, setup.optimizers, every, settings)


def _steps(setup: Setup, run: TrainResult, digest_log: checkpoint.DigestLog | None) -> Iterator[dict[str, Any]]:
    """Train, and yield a record of each step."""
    config, pipe = setup.config, setup.pipe
    for step in range(pipe.step_count, config.steps):
        begin = time.perf_counter()
        inputs, target = setup.share(setup.source.batch(config.seed, step, config.batch))
        loss = pipe.step(inputs, target=target)
        setup.update_weights()
        if digest_log is not None:
            digest_log.record_step()
        pipe.zero_grad()
        for rate in setup.rates:
            rate.step()
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
            **(pipe.metrics() if step % WAITS_STEPS == 0 or step + 1 == config.steps else {}),
        }


def _is_due(step: int, config: TrainConfig) -> bool:
    """Return whether a checkpoint is written after this step; the last step always has one."""
    default = RESTART_CHECKPOINT_STEPS if may_restart(config) else CHECKPOINT_STEPS
    every = default if config.checkpoint_every is None else config.checkpoint_every
    return every > 0 and step % every == 0 and step < config.steps


def _write_settings(folder: Path, config: TrainConfig, results: dict[str, Any]) -> None:
    """Write the options and the results of the run."""
    if config.plan is not None:
        config = save_plan(config, load(config.plan), folder)
    with manifest.atomic_replacement(folder / SETTINGS) as temporary:
        temporary.write_text(json.dumps({"config": config.to_json(), **results}, indent=1))


def _explanation(setup: Setup, timelines: list[Timeline]) -> str:
    """Return where the time of these steps went, the verdict first. Draw the steps in the run's folder."""
    config, folder, balance = setup.config, setup.folder, setup.pipe.balance
    measured = Measurement.from_timelines(*timelines, layers=balance.stage_costs if balance else ())
    labels = tuple(f"step {config.steps - len(timelines) + 1 + number}" for number in range(len(timelines)))
    record = Record(tuple(timelines), measured.predict(measured.schedule), "s", labels, measured.layers)
    if folder is not None and config.timeline:
        record.save(folder / TIMELINE_FILE)
        list(write([record], html=folder / "timeline.html"))
    explanation, better_plan = record.explanation, ""
    if folder is not None and balance:
        better_plan = _text_or_reason(
            "advice of the planner", lambda: advice(config, folder, balance, setup.parameters, measured)
        )
    return "\n".join(filter(None, (explanation.verdict_text, str(explanation), better_plan))) if explanation else ""


def crowding(ranks: int, cores: int) -> str:
    """Return a warning if there are more ranks than cores, else an empty text."""
    if ranks <= cores:
        return ""
    return f"{ranks} ranks share {cores} cores: an action's time includes waiting for a core"
