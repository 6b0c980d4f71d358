"""A batch that comes as a list of microbatches, of any shapes: what `pipe.step_microbatches` runs.

Each microbatch may have other rows and another length than the others, and than those of earlier steps. So all ranks exchange
what a list is like in every step: rows, loss weights, the order to run in, and a hash of each microbatch's shapes. Messages
of a microbatch whose shapes were seen before need no description.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comms.control_group import ControlGroup
from penstock.errors import MismatchError, is_whole_number
from penstock.mesh.position import MeshPosition
from penstock.partition.rows import rows_dim_of, unwrap
from penstock.plan.grouping import Limit, SizeLimit
from penstock.plan.microbatch_costs import MicrobatchCosts
from penstock.schedule.table import Table
from penstock.stage import microbatch
from penstock.timing.simulate import Costs
from penstock.trees import leaves


class MicrobatchSummary(NamedTuple):
    """One microbatch, as the first stage's rank describes it to the others."""

    rows: int
    elements: int  # of the largest tensor with rows: the padded tokens
    signature: str  # structure, shapes and dtypes


class MicrobatchListSummary(NamedTuple):
    """One rank's description of a list; fields are empty where the rank does not read the list."""

    inputs: Sequence[MicrobatchSummary] = ()
    order: Sequence[int] = ()  # position in the step -> index in the list
    target_rows: Sequence[int] = ()
    target_shapes: Sequence[str] = ()
    loss_weights: Sequence[float] = ()
    arguments: Sequence[object] = ()  # what every rank was given as `order` and `limit`


class ReplicaList(NamedTuple):
    """The list of one replica, in the order in which it runs; the same on every rank."""

    rows: Sequence[int]
    elements: Sequence[int]
    order: Sequence[int]
    signatures: Sequence[str]
    loss_weights: Sequence[float]  # empty where the loss weighs by rows, or there is no target


def check_list(value: Any, name: str) -> None:
    """Raise MismatchError unless `value` is a list with an entry for each microbatch."""
    if isinstance(value, Tensor) or not isinstance(value, Sequence) or isinstance(value, str | tuple):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise MismatchError(
            f"step_microbatches() takes {name} as a list with an entry for each microbatch, not {kind}: "
            "give [first, second, ..], or call step(), which splits a batch itself"
        )
    if not value:
        raise MismatchError(f"step_microbatches() got an empty list as {name}: give an entry for each microbatch, one or more")


def read_inputs(
    entries: Any, device: torch.device, rows_dim: int
) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], list[MicrobatchSummary]]:
    """Return (args, kwargs) of each microbatch on `device`, and its summary.

    An entry is a tensor, a tuple of arguments or a dict of keywords. Raises MismatchError for one without rows.
    """
    check_list(entries, "inputs")
    calls = [_args_and_kwargs(entry) for entry in entries]
    sizes = [_count_rows(entry, f"microbatch {index}", rows_dim) for index, entry in enumerate(entries)]
    summaries = [
        MicrobatchSummary(rows, _count_elements_of_largest(entry, rows_dim), microbatch.batch_signature(call))
        for rows, entry, call in zip(sizes, entries, calls, strict=True)
    ]
    on_device = [microbatch.split(call, [rows], device, rows_dim)[0] for rows, call in zip(sizes, calls, strict=True)]
    return on_device, summaries


