"""How far the gradients of four pipelines are from those of one process, in six cases: torch, DeepSpeed, picotron, Penstock.

Each case runs on two ranks, with torch's `Schedule1F1B` and the engines of DeepSpeed and picotron, all with their defaults, and
with `ps.Pipeline`. The error is that of all gradients, as a share of their norm in one process that takes the whole batch.

    python benchmarks/one_process.py --picotron CLONE        # without DeepSpeed, if it is not installed
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from training_engines import Batch, Picotron, import_deepspeed, make_deepspeed_engine, print_missing_engines

import penstock as ps

WIDTH, ROWS, TIME, MICROBATCHES = 8, 8, 6, 4
WAIT_SECONDS = 30  # for a message
MAX_NORM = 1e9  # nothing is clipped
Gradients = dict[str, Tensor]


class Case(NamedTuple):
    """What is trained, and what is compared."""

    batches: list[Batch]
    compares_norms: bool = False
    is_tied: bool = False  # both stages have the first one's weight


def model(case: Case) -> nn.Sequential:
    """Return two stages with the same weights on every rank and in one process."""
    torch.manual_seed(0)
    whole = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]).double()
    if case.is_tied:
        whole.get_submodule("1.0").weight = whole.get_submodule("0.0").weight
    return whole


def batch(rows: int, is_padded: bool, seed: int) -> Batch:
    """Return inputs (rows, time, width) and targets (rows, time); padded, row r has 1 to `TIME` targets that count."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, TIME, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(WIDTH, (rows, TIME), generator=generator)
    if is_padded:
        targets[torch.arange(TIME) > torch.arange(rows)[:, None] * TIME // rows] = -100
    return inputs, targets


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the targets that count."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


def one_process(case: Case) -> Gradients:
    """Return the gradients of the mean over whole batches."""
    whole = model(case)
    for inputs, target in case.batches:
        loss_fn(whole(inputs), target).backward()
    return {
        name: parameter.grad / len(case.batches) for name, parameter in whole.named_parameters() if parameter.grad is not None
    }


def with_torch(case: Case) -> tuple[Gradients, float]:
    """Return this rank's gradients, and the norm that torch's function finds in them."""
    rank = dist.get_rank()
    part = model(case)[rank]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn)
    for inputs, target in case.batches:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=target)
    norm = nn.utils.clip_grad_norm_(part.parameters(), MAX_NORM).item()
    return {f"{rank}.{name}": p.grad / len(case.batches) for name, p in part.named_parameters() if p.grad is not None}, norm


