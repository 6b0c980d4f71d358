"""How far the gradients of three pipelines are from those of one process, in five cases: torch, DeepSpeed, Penstock.

Each case runs on two ranks, with torch's `Schedule1F1B`, with DeepSpeed's pipeline engine, both with their defaults, and with
`ps.Pipeline`. The error is that of all gradients together, as a share of their norm in one process that takes the whole batch.

    python benchmarks/one_process.py             # without DeepSpeed, if it is not installed
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from vs_deepspeed import INSTALL, import_deepspeed, make_engine

import penstock as ps

WIDTH, ROWS, TIME, MICROBATCHES = 8, 8, 6, 4
WAIT_SECONDS = 30  # for a message
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


def with_deepspeed(batches: Iterable[Batch], max_norm: float, **options: Any) -> tuple[Gradients, float]:
    """Return this rank's gradients, and the norm that DeepSpeed finds in those of all ranks. It takes no float64.

    Several batches are the microbatches of one step, because a step of DeepSpeed contains the optimizer's.
    """
    rank, stages = dist.get_rank(), list(model().float())
    pairs = [(rows.float(), labels) for inputs, target in batches for rows, labels in microbatches(inputs, target)]
    optimizer, found = torch.optim.SGD(stages[rank].parameters(), lr=0.0), Gradients()

    def keep_gradients(*_: Any) -> None:  # DeepSpeed clears them
        found.update({f"{rank}.{name}": p.grad.clone() for name, p in stages[rank].named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep_gradients)
    engine = make_engine(stages, loss_fn, optimizer, pairs, max_norm, **options)
    module = import_deepspeed().runtime.engine
    clip, norms = module.clip_grad_norm_, list[Any]()  # nothing that the engine returns has the norm
    with mock.patch.object(module, "clip_grad_norm_", lambda **arguments: norms.append(clip(**arguments))):
        engine.train_batch(data_iter=iter(pairs))
    return found, float(norms[0])


def microbatches(inputs: Tensor, target: Tensor) -> list[Batch]:
    """Return the rows of the batch in as even microbatches as there are."""
    return list(zip(inputs.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True))


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
    "two batches before the optimizer's step": ([batch(ROWS, False, 0), batch(ROWS, False, 1)], False),
    "the norm for clipping": ([batch(ROWS, False, 0)], True),
}


def on_rank(run: Callable[..., Any], batches: list[Batch]) -> Any:
    """Return what one rank has, or the error that it got."""
    ps.comms.init_distributed(timeout=WAIT_SECONDS)
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


def main() -> None:
    """Print a table."""
    sides: dict[str, Callable[..., Any]] = {f"torch {torch.__version__}": with_torch}
    if find_spec("deepspeed"):
        sides |= {"DeepSpeed": with_deepspeed, "with `dynamic_shape=True`": partial(with_deepspeed, dynamic_shape=True)}
    else:
        print(f"Without DeepSpeed, which is not installed: {INSTALL}.\n")
    sides["Penstock"] = with_penstock
    print(f"| case | {' | '.join(sides)} |\n|---|{'---|' * len(sides)}")
    for name, (batches, by_norm) in CASES.items():
        expected = one_process(batches)
        texts = [error_text(ps.launch(on_rank, 2, run, batches), expected, by_norm) for run in sides.values()]
        print(f"| {name} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
