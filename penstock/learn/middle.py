"""The house between `mini.py` and the engine: what mini leaves out first, in the order in which a step needs it.

    torchrun --nproc-per-node 4 -m penstock.learn.middle            # 1F1B, compared with one process
    torchrun --nproc-per-node 4 -m penstock.learn.middle zb-v 12    # any other table, or my.csv, on 12 microbatches

Read `mini.py` first; the backward in two halves is taken from there. A step here is

    pieces       a batch becomes a list of pieces: what is run
    agreement    all ranks compare their call, before any data flows, and learn the shapes of messages once
    row          each rank runs its row of the table: when
    channels     receives are posted before they are needed, sends are not waited for
    failure      if a rank fails, the step fails on all ranks with that rank's error, and the next step works

The engine has a room for each of these. Its bits are the same.
"""

import copy
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.learn.mini import Products, add_weight_gradients, deferred_products, make_layers, split_backward
from penstock.schedule import Schedule, build
from penstock.schedule.table import Action, Kind

Shape = tuple[int, ...]


# ---- pieces
#
# Only this function knows what a batch is. All that follows sees pieces: a batch that is given as a list would be another
# function here, and no other line would change.


class Piece(NamedTuple):
    """What one microbatch runs on."""

    inputs: Tensor  # (rows, ..)
    target: Tensor
    share: float  # of the batch's rows: the weight of this piece's mean


def cut_into_pieces(inputs: Tensor, target: Tensor, microbatches: int) -> list[Piece]:
    """Cut a batch by rows, as evenly as possible; a batch of few rows makes fewer pieces."""
    count = min(microbatches, len(inputs))
    parts = zip(inputs.tensor_split(count), target.tensor_split(count), strict=True)
    return [Piece(rows, labels, len(rows) / len(inputs)) for rows, labels in parts]


# ---- agreement
#
# Gloo accepts a message of the wrong size without an error, and a rank with another table waits for ever. So the ranks compare
# a row of numbers before the first action: one collective, a few bytes. All ranks have all rows, so all raise the same error.


class StepMismatchError(Exception):
    """The ranks were not called with the same batch, or have different tables. Nothing was sent."""


def agree(numbers: dict[str, int], group: dist.ProcessGroup) -> None:
    """Compare `numbers`, by name, between all ranks. Raises StepMismatchError, the same on every rank, if some differ."""
    row = torch.tensor([*numbers.values()])
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    for rank, values in enumerate(torch.stack(rows).tolist()):
        for name, value, first in zip(numbers, values, rows[0].tolist(), strict=True):
            if value != first:
                raise StepMismatchError(f"{name}: {value} on rank {rank}, {first} on rank 0: call step() alike on all ranks")


def crc32(value: object) -> int:
    """Return a number that is the same in every process, as `hash()` is not."""
    return zlib.crc32(repr(value).encode())


# ---- channels
#
# A large message moves only once its receive is posted. mini posts a receive when it needs the tensor, so the message travels
# while the rank waits. Here a few receives are always posted ahead, so it travels while the rank computes. For that a rank must
# know which messages its row needs (the table says it) and how large they are (the agreement says it).

RECEIVES_AHEAD = 3  # posted at a time: each needs memory for its tensor


class Message(NamedTuple):
    """A message of a step: its number is its tag, so that messages of two ranks may be received in any order."""

    source: int  # rank
    number: int
    shape: Shape


class Channels:
    """The messages of one rank in one step. `expected`: all that it will receive, in the order in which it needs them."""

    def __init__(self, rank: int, group: dist.ProcessGroup, expected: Sequence[Message]) -> None:
        self.rank, self.group = rank, group
        self._expected = iter([message for message in expected if message.source != rank])
        self._received: dict[int, tuple[Any, Tensor]] = {}  # number -> handle of a posted receive, and its tensor
        self._sent: list[tuple[Any, Tensor]] = []  # a tensor must live until it is sent
        self._local: dict[int, Tensor] = {}  # between two stages of this rank
        for _ in range(RECEIVES_AHEAD):
            self._post_next()

    def _post_next(self) -> None:
        if message := next(self._expected, None):
            tensor = torch.empty(message.shape)
            handle = dist.irecv(tensor, message.source, group=self.group, tag=message.number)
            self._received[message.number] = handle, tensor

    def send(self, tensor: Tensor, to: int, number: int) -> None:
        """Begin to send `tensor` to the rank `to`."""
        if to == self.rank:
            self._local[number] = tensor
        else:
            tensor = tensor.contiguous()
            self._sent.append((dist.isend(tensor, to, group=self.group, tag=number), tensor))

    def receive(self, number: int) -> Tensor:
        """Wait for message `number`, and post another receive."""
        if number in self._local:
            return self._local.pop(number)
        handle, tensor = self._received.pop(number)
        handle.wait()
        self._post_next()
        return tensor

    def finish(self) -> None:
        """Wait until everything is sent."""
        for handle, _ in self._sent:
            handle.wait()


