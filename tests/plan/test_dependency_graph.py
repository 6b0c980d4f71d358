"""The graph of a table has what the simulator's rule has."""

from hypothesis import given
from random_tables import named_tables, valid_tables

from penstock.plan.dependency_graph import dependency_graph
from penstock.schedule import Schedule, simulate


@given(named_tables() | valid_tables())
def test_a_node_has_the_node_before_it_on_its_rank_and_those_that_send_to_it_all_earlier(table: Schedule) -> None:
    timeline, nodes = simulate(table), dependency_graph(table)
    actions = {number: {event.action for event in node.cell} for number, node in enumerate(nodes, 1)}
    rows: list[list[object]] = [[] for _ in timeline.rows]

    for number, node in enumerate(nodes, 1):
        rank, inputs = node.cell[0].rank, {action for earlier in node.inputs for action in actions[earlier]}
        assert max(node.previous, *node.inputs, 0) < number
        assert (nodes[node.previous - 1].cell if node.previous else None) == (rows[rank][-1] if rows[rank] else None)
        rows[rank].append(node.cell)
        needed = [need for event in node.cell for need in timeline.needed_events(event)]
        assert inputs >= {need.action for need in needed if need.rank != rank}
        assert len(node.inputs) == len([need for need in needed if need.rank != rank])
    assert rows == [list(timeline.cells(rank)) for rank in range(table.ranks)]
