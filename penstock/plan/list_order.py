"""The order in which the microbatches of a list run: as given, planned, or a user's own; and whether it keeps a limit."""

from collections.abc import Callable, Sequence

from penstock.batch.pieces import Shape
from penstock.errors import MismatchError, is_whole_number
from penstock.plan.grouping import Limit, MicrobatchLimit
from penstock.plan.microbatch_costs import MicrobatchCosts
from penstock.schedule.memory import TeacherOutputs
from penstock.schedule.table import Table
from penstock.timing.costs import Costs


def comparable_order(order: object) -> str | tuple[int, ...]:
    """Return an order as ranks compare it: indices as ints, anything else as text."""
    if isinstance(order, Sequence) and not isinstance(order, str) and all(map(is_whole_number, order)):
        return tuple(map(int, order))
    return order if isinstance(order, str) else repr(order)


def microbatch_order(
    order: object,
    inputs: Sequence[Shape],
    table_of: Callable[[int], Table],
    costs: MicrobatchCosts | None = None,
    limit: Limit = None,
    table_with_teacher_of: Callable[[int], Table] | None = None,
) -> list[int]:
    """Return the order to run in: position in the step -> index in the list.

    `table_of(microbatches)`: the table that will run. `table_with_teacher_of`: the same with a teacher's forwards; a limit in
    bytes counts their outputs. Without `costs`, the elements of a microbatch stand for its cost. Raises MismatchError for an
    invalid order, and for one that has more than `limit` in flight on a rank.
    """
    size_limit = MicrobatchLimit(limit, costs and costs.activation_bytes)
    shapes = [(entry.rows or 1, entry.elements / (entry.rows or 1)) for entry in inputs]
    sizes = [size_limit.size(*shape) for shape in shapes]
    outputs = None
    if table_with_teacher_of is not None and size_limit.is_in_bytes and costs is not None:
        of_teacher = [costs.teacher_output_bytes(*shape) for shape in shapes]
        outputs = TeacherOutputs(table_with_teacher_of(len(inputs)), of_teacher)
    indices: Sequence[int] | str = comparable_order(order)
    if order == "given":
        indices = range(len(inputs))
    elif order == "planned":
        from penstock.plan.microbatch_order import plan_order  # imports numpy, which no other step needs

        factors = [costs(*shape) if costs else float(entry.elements) for shape, entry in zip(shapes, inputs, strict=True)]
        stage_costs = costs.step_costs(shapes) if costs else Costs()
        max_size = None if limit is None else size_limit.max_size
        in_seconds = costs is not None
        indices = plan_order(factors, table_of(len(inputs)), stage_costs, sizes, max_size, in_seconds, outputs)
    if isinstance(indices, str) or sorted(indices) != list(range(len(inputs))):
        shown = list(order) if isinstance(order, tuple) else order
        raise MismatchError(
            f"order={shown!r} is no order of {len(inputs)} microbatches: give 'given', 'planned', or each index from 0 to "
            f"{len(inputs) - 1} once"
        )
    if limit is not None:
        if outputs is not None:
            outputs = outputs._replace(sizes=[outputs.sizes[index] for index in indices])
        _check_limit([sizes[index] for index in indices], table_of(len(inputs)), order, size_limit, outputs)
    return list(indices)


def _check_limit(
    sizes: Sequence[float], table: Table, order: object, limit: MicrobatchLimit, teacher_outputs: TeacherOutputs | None
) -> None:
    """Raise MismatchError where microbatches of these `sizes`, in the order they run, have more than `limit` in flight."""
    from penstock.plan.microbatch_order import peak_in_flight  # imports numpy, which no other step needs

    peaks = peak_in_flight(sizes, table, teacher_outputs)
    if max(peaks) > limit.max_size:
        hint = "no order was found that has less" if order == "planned" else "order='planned' looks for one that has less"
        raise MismatchError(
            f"order={order!r} has up to {limit.size_text(max(peaks))} in flight on rank {peaks.index(max(peaks))}, more than "
            f"the limit of {limit.size_text(limit.max_size)}: {hint}. Make smaller microbatches, take a schedule with fewer in "
            "flight, or give a higher limit"
        )