def _args_and_kwargs(entry: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(entry, Mapping):
        return (), dict(entry)
    return (entry if type(entry) is tuple else (entry,)), {}


def read_targets(entries: Any, device: torch.device, rows_dim: int) -> tuple[list[Any], list[int]]:
    """Return the target of each microbatch on `device`, and its rows. Raises MismatchError for one without rows."""
    check_list(entries, "targets")
    sizes = [_count_rows(entry, f"target {index}", rows_dim) for index, entry in enumerate(entries)]
    return [microbatch.split(entry, [rows], device, rows_dim)[0] for rows, entry in zip(sizes, entries, strict=True)], sizes


def _count_rows(entry: Any, name: str, rows_dim: int) -> int:
    return sum(microbatch.nonempty_split_sizes(dict(entry) if isinstance(entry, Mapping) else entry, name, 1, rows_dim))


def _count_elements_of_largest(entry: Any, rows_dim: int) -> int:
    """Return the elements of the largest tensor with rows: proportional to the padded tokens of a microbatch."""
    tensors = [unwrap(leaf) for leaf in leaves(entry) if rows_dim_of(leaf, rows_dim) is not None]
    return max((tensor.numel() for tensor in tensors if isinstance(tensor, Tensor)), default=1)


RowCounts = tuple[Sequence[int], Sequence[int]]  # rows of the entries of inputs and of target; empty where there are none


def count_entry_rows(entries: Any, rows_dim: int) -> Sequence[int]:
    """Return the rows of each entry; nothing if this is no list of entries with rows."""
    try:
        check_list(entries, "a list")
        return [_count_rows(entry, "an entry", rows_dim) for entry in entries]
    except MismatchError:
        return ()


def check_same_row_counts(rows_by_rank: Mapping[int, RowCounts], prefix: str, is_list: bool) -> None:
    """Raise MismatchError, with who has what, if ranks of a replica were given batches of other rows."""
    for name, index in (("input", 0), ("target", 1)):
        by_rank = {rank: rows[index] for rank, rows in rows_by_rank.items() if rows[index]}
        for rank, rows in by_rank.items():
            first_rank, expected = next(iter(by_rank.items()))
            if rows == expected:
                continue
            if len(rows) != len(expected):
                difference = f"{len(expected)} {name}s on rank {first_rank}, {len(rows)} on rank {rank}"
            else:
                entry = next(number for number, pair in enumerate(zip(rows, expected, strict=True)) if pair[0] != pair[1])
                what = f"{name} {entry} has" if is_list else "inputs have" if name == "input" else "the target has"
                difference = f"{what} {expected[entry]} rows on rank {first_rank}, {rows[entry]} on rank {rank}"
            raise MismatchError(
                f"{prefix}the ranks were given different {'lists' if is_list else 'batches'}: {difference}. "
                "Give all of them the same (pipe.sampler(dataset), one seed for all loaders), or None where they are not read"
            )


def exchange_lists(
    control: ControlGroup,
    position: MeshPosition,
    summary: MicrobatchListSummary,
    row_counts: Callable[[], RowCounts],
    wait_reason: str,
) -> list[ReplicaList]:
    """Exchange the ranks' summaries. Return the list of each replica. `row_counts`: asked for an error alone.

    Raises MismatchError, the same on every rank, for a target of other rows than its microbatch, for ranks of one replica that
    were given different orders, and for ranks along tp that were given different lists.
    """
    summaries: list[MicrobatchListSummary] = control.all_gather_value(summary, wait_reason)
    lists = []
    for replica, pipelines in enumerate(position.pipelines):
        prefix = position.replica_prefix(replica)
        _check_same_arguments({rank: summaries[rank].arguments for ranks in pipelines for rank in ranks}, prefix)
        shards = [merge_summaries([summaries[rank] for rank in ranks]) for ranks in pipelines]
        if any(shard != shards[0] for shard in shards):
            raise MismatchError(f"{prefix}the ranks along tp work on one batch, but were given different lists of microbatches")
        if shards[0].target_rows and [entry.rows for entry in shards[0].inputs] != list(shards[0].target_rows):
            all_rows: list[RowCounts] = control.all_gather_value(row_counts(), wait_reason)
            check_same_row_counts({rank: all_rows[rank] for ranks in pipelines for rank in ranks}, prefix, is_list=True)
        lists.append(_replica_list_in_run_order(shards[0], prefix))
    return lists


def _check_same_arguments(arguments: Mapping[int, Sequence[object]], prefix: str) -> None:
    """Raise MismatchError unless all ranks of a replica were given the same order and limit."""
    first_rank, expected = next(iter(arguments.items()))
    for rank, values in arguments.items():
        for name, value, first_value in zip(("order", "limit"), values, expected, strict=True):
            if value != first_value:
                raise MismatchError(
                    f"{prefix}the ranks were given different {name}s: {name}={first_value!r} on rank {first_rank}, "
                    f"{name}={value!r} on rank {rank}. Give all of them the same"
                )


def merge_summaries(summaries: Sequence[MicrobatchListSummary]) -> MicrobatchListSummary:
    """Return what summaries say together: the first stage\'s rank has the inputs, the last stage\'s rank the targets."""
    return MicrobatchListSummary(*(next(filter(None, column), ()) for column in zip(*summaries, strict=True)))


def _replica_list_in_run_order(summary: MicrobatchListSummary, prefix: str) -> ReplicaList:
    inputs, order, target_rows, target_shapes, loss_weights, _ = summary
    for index, (microbatch_, rows) in enumerate(zip(inputs, target_rows, strict=bool(target_rows))):
        if rows != microbatch_.rows:
            raise MismatchError(
                f"{prefix}microbatch {index} has {microbatch_.rows} rows but its target has {rows} ({target_shapes[index]})"
            )
    return ReplicaList(
        rows=[inputs[index].rows for index in order],
        elements=[inputs[index].elements for index in order],
        order=order,
        signatures=[inputs[index].signature for index in order],
        loss_weights=[loss_weights[index] for index in order] if loss_weights else (),
    )


def comparable_order(order: object) -> str | list[int]:
    """Return an order as ranks compare it: indices as ints, anything else as text."""
    if isinstance(order, Sequence) and not isinstance(order, str) and all(map(is_whole_number, order)):
        return list(map(int, order))
    return order if isinstance(order, str) else repr(order)


def microbatch_order(
    order: str | Sequence[int] | None,
    inputs: Sequence[MicrobatchSummary],
    table_of: Callable[[int], Table],
    costs: MicrobatchCosts | None = None,
    limit: Limit = None,
) -> list[int]:
    """Return the order to run in: position in the step -> index in the list.

    `table_of(microbatches)`: the table that will run. Without `costs`, the elements of a microbatch stand for its cost. Raises
    MismatchError for an order that is none, and for one that has more than `limit` in flight on a rank.
    """
    size_limit = SizeLimit(limit, costs and costs.bytes)
    shapes = [(entry.rows, entry.elements / entry.rows) for entry in inputs]
    sizes = [size_limit.size(*shape) for shape in shapes]
    indices = comparable_order(order)
    if order == "given":
        indices = list(range(len(inputs)))
    elif order == "planned":
        from penstock.plan.microbatch_order import plan_order  # imports numpy, which no other step needs

        factors = [costs(*shape) if costs else float(entry.elements) for shape, entry in zip(shapes, inputs, strict=True)]
        stage_costs = costs.step_costs(shapes) if costs else Costs()
        most = None if limit is None else size_limit.most
        indices = plan_order(factors, table_of(len(inputs)), stage_costs, sizes, most, in_seconds=costs is not None)
    if isinstance(indices, str) or sorted(indices) != list(range(len(inputs))):
        raise MismatchError(
            f"order={order!r} is no order of {len(inputs)} microbatches: give 'given', 'planned', or each index from 0 to "
            f"{len(inputs) - 1} once"
        )
    if limit is not None:
        _check_limit([sizes[index] for index in indices], table_of(len(inputs)), order, size_limit)
    return indices


def _check_limit(sizes: Sequence[float], table: Table, order: object, limit: SizeLimit) -> None:
    """Raise MismatchError where microbatches of these `sizes`, in the order they run, have more than `limit` in flight."""
    from penstock.plan.microbatch_order import peak_in_flight  # imports numpy, which no other step needs

    peaks = peak_in_flight(sizes, table)
    if max(peaks) > limit.most:
        least = "no order was found that has less" if order == "planned" else "order='planned' looks for one that has less"
        raise MismatchError(
            f"order={order!r} has up to {limit.format(max(peaks))} in flight on rank {peaks.index(max(peaks))}, more than the "
            f"limit of {limit.format(limit.most)}: {least}. Make smaller microbatches, take a schedule with fewer in flight, "
            "or give a higher limit"
        )
