"""One process that runs the same microbatches with gradient accumulation: what every pipeline must equal, to the bit."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from penstock.commands.train.setup import token_loss
from penstock.model import GPT, GPTConfig, mlp
from penstock.stage.auxiliary import AuxiliaryLossCollector

Batch = tuple[Any, ...]  # inputs and target, or arguments, target and keywords as in `models.Batch`
Microbatch = tuple[tuple[Any, ...], dict[str, Any], Any]  # the arguments and keywords of the model, the target


def pieces(tensor: Tensor, count: int) -> Sequence[Tensor]:
    return tensor.tensor_split(min(count, len(tensor)))


def rows_of(tree: Any, dim: int = 0) -> int:
    return next(leaf.shape[dim] for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim())


class OneProcess:
    """The uncut model with the calls of a pipeline, so that one function trains either and both results can be compared."""

    def __init__(
        self,
        model: Any,
        loss_fn: Any,
        schedule: Any = None,
        microbatches: Any = 1,
        loss_weight: Callable[[Any], Any] | None = None,
        *,
        rows_dim: int = 0,
        reduction: str = "mean",
        scaler: Any = None,
        teacher: nn.Module | None = None,
        **only_of_pipelines: Any,
    ) -> None:
        """`microbatches` is their number, or the rows of each. `model` is a module, or a function for calls of `step` only."""
        self.model, self.loss_fn, self.microbatches, self.rows_dim = model, loss_fn, microbatches, rows_dim
        self.loss_weight = loss_weight or (lambda target: rows_of(target, rows_dim))
        self.reduction, self.scaler, self.teacher = reduction, scaler, None if teacher is None else teacher.eval()

    def __getattr__(self, name: str) -> Any:
        """Parameters, state and modes are the model's."""
        return getattr(self.model, name)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self, *args: Any, target: Any, next_args: Any = (), **kwargs: Any) -> Any:
        """`scale`, `losses`, `return_outputs` as a pipeline's; `order` is that of the backwards."""
        own = {name: kwargs.pop(name) for name in ("scale", "losses", "return_outputs", "order") if name in kwargs}
        return self._run(self._split(args, kwargs, target), **own)

    def step_microbatches(self, inputs: Sequence[Any], targets: Sequence[Any], **own: Any) -> Any:
        return self._run([(*_call(entry), target) for entry, target in zip(inputs, targets, strict=True)], **own)

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """The outputs, as one, and the loss if there is a target."""
        was_training, microbatches = self.model.training, self._split(args, kwargs, target)
        self.model.eval()
        with torch.no_grad():
            outputs, losses = zip(*map(self._forward, microbatches), strict=True)
        self.model.train(was_training)
        if target is None:
            return self._joined(outputs)
        return self._joined(outputs), sum(loss * share for loss, share in zip(losses, self._shares(microbatches), strict=True))

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[Microbatch]:
        given, rows = self.microbatches, rows_of((args, kwargs))
        sizes = [len(part) for part in pieces(torch.empty(rows), given)] if isinstance(given, int) else given
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [
            tree_map(lambda leaf: leaf[a : a + n] if isinstance(leaf, Tensor) and leaf.dim() else leaf, (args, kwargs, target))  # noqa: B023
            for a, n in zip(starts, sizes, strict=True)
        ]

    def _shares(self, microbatches: Sequence[Microbatch]) -> list[float]:
        if self.reduction == "sum":
            return [1.0] * len(microbatches)
        weights = [float(self.loss_weight(target)) for *_, target in microbatches]
        return [weight / (sum(weights) or 1.0) for weight in weights]

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        scale: float = 1.0,
        losses: list[Any] | None = None,
        return_outputs: bool = False,
        order: Iterable[int] | None = None,
    ) -> Any:
        shares = self._shares(microbatches)
        counted = [number for number, share in enumerate(shares) if share]
        outputs, found = dict[int, Any](), dict[int, Tensor]()
        for m in counted:
            outputs[m], found[m] = self._forward(microbatches[m])
        for m in order or counted:
            loss = found[m] if self.scaler is None else self.scaler.scale(found[m])
            if loss.requires_grad:  # else all is frozen
                loss.backward(torch.full_like(loss, shares[m] * scale))
        if losses is not None:
            losses[:] = [found[m].detach() for m in counted]
        total = sum(found[m].detach() * shares[m] for m in counted)
        return (total, self._joined([outputs[m].detach() for m in counted])) if return_outputs else total

    def _joined(self, outputs: Sequence[Any]) -> Any:
        dim = self.rows_dim
        return tree_map(lambda *values: torch.cat(values, dim) if isinstance(values[0], Tensor) else values[0], *outputs)

    def _forward(self, microbatch: Microbatch) -> tuple[Any, Any]:
        """The output, and if there is a target its loss with the auxiliary ones."""
        args, kwargs, target = microbatch
        with AuxiliaryLossCollector() as auxiliary:
            output = self.model(*args, **kwargs)
        if target is None:
            return output, None
        with torch.no_grad():
            of_teacher = [] if self.teacher is None else [self.teacher(*args, **kwargs)]
        return output, sum(auxiliary, self.loss_fn(output, target, *of_teacher))