def with_deepspeed(case: Case, **options: Any) -> tuple[Gradients, float]:
    """Return this rank's gradients, and the norm that DeepSpeed finds in those of all ranks. It takes no float64.

    Several batches are the microbatches of one step, because a step of DeepSpeed contains the optimizer's.
    """
    rank, stages = dist.get_rank(), list(model(case).float())
    pairs = [(rows.float(), labels) for inputs, target in case.batches for rows, labels in microbatches(inputs, target)]
    optimizer, found = torch.optim.SGD(stages[rank].parameters(), lr=0.0), Gradients()

    def keep_gradients(*_: Any) -> None:  # DeepSpeed clears them
        found.update({f"{rank}.{name}": p.grad.clone() for name, p in stages[rank].named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep_gradients)
    layers = [tied_layer(stage) for stage in stages] if case.is_tied else stages
    engine = make_deepspeed_engine(layers, loss_fn, optimizer, pairs, MAX_NORM, **options)
    module = import_deepspeed().runtime.engine
    clip, norms = module.clip_grad_norm_, list[Any]()  # nothing that the engine returns has the norm
    with mock.patch.object(module, "clip_grad_norm_", lambda **arguments: norms.append(clip(**arguments))):
        engine.train_batch(data_iter=iter(pairs))
    return found, float(norms[0])


def tied_layer(stage: nn.Module) -> Any:
    """Return the stage as one of DeepSpeed's layers that share their linear layer's weight."""
    return import_deepspeed().pipe.TiedLayerSpec("linear", Stage, stage, tied_weight_attr="stage.0.weight")


class Stage(nn.Module):
    """DeepSpeed makes a tied layer itself, from a class."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden: Tensor) -> Tensor:
        """What the stage returns."""
        return self.stage(hidden)


def with_picotron(folder: Path, divisor: int, case: Case) -> tuple[Gradients, float]:
    """Return this rank's gradients by `divisor`, and the norm that torch's function finds in them, as picotron has none."""
    rank, pairs = dist.get_rank(), [microbatches(inputs, target) for inputs, target in case.batches]
    part = model(case)[rank]
    engine = Picotron(folder, part, loss_fn, pairs[0][0][0].shape, torch.float64)
    for pieces in pairs:
        engine.step(pieces)
    found = {f"{rank}.{name}": p.grad for name, p in part.named_parameters() if p.grad is not None}
    for gradient in found.values():
        gradient /= divisor
    norm = nn.utils.clip_grad_norm_(part.parameters(), MAX_NORM).item()
    return {name: gradient / len(pairs) for name, gradient in found.items()}, norm


def microbatches(inputs: Tensor, target: Tensor) -> list[Batch]:
    """Return the rows of the batch in as even microbatches as there are."""
    return list(zip(inputs.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True))


def with_penstock(case: Case) -> tuple[Gradients, float]:
    """Return this rank's gradients, and the norm that the pipeline finds in them."""
    pipe = ps.Pipeline(model(case), loss_fn, "1f1b", MICROBATCHES, loss_weight=ps.tokens())
    for inputs, target in case.batches:
        pipe.step(inputs, target=target, scale=1 / len(case.batches))
    norm = pipe.clip_grad_norm_(MAX_NORM).item()
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}, norm


CASES = {
    "equal microbatches, one step": Case([batch(ROWS, False, 0)]),
    "microbatches with different numbers of targets that count": Case([batch(ROWS, True, 0)]),
    "a batch whose rows do not divide by the microbatches": Case([batch(ROWS + 2, False, 0)]),
    "two batches before the optimizer's step": Case([batch(ROWS, False, 0), batch(ROWS, False, 1)]),
    "a weight that both stages have": Case([batch(ROWS, False, 0)], is_tied=True),
    "the norm for clipping": Case([batch(ROWS, False, 0)], compares_norms=True),
}


def on_rank(run: Callable[..., Any], case: Case) -> Any:
    """Return what one rank has, or the error that it got."""
    ps.comms.init_distributed(timeout=WAIT_SECONDS)
    try:
        return run(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def error_text(results: list[Any], expected: Gradients, compares_norms: bool) -> str:
    """Return the error of the ranks' gradients, or of the norms that they found, as text."""
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        first_cause = next((error for error in errors if "gloo" not in error), errors[0])  # not that the other rank left
        return first_cause.splitlines()[0][:90]
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    if compares_norms:
        return " and ".join(f"{abs(norm / whole.item() - 1):.1e}" for _, norm in results)
    found = {name: gradient for gradients, _ in results for name, gradient in gradients.items()}
    difference = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()]).norm()
    return f"{(difference / whole).item():.1e}"


def main(picotron: Path | None = None) -> None:
    """Print a table. `picotron`: the folder of a clone."""
    print_missing_engines(picotron)
    sides: dict[str, Callable[..., Any]] = {f"torch {torch.__version__}": with_torch}
    if find_spec("deepspeed"):
        sides |= {"DeepSpeed": with_deepspeed, "with `dynamic_shape=True`": partial(with_deepspeed, dynamic_shape=True)}
    if picotron:
        sides |= {
            "picotron": partial(with_picotron, picotron, 1),
            "divided by M": partial(with_picotron, picotron, MICROBATCHES),
        }
    sides["Penstock"] = with_penstock
    print(f"| case | {' | '.join(sides)} |\n|---|{'---|' * len(sides)}")
    for name, case in CASES.items():
        expected = one_process(case)
        texts = [error_text(ps.launch(on_rank, 2, run, case), expected, case.compares_norms) for run in sides.values()]
        print(f"| {name} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
