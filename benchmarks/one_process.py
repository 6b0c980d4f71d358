"""How far the gradients of two pipelines are from those of one process, in five cases: torch.distributed.pipelining, Penstock.

Each case runs on two ranks, with torch's `Schedule1F1B` and its defaults, and with `ps.Pipeline`. The error is that of all
gradients together, as a share of their norm in one process that takes the whole batch at once.

    python benchmarks/one_process.py
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import penstock as ps

WIDTH, ROWS, TIME, MICROBATCHES = 8, 8, 6, 4
Batch = tuple[Tensor, Tensor]
Gradients = dict[str, Tensor]


def model() -> nn.Sequential:
    """Return two stages with the same weights on every rank and in one process."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]).double()


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


def one_process(batches: Iterable[Batch]) -> Gradients:
    """Return the gradients of the mean over whole batches."""
    whole, count = model(), 0
    for count, (inputs, target) in enumerate(batches, 1):  # noqa: B007
        loss_fn(whole(inputs), target).backward()
    return {name: parameter.grad / count for name, parameter in whole.named_parameters() if parameter.grad is not None}


def with_torch(batches: Iterable[Batch], max_norm: float) -> tuple[Gradients, float]:
    """Return this rank's gradients, and the norm that torch's function finds in them."""
    rank = dist.get_rank()
    part = model()[rank]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn)
    pairs = list(batches)
    for inputs, target in pairs:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=target)
    norm = nn.utils.clip_grad_norm_(part.parameters(), max_norm).item()
    return {f"{rank}.{name}": p.grad / len(pairs) for name, p in part.named_parameters() if p.grad is not None}, norm


def with_penstock(batches: Iterable[Batch], max_norm: float) -> tuple[Gradients, float]:
    """Return this rank's gradients, and the norm that the pipeline finds in them."""
    pipe = ps.Pipeline(model(), loss_fn, "1f1b", MICROBATCHES, loss_weight=ps.tokens())
    pairs = list(batches)
    for inputs, target in pairs:
        pipe.step(inputs, target=target, scale=1 / len(pairs))
    norm = pipe.clip_grad_norm_(max_norm).item()
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}, norm


CASES: dict[str, tuple[list[Batch], bool]] = {
    "equal microbatches, one step": ([batch(ROWS, False, 0)], False),
    "microbatches with different numbers of targets that count": ([batch(ROWS, True, 0)], False),
    "a batch whose rows do not divide by the microbatches": ([batch(ROWS + 2, False, 0)], False),
    "two steps before the optimizer's": ([batch(ROWS, False, 0), batch(ROWS, False, 1)], False),
    "the norm for clipping": ([batch(ROWS, False, 0)], True),
}


def on_rank(run: Callable[..., Any], batches: list[Batch]) -> Any:
    """Return what one rank has, or the error that it got."""
    ps.comms.init_distributed()
    try:
        return run(batches, 1e9)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def error_text(results: list[Any], expected: Gradients, by_norm: bool) -> str:
    """Return the error of the ranks' gradients, or of the norms that they found, as text."""
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        first_cause = next((error for error in errors if "gloo" not in error), errors[0])  # not that the other rank left
        return first_cause.splitlines()[0][:90]
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    if by_norm:
        return " and ".join(f"{abs(norm / whole.item() - 1):.1e}" for _, norm in results)
    found = {name: gradient for gradients, _ in results for name, gradient in gradients.items()}
    difference = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()]).norm()
    return f"{(difference / whole).item():.1e}"


if __name__ == "__main__":
    print(f"| case | torch {torch.__version__} | Penstock |\n|---|---|---|")
    for name, (batches, by_norm) in CASES.items():
        expected = one_process(batches)
        texts = [error_text(ps.launch(on_rank, 2, run, batches), expected, by_norm) for run in (with_torch, with_penstock)]
        print(f"| {name} | {' | '.join(texts)} |")