def _call(entry: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of an entry of a list."""
    if isinstance(entry, dict):
        return (), entry
    return (entry if isinstance(entry, tuple) else (entry,)), {}


def accumulate(
    model: Any, loss_fn: Any, batch: Batch, count: Any, weight: Callable[[Any], Any] | None = None, order: Any = None
) -> Tensor:
    """The loss of one batch, whose gradients are added to the model's; `order` is that of the backwards."""
    return step_with(OneProcess(model, loss_fn, None, count, weight), batch, order=order)


def step_with(pipe: Any, batch: Batch, **options: Any) -> Any:
    args, target, kwargs = batch if len(batch) == 3 else ((batch[0],), batch[1], {})
    return pipe.step(*args, target=target, **kwargs, **options)


def stepped(pipe: Any, batches: Iterable[Batch]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The loss of a step with each batch, and the gradients, which add up."""
    losses = [step_with(pipe, batch) for batch in batches]
    return losses, gradients(pipe.named_parameters())


def assert_as_one_process(everyone: Sequence[Any], expected: Any) -> None:
    """Every rank has what one process has, and of tensors by name its part."""
    if isinstance(expected, dict) and all(value is None or isinstance(value, Tensor) for value in expected.values()):
        assert_same(merged(everyone), expected)
    elif isinstance(expected, dict):
        assert all(part.keys() == expected.keys() for part in everyone)
        for name, value in expected.items():
            assert_as_one_process([part[name] for part in everyone], value)
    elif isinstance(expected, list | tuple):
        for *parts, value in zip(*everyone, expected, strict=True):
            assert_as_one_process(parts, value)
    else:
        assert all(same(part, expected) if isinstance(expected, Tensor) else part == expected for part in everyone)


def gradients(named: Any) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' parts as one; where two ranks have a name (a tied parameter), both must have the same."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            assert name not in whole or same(whole[name], value), name
            whole[name] = value
    return whole


def same(a: Any, b: Any) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours.keys() == expected.keys()
    different = [name for name in expected if not same(ours[name], expected[name])]
    assert not different, different


class RepeatedMatrix(nn.Module):
    """One matrix, used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(torch.tanh(self.first(hidden)))


def mixed(depth: int) -> nn.Sequential:
    """A frozen part, convolutions, norms, tied weights: (B, 12) -> (B, 3), `depth` layers between."""
    kinds = [
        lambda: nn.Conv1d(2, 2, 3, padding=1),
        lambda: nn.LayerNorm(6),
        lambda: RepeatedMatrix(6),
        nn.Tanh,
        lambda: nn.Linear(6, 6),
    ]
    layers = [kinds[index % len(kinds)]() for index in range(depth)]
    model = nn.Sequential(nn.Unflatten(1, (2, 6)), nn.Linear(6, 6), *layers, nn.Flatten(), nn.Linear(12, 3))
    model[1].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return model


def make(kind: str, dropout: float = 0.0, depth: int = 3) -> tuple[nn.Sequential, Any]:
    """A model and its loss, always the same."""
    torch.manual_seed(7)
    if kind == "mlp":
        return mlp(12, total_layers=depth + 2, classes=3), nn.functional.cross_entropy
    if kind == "mixed":
        return mixed(depth), nn.functional.cross_entropy
    shape = GPTConfig(vocabulary=17, context=6, width=8, layers=depth, heads=2, dropout=dropout)
    return GPT(shape), token_loss


def data(kind: str, rows: int, seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    if kind in ("mlp", "mixed"):
        return torch.randn(rows, 12, generator=generator), torch.randint(3, (rows,), generator=generator)
    tokens = torch.randint(17, (rows, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
