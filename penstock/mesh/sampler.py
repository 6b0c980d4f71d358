"""Which rows of a dataset each replica is given, epoch by epoch: ranks of one pipeline the same, replicas none twice."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from penstock.errors import MismatchError, is_whole_number
from penstock.mesh.grouping import Cost, Limit, group_rows
from penstock.randomness import mix_seed


class ReplicaSampler(Sampler[int]):
    """Numbers of rows for a DataLoader, `DataLoader(dataset, batch_size, sampler=sampler)`: those of one replica.

    Shuffle after shuffle of the whole dataset makes one long row of numbers, which replicas take in turns. No row is lost and
    none doubled: where `rows` do not divide by `replicas`, those left over by one epoch are the first of the next, so that all
    replicas have as many batches. Each iteration is the next epoch; `set_epoch` chooses it.

    Raises MismatchError for fewer rows than replicas.
    """

    def __init__(self, rows: int, replica: int = 0, replicas: int = 1, shuffle: bool = True, seed: int = 0) -> None:
        if rows < replicas:
            raise MismatchError(f"{rows} rows cannot be shared out over {replicas} replicas (dp): each needs one")
        self.rows, self.replica, self.replicas, self.shuffle, self.seed = rows, replica, replicas, shuffle, seed
        self.epoch = 0  # the next iteration's

    def __len__(self) -> int:
        """Rows of this replica in an epoch."""
        return self.rows // self.replicas

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`, for a training that is resumed; the ones after it follow."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """This replica's rows of one epoch."""
        num_rows = len(self) * self.replicas
        begin, self.epoch = self.epoch * num_rows, self.epoch + 1
        first_shuffle, last_shuffle = begin // self.rows, (begin + num_rows - 1) // self.rows
        numbers = [row for which in range(first_shuffle, last_shuffle + 1) for row in self._row_order(which)]
        return iter(numbers[begin - first_shuffle * self.rows :][:num_rows][self.replica :: self.replicas])

    def _row_order(self, shuffle_number: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.rows))
        return torch.randperm(
            self.rows, generator=torch.Generator().manual_seed(mix_seed(self.seed, shuffle_number)), device="cpu"
        ).tolist()


class GroupSampler(Sampler[list[list[int]]]):
    """Row numbers of each step of one replica, in a group for each microbatch: `pipe.batches`.

    `sampler` says which rows come when; its consecutive `rows` are a step. Arguments as for `Pipeline.batches`.
    """

    def __init__(
        self,
        sampler: ReplicaSampler,
        dataset: Any,
        rows: int,
        length: Callable[[Any], int] | Sequence[int],
        microbatches: int,
        cost: Cost | None = None,
        limit: Limit = None,
    ) -> None:
        if not is_whole_number(rows) or rows < 1:
            raise MismatchError(f"rows={rows!r}: give the number of rows of a step, 1 or more")
        if not callable(length) and len(length) != len(dataset):
            raise MismatchError(
                f"there are {len(length)} lengths for {len(dataset)} rows: give one for each row, or a function"
            )
        self.sampler, self.dataset, self.rows, self.length = sampler, dataset, rows, length
        self.microbatches, self.cost, self.limit = microbatches, cost, limit
        self._steps_to_skip = 0  # in the next iteration

    def __len__(self) -> int:
        """Steps of an epoch."""
        return math.ceil(len(self.sampler) / self.rows)

    def set_step(self, step: int) -> None:
        """The next iteration goes on after `step` steps since the first epoch began: for a training that is resumed."""
        epoch, self._steps_to_skip = divmod(step, len(self))
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[list[int]]]:
        """The groups of each step of one epoch."""
        numbers = list(self.sampler)
        begin, self._steps_to_skip = self._steps_to_skip * self.rows, 0
        for first in range(begin, len(numbers), self.rows):
            step_rows = numbers[first : first + self.rows]
            lengths = [self.length(self.dataset[row]) if callable(self.length) else self.length[row] for row in step_rows]
            groups = group_rows(lengths, min(self.microbatches, len(step_rows)), self.cost, self.limit)
            yield [[step_rows[row] for row in group] for group in groups]
