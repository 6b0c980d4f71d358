"""The main job: a model cut over ranks learns real data, step by step, and is compared with one process."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import checkpoint, comms
from penstock.checkpoint import manifest
from penstock.commands.train import data
from penstock.commands.train.config import HEADS, SETTINGS, TrainConfig
from penstock.commands.train.metrics import Metrics, recorded
from penstock.commands.train.progress import Progress, closing
from penstock.commands.train.result import TrainResult
from penstock.comms.launcher import launch
from penstock.errors import PenstockError
from penstock.model import GPT, GPTConfig, mlp
from penstock.pipeline import Pipeline
from penstock.schedule import Costs, Timeline, explain, simulate
from penstock.schedule.timing.measurement import Measurement
from penstock.view.files import write
from penstock.view.record import FILE, load, save

WARM_UP = 10  # steps
VALIDATION_BATCHES = 8
SAMPLE_BYTES = 160
EXPLAINED = 5  # last steps: their timelines are kept and told in words
WAITS_EVERY = 10  # steps: what ranks waited for is gathered so often


def train(config: TrainConfig) -> None:
    """The whole job: train, compare if asked, say what came out and where it is.

    Under torchrun this process is one of its ranks; otherwise the ranks are started here.
    """
    folder = _folder(config)
    if "RANK" in os.environ:
        if config.compare:
            raise PenstockError("--compare starts processes of its own: use it without torchrun")
        result = train_rank(config, folder)
        if os.environ["RANK"] == "0":
            closing(result, None, folder)
        comms.shutdown()
        return
    result = launch(train_rank, config.processes, config, folder)[0]
    alone = launch(train_rank, 1, replace(config, ranks=1, dp=1, tp=1, resume=None), None)[0] if config.compare else None
    closing(result, alone, folder)


def _folder(config: TrainConfig) -> Path:
    if config.resume is not None:
        return config.resume
    axes = "".join(f"-{axis}{size}" for axis, size in (("dp", config.dp), ("tp", config.tp)) if size > 1)
    size = f"{config.ranks}x{config.microbatches}{axes}"
    name = f"{config.model}-{Path(config.schedule).stem}-{size}-{time.strftime('%Y%m%d-%H%M%S')}"
    return config.out / name


def train_rank(config: TrainConfig, folder: Path | None) -> TrainResult:
    """One rank's part, or with one rank the whole; rank 0 makes `folder` and writes into it, if there is to be one."""
    topology = comms.init_distributed(device=None if config.device == "auto" else config.device)
    folder = _of_rank_0(folder)
    torch.manual_seed(config.seed)
    source, model, loss_fn = _task(config)
    alone = topology.world_size == 1
    example = None if alone else source.batch(config.seed, 0, -(-config.batch // (config.microbatches * config.dp)))[:1]
    table = "gpipe" if alone else config.table()
    pipe = Pipeline(
        model,
        loss_fn,
        table,
        config.microbatches,
        seed=config.seed,
        example_args=example,
        mesh=comms.init_mesh(config.ranks, config.dp, config.tp) if config.dp * config.tp > 1 else None,
        data_parallel=config.data_parallel,
        tensor_parallel=model.tensor_parallel() if isinstance(model, GPT) and config.tp > 1 else None,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=config.learning_rate)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))
    run = TrainResult(topology.world_size, pipe.position.copies > 1)
    run.rows_per_step, run.tokens_per_step = config.batch, config.batch * _tokens(config)
    run.planned_bubble = simulate(pipe.schedule, Costs()).bubble
    if config.resume is not None:
        _resume(config, pipe, optimizer, rate, run)
    with ExitStack() as stack:
        show = stack.enter_context(Progress(config, run)) if topology.rank == 0 else None
        metrics = stack.enter_context(_metrics(folder, config, run)) if folder and topology.rank == 0 else None
        if show and not alone:
            show.say(f"cut by measured times of a microbatch:\n{pipe.balance}")
        timelines: list[Timeline] = []
        for told in _steps(config, pipe, optimizer, rate, source, run):
            if told["step"] > config.steps - EXPLAINED:
                timelines.append(pipe.timeline())
            if show:
                show.step(told)
            if metrics:
                metrics.write(told)
            if folder and _is_due(told["step"], config):
                checkpoint.save(folder, pipe, optimizer, rate, keep=config.keep, wait=False)
    if folder is not None:
        checkpoint.save(folder, pipe, optimizer, rate, keep=config.keep)
    run.validation_loss = _validate(pipe, source, config)
    if isinstance(source, data.Text):
        run.prompt, run.sample = _sample(pipe, source, config.seed)
    if topology.rank == 0 and timelines and not alone:
        shares = pipe.balance.stages if pipe.balance else ()  # what each stage takes of the model
        run.clock_error = pipe.clock_error
        run.explanation = _explained(Measurement.of(*timelines, layers=shares), timelines, config, folder)
    if folder is not None:
        checkpoint.export(pipe, folder / "model.safetensors")
        if topology.rank == 0:
            _settings(folder, config, asdict(run))
    return run


def _of_rank_0(folder: Path | None) -> Path | None:
    """The folder that rank 0 has chosen: under torchrun each rank takes its name from a clock of its own."""
    chosen = [folder]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _explained(measured: Measurement, timelines: list[Timeline], config: TrainConfig, folder: Path | None) -> str:
    """Where the time of these steps went, in words; and drawn in `folder`, over what their own costs make of the table."""
    if folder is not None and config.timeline:
        planned = measured.predict(measured.schedule)
        labels = [f"step {config.steps - len(timelines) + 1 + number}" for number in range(len(timelines))]
        save(timelines, planned, folder / FILE, labels)
        list(write([load(folder)], html=folder / "timeline.html"))
    middle = sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]
    return f"{explain(middle, measured)}{crowding(middle.ranks, os.cpu_count() or 1) if config.device != 'cuda' else ''}"


