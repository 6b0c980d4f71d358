"""Collate rows of a dataset into microbatches of similar lengths."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import penstock as ps


class GroupingCollator:
    """A DataLoader's `collate_fn` that groups rows into microbatches by `ps.plan.group_rows`, and collates each group.

        grouping = GroupingCollator(collate, microbatches=16)  # as DataCollatorForSeq2Seq(tokenizer)
        loader = DataLoader(dataset, batch_size=64, sampler=pipe.sampler(dataset), collate_fn=grouping)

    A row's length is that of its longest field. `cost`, `limit`: as for `group_rows`. Fewer rows than `microbatches` make one
    microbatch each. Raises MismatchError as `group_rows`.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        microbatches: int,
        cost: Callable[[int, int], float] | None = None,
        limit: float | str | None = None,
    ) -> None:
        self.collate, self.microbatches, self.cost, self.limit = collate, microbatches, cost, limit

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the microbatches, in the order in which the pipeline is fastest."""
        groups = ps.plan.group_rows(list(map(_length, rows)), min(self.microbatches, len(rows)), self.cost, self.limit)
        return [self.collate([rows[row] for row in group]) for group in groups]


def _length(row: Mapping[str, Any]) -> int:
    sizes = [len(value) for value in row.values() if hasattr(value, "__len__") and not isinstance(value, str)]
    return max(1, *sizes) if sizes else 1


class RowBatch:
    """Rows of a batch, to be collated later. Not a list, because accelerate would search each element for tensors."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