# ---- failure
#
# If a rank raises, its neighbours wait for messages that will never come. So it first writes its error where all can read it.
# Then it closes its connections, which ends the waits of its neighbours, which do the same, until every rank has left the step.
# Each reads the first error that was written. A transport error follows from an error of another rank, so a rank that has one
# gives the others time to write.

UNUSED_TAG = 2**20
TIME_TO_WRITE = timedelta(seconds=5)


class StepFailedError(Exception):
    """A rank failed in a step, which has therefore ended on all ranks. The text is that rank's error."""


def report_failure(store: dist.Store, key: str, text: str, is_cause: bool) -> str:
    """Write `text` at `key` unless another rank has written; return what the first rank wrote."""
    if not is_cause:
        with suppress(dist.DistStoreError):
            store.wait([key], TIME_TO_WRITE)
            return store.get(key).decode()
    if store.add(f"{key}, writers", 1) == 1:
        store.set(key, text)
    return store.get(key).decode()


def close_connections(group: dist.ProcessGroup) -> None:
    """End all waits in a Gloo group, here and at the peers: a receive that times out makes Gloo close all connections."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                handle = dist.irecv(torch.empty(1), peer, group=group, tag=UNUSED_TAG)
                assert handle is not None
                handle.wait(timedelta(milliseconds=1))


def is_transport_error(error: Exception) -> bool:
    """Return whether `error` comes from a connection, so that another rank has its cause."""
    return isinstance(error, RuntimeError) and "gloo" in str(error)


# ---- one rank


class Rank:
    """The stages of one rank; runs its row of the table. All ranks make the same calls. `store` is shared by all ranks."""

    def __init__(self, layers: Sequence[nn.Module], loss_fn: Any, table: Schedule, store: dist.Store) -> None:
        self.table, self.loss_fn, self.store, self.rank = table, loss_fn, store, dist.get_rank()
        cuts = [stage * len(layers) // table.num_stages for stage in range(table.num_stages + 1)]
        self.stages = {s: nn.Sequential(*layers[cuts[s] : cuts[s + 1]]) for s in table.stages_of(self.rank)}
        self._shape_models = {s: copy.deepcopy(stage).to("meta") for s, stage in self.stages.items()}  # shapes without numbers
        self._shapes: dict[object, dict[tuple[int, int], Shape]] = {}  # kind of batch -> (stage, rows) -> shape of its output
        self._group: dist.ProcessGroup | None = None
        self._groups_made = 0
        for stage in self.stages.values():
            split_backward(stage)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, for its optimizer."""
        for stage in self.stages.values():
            yield from stage.parameters()

    def step(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Run forward and backward of one batch, add to `.grad`, return the batch's loss.

        Raises StepMismatchError or StepFailedError, the same on every rank. After an error `.grad` may have a part of the sum.
        """
        self._action = "before the first action"
        if self._group is None:
            self._group, self._groups_made = dist.new_group(backend="gloo"), self._groups_made + 1
        try:
            return self._run(cut_into_pieces(inputs, target, self.table.microbatches), self._group)
        except StepMismatchError:
            raise
        except Exception as error:
            text = f"rank {self.rank}, {self._action}: {type(error).__name__}: {error}"
            key = f"failure {self._groups_made}"
            first = report_failure(self.store, key, text, is_cause=not is_transport_error(error))
            close_connections(self._group)
            self._group = None  # the next step makes a new one
            raise StepFailedError(first) from error

    def _run(self, pieces: list[Piece], group: dist.ProcessGroup) -> Tensor:
        """Agree, run the row, and give all ranks the loss."""
        kind = tuple(piece.inputs.shape for piece in pieces)
        agree(
            {"the table (crc32)": crc32(self.table.csv_rows()), "the pieces": len(pieces), "their shapes (crc32)": crc32(kind)},
            group,
        )
        if kind not in self._shapes:
            self._shapes[kind] = self._learn_shapes(pieces, group)
        row = [action for action in self.table.actions[self.rank] if action.microbatch < len(pieces)]
        expected = [message for action in row if (message := self._input_of(action, pieces, self._shapes[kind]))]

        self._pieces, self._channels = pieces, Channels(self.rank, group, expected)
        self._activations: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (stage, microbatch) -> its input and output
        self._products: dict[tuple[int, int], Products] = {}  # (stage, microbatch) -> deferred by its I
        self._losses: dict[int, Tensor] = {}
        runs: dict[Kind, Callable[[int, int], None]] = {
            Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward_input, Kind.W: self._backward_weight,
        }  # fmt: skip
        for action in row:
            self._action = str(action)
            runs[action.kind](action.stage, action.microbatch)

        self._action = "after the last action"
        self._channels.finish()
        total = sum((self._losses[m] * pieces[m].share for m in sorted(self._losses)), torch.zeros(()))
        dist.broadcast(total, self.table.placement[-1], group=group)
        return total

    def _learn_shapes(self, pieces: list[Piece], group: dist.ProcessGroup) -> dict[tuple[int, int], Shape]:
        """Return the shape of each stage's output for each number of rows: a stage's rank computes it, and tells all."""
        shapes: dict[tuple[int, int], Shape] = {}
        for size, example in {len(piece.inputs): piece.inputs for piece in pieces}.items():
            shape = tuple(example.shape)
            for stage in range(self.table.num_stages - 1):
                numbers = torch.zeros(8, dtype=torch.int64)
                if stage in self._shape_models:
                    value = torch.empty(shape, dtype=example.dtype if stage == 0 else torch.float32, device="meta")
                    output = self._shape_models[stage](value)
                    numbers[: output.dim() + 1] = torch.tensor([output.dim(), *output.shape])
                dist.broadcast(numbers, self.table.placement[stage], group=group)
                shape = tuple(numbers[1 : 1 + int(numbers[0])].tolist())
                shapes[stage, size] = shape
        return shapes

    def _input_of(self, action: Action, pieces: list[Piece], shapes: dict[tuple[int, int], Shape]) -> Message | None:
        """Return the message that an action needs: the output of the stage before, or the gradient from the stage after."""
        size = len(pieces[action.microbatch].inputs)
        if action.kind is Kind.F and action.stage > 0:
            source = action.stage - 1
            return Message(self.table.placement[source], self._number(Kind.F, source, action.microbatch), shapes[source, size])
        if action.kind in (Kind.B, Kind.I) and action.stage < self.table.num_stages - 1:
            source = action.stage + 1
            return Message(
                self.table.placement[source], self._number(Kind.B, source, action.microbatch), shapes[action.stage, size]
            )
        return None

    def _number(self, kind: Kind, stage: int, microbatch: int) -> int:
        """Return the number of the message that this action sends."""
        return 2 * (stage * self.table.microbatches + microbatch) + (kind is Kind.B)

    def _forward(self, stage: int, microbatch: int) -> None:
        piece, is_last = self._pieces[microbatch], stage == self.table.num_stages - 1
        value = piece.inputs
        if stage > 0:
            value = self._channels.receive(self._number(Kind.F, stage - 1, microbatch)).requires_grad_()
        output = self.stages[stage](value)
        if is_last:
            output = self.loss_fn(output, piece.target)
            self._losses[microbatch] = output.detach()
        else:
            self._channels.send(output.detach(), self.table.placement[stage + 1], self._number(Kind.F, stage, microbatch))
        self._activations[stage, microbatch] = value, output

    def _backward_input(self, stage: int, microbatch: int) -> None:
        value, output = self._activations.pop((stage, microbatch))
        if stage == self.table.num_stages - 1:
            gradient = torch.full_like(output, self._pieces[microbatch].share)
        else:
            gradient = self._channels.receive(self._number(Kind.B, stage + 1, microbatch))
        deferred_products.clear()
        output.backward(gradient)
        self._products[stage, microbatch] = list(deferred_products)
        if stage > 0:
            assert value.grad is not None
            self._channels.send(value.grad, self.table.placement[stage - 1], self._number(Kind.B, stage, microbatch))

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        add_weight_gradients(self._products.pop((stage, microbatch)))

    def _backward(self, stage: int, microbatch: int) -> None:
        self._backward_input(stage, microbatch)
        self._backward_weight(stage, microbatch)


# ---- try it: ten training steps, compared with one process that has the whole model


def main(name: str = "1f1b", microbatches: str = "8") -> None:
    """Train for ten steps. Rank 0 prints the loss, and that of the whole model in one process."""
    torch.set_num_threads(1)
    store, rank, ranks = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=ranks)
    table = Schedule.from_csv(name) if name.endswith(".csv") else build(name, ranks=ranks, microbatches=int(microbatches))
    pipeline = Rank(make_layers(), nn.functional.mse_loss, table, dist.PrefixStore("failures", store))
    uncut = nn.Sequential(*make_layers())
    optimizers = [torch.optim.Adam(pipeline.parameters(), lr=3e-3), torch.optim.Adam(uncut.parameters(), lr=3e-3)]
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    target = 0.8 * inputs[:, :1].sign().expand_as(inputs)
    for step in range(10):
        loss = pipeline.step(inputs, target)
        uncut_loss = torch.zeros(())
        for piece in cut_into_pieces(inputs, target, table.microbatches):
            piece_loss = nn.functional.mse_loss(uncut(piece.inputs), piece.target)
            piece_loss.backward(torch.full_like(piece_loss, piece.share))
            uncut_loss += piece_loss.detach() * piece.share
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            bits = f"the same bits: {torch.equal(loss, uncut_loss)}"
            print(f"step {step + 1}: loss {loss:.6f}, one process {uncut_loss:.6f}, {bits}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
