"""Samplers: the rows of a dataset for each replica and epoch, the same on all ranks of a pipeline, disjoint over replicas."""

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from penstock.errors import MismatchError, is_whole_number
from penstock.mesh.position import MeshPosition
from penstock.plan.grouping import Cost, Limit, group_rows
from penstock.randomness import mix_seed
from penstock.schedule.schedule import Schedule


def dataset_length(dataset: Any) -> int:
    """Return the number of rows. Raise MismatchError for a loader of a dataset, and for one without a length."""
    if isinstance(dataset, DataLoader):
        raise MismatchError("sampler() takes the dataset: DataLoader(dataset, batch_size, sampler=pipe.sampler(dataset))")
    if not hasattr(dataset, "__len__"):
        raise MismatchError(
            f"a {type(dataset).__name__} has no length to sample from: let it share its rows out itself, by "
            "pipe.position.replica of pipe.position.replicas"
        )
    return len(dataset)


class ReplicaSampler(Sampler[int]):
    """Yields one replica's row numbers for a DataLoader: `DataLoader(dataset, batch_size, sampler=sampler)`.

    Shuffles of the whole dataset, one after the other, form a sequence from which replicas take rows in turns. No row is lost
    or used twice: if `rows` do not divide by `replicas`, the rest of an epoch begins the next one. All replicas have the same
    number of batches. Each iteration is the next epoch; `set_epoch` chooses it.

    `rows`: of the dataset. `replica`: this one's index, of `replicas`.
    Raises MismatchError for fewer rows than replicas.
    """

    def __init__(self, rows: int, replica: int = 0, replicas: int = 1, shuffle: bool = True, seed: int = 0) -> None:
        if rows < replicas:
            raise MismatchError(f"{rows} rows cannot be shared out over {replicas} replicas (dp): each needs one")
        self.rows, self.replica, self.replicas, self.shuffle, self.seed = rows, replica, replicas, shuffle, seed
        self.epoch = 0  # of the next iteration

    def __len__(self) -> int:
        """Return the number of this replica's rows in an epoch."""
        return self.rows // self.replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, to resume a training. Later iterations continue from it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this replica's row numbers in one epoch."""
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
    """Yields the row numbers of each step of one replica, one list for each microbatch. Used by `pipe.batches`.

    `sampler`: gives the order of rows, of which `rows` at a time are a step. Other arguments: see `Pipeline.batches`.
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
        """Return the number of steps in an epoch."""
        return math.ceil(len(self.sampler) / self.rows)

    def set_step(self, step: int) -> None:
        """Begin the next iteration after step `step`, counted from the first epoch on, to resume a training."""
        epoch, self._steps_to_skip = divmod(step, len(self))
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[list[int]]]:
        """Yield the groups of row numbers of each step in one epoch."""
        numbers = list(self.sampler)
        begin, self._steps_to_skip = self._steps_to_skip * self.rows, 0
        for first in range(begin, len(numbers), self.rows):
            step_rows = numbers[first : first + self.rows]
            lengths = [self.length(self.dataset[row]) if callable(self.length) else self.length[row] for row in step_rows]
            groups = group_rows(lengths, min(self.microbatches, len(step_rows)), self.cost, self.limit)
            yield [[step_rows[row] for row in group] for group in groups]


class PipelineSamplers:
    """A base of Pipeline: how the rows of a dataset are shared out over replicas, steps and microbatches."""

    position: MeshPosition
    schedule: Schedule

    def sampler(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> ReplicaSampler:
        """Return a sampler for this rank's DataLoader: the same rows on all ranks of a pipeline, others on each replica.

            loader = DataLoader(dataset, batch_size=32, sampler=pipe.sampler(dataset))  # rows of one replica's batch

        Each iteration is the next epoch. With `shuffle` each has a different order, which depends on `seed` and the epoch only;
        `set_epoch(n)` sets the next one. Every replica gets len(dataset) // dp rows an epoch; the remaining rows come first in
        the next. See docs/howto/data.md.

        Raises MismatchError for a dataset without a length, or with fewer rows than replicas.
        """
        return ReplicaSampler(dataset_length(dataset), self.position.replica, self.position.replicas, shuffle, seed)

    def batches(
        self,
        dataset: Any,
        rows: int,
        length: Callable[[Any], int] | Sequence[int] = len,
        microbatches: int | None = None,
        cost: Cost | None = None,
        limit: Limit = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> GroupSampler:
        """Return what shares a dataset's rows out over steps and their microbatches: row numbers, in groups of like lengths.

            batches = pipe.batches(dataset, rows=64, length=lambda row: len(row["input_ids"]))
            for groups in batches:  # one epoch
                microbatches = [[dataset[row] for row in group] for group in groups]

        rows
            Of a step of this replica. The last step of an epoch has those that are left.
        length
            `length(dataset[row])` is the number of tokens of a row, at least 1; or a sequence with those of all rows.
        microbatches, cost, limit
            As for `ps.plan.group_rows`; by default as many microbatches as the pipeline's.
        shuffle, seed
            As for `sampler`: each replica has the same rows of an epoch.

        Every row is in one group of an epoch. The groups depend on these arguments and on the number of replicas only, not on
        ranks and schedule. Each iteration is the next epoch; `len(batches)` is its number of steps. A resumed training goes on
        after `batches.set_step(pipe.step_count)`.

        Raises MismatchError as `sampler` and `ps.plan.group_rows`.
        """
        sampler = self.sampler(dataset, shuffle, seed)
        return GroupSampler(sampler, dataset, rows, length, microbatches or self.schedule.microbatches, cost, limit)