def crowding(ranks: int, cores: int) -> str:
    """What to bear in mind where ranks on the CPU outnumber its cores."""
    if ranks <= cores:
        return ""
    return f"\n{ranks} ranks share {cores} cores: an action's time contains waiting for a core, which no table can shorten"


def _resume(config: TrainConfig, pipe: Pipeline, optimizer: torch.optim.Optimizer, rate: Any, run: TrainResult) -> None:
    """Take up the newest whole checkpoint of the run to be resumed, and what its steps before came to."""
    assert config.resume is not None
    checkpoint.resume(config.resume, pipe, optimizer, rate)
    if pipe.step_count > config.steps:
        raise PenstockError(
            f"{config.resume} has come to step {pipe.step_count}: give --steps {pipe.step_count} or more, not {config.steps}"
        )
    for record in recorded(config.resume, pipe.step_count):
        run.losses.append(record["loss"])
        run.seconds.append(record["seconds"])
        run.bubbles.append(record["bubble"])


def _metrics(folder: Path, config: TrainConfig, run: TrainResult) -> Metrics:
    """What takes the steps' metrics; the settings are written too."""
    metrics = Metrics(folder, len(run.losses))
    _settings(folder, config, {})
    return metrics


def _settings(folder: Path, config: TrainConfig, results: dict[str, Any]) -> None:
    """What is run, and what it came to."""
    with manifest.replaced(folder / SETTINGS) as beside:
        beside.write_text(json.dumps({"config": config.described(), **results}, indent=1))


def _is_due(step: int, config: TrainConfig) -> bool:
    """Whether a checkpoint is written after this step; the one after the last step is written in any case."""
    return config.checkpoint_every > 0 and step % config.checkpoint_every == 0 and step < config.steps


def _tokens(config: TrainConfig) -> int:
    return config.context if config.model == "gpt" else 1


def _task(config: TrainConfig) -> tuple[Any, nn.Sequential, Callable[[Any, Any], Tensor]]:
    """The data, the model and the loss."""
    if config.model == "mlp":
        return data.digits(config.width), mlp(config.width, config.depth, classes=10), nn.functional.cross_entropy
    shape = GPTConfig(context=config.context, width=config.width, layers=config.depth, heads=HEADS, dropout=config.dropout)
    return data.text(config.data, config.context), GPT(shape), token_loss


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy: (batch, time, vocabulary) logits, (batch, time) tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: up in WARM_UP steps, then down along a cosine to a tenth."""
    return min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def _steps(
    config: TrainConfig, pipe: Pipeline, optimizer: torch.optim.Optimizer, rate: Any, source: Any, run: TrainResult
) -> Iterator[dict[str, Any]]:
    """Train, and after each step say how it went."""
    for step in range(pipe.step_count, config.steps):
        begin = time.perf_counter()
        inputs, target = _share(pipe, source.batch(config.seed, step, config.batch))
        loss = pipe.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        seconds = time.perf_counter() - begin
        report = pipe.report
        assert report is not None
        run.losses.append(loss.item())
        run.seconds.append(seconds)
        run.bubbles.append(report.bubble)
        run.peak_memory = max(report.peak_memory)
        yield {
            "step": step + 1,
            "loss": loss.item(),
            "seconds": seconds,
            "tokens_per_second": run.tokens_per_step / seconds,
            "bubble": report.bubble,
            "bubble_of_the_table": run.planned_bubble,
            "peak_memory_bytes": run.peak_memory,
            **(pipe.metrics() if step % WAITS_EVERY == 0 or step + 1 == config.steps else {}),
        }


def _validate(pipe: Pipeline, source: Any, config: TrainConfig) -> float:
    """Mean loss over the held-out part."""
    losses, rows = 0.0, 0
    for inputs, target in source.validation(config.batch, VALIDATION_BATCHES):
        mine, wanted = _share(pipe, (inputs, target))
        _, loss = pipe.eval(mine, target=wanted)
        losses, rows = losses + loss.item() * len(inputs), rows + len(inputs)
    return losses / rows


def _share(pipe: Pipeline, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The rows of this rank's replica."""
    inputs, target = (part.tensor_split(pipe.position.replicas)[pipe.position.replica] for part in batch)
    return inputs, target


def _sample(pipe: Pipeline, source: data.Text, seed: int) -> tuple[str, str]:
    """Text that the model continues, and how: the last rank draws each byte and tells the others."""
    generator = torch.Generator().manual_seed(seed)
    window = source.held_out[: source.context].long()[None]  # (1, context)
    prompt = bytes(window[0].tolist()).decode(errors="replace")
    drawn = bytearray()
    for _ in range(SAMPLE_BYTES):
        logits = pipe.eval(window)
        token = torch.zeros(1, dtype=torch.long)
        if logits is not None:
            likely = torch.softmax(logits[0, -1].float().cpu() / 0.7, 0)
            token = torch.multinomial(likely, 1, generator=generator)
        if pipe.position.world.world_size > 1:
            dist.broadcast(token, src=pipe.position.counted[0][pipe.last_rank])
        window = torch.cat([window[:, 1:], token[None]], 1)
        drawn.append(int(token))
    return prompt, drawn.decode(errors="replace")
