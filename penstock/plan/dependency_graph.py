"""The dependency graph of a table: what each of its actions waits for, in an order in which all can run.

A table is timed at many costs (`schedule_timer`), and in many orders of its microbatches (`microbatch_order`): in all of them
an action waits for the same others.
"""

from typing import NamedTuple

from penstock.schedule.table import Action, Kind, Table, dependencies, pause_garbage_collection
from penstock.timing.events import Event
from penstock.timing.simulate import simulate


class Node(NamedTuple):
    """An action or a pair, and the numbers of the nodes that it waits for. Nodes count from 1; 0 stands for none.

    What it needs from its own rank has ended with the node before it.
    """

    cell: tuple[Event, ...]  # its one or two actions, where every action takes 1
    previous: int  # the node before it on its rank
    inputs: list[int]  # the nodes of other ranks whose messages it needs


@pause_garbage_collection()
def dependency_graph(table: Table) -> list[Node]:
    """Return the nodes of `table`, each after those that it waits for. The model has no skips. Raises as `simulate`."""
    home, microbatches = table.placement, table.microbatches
    cells = list(simulate(table).all_cells())
    cells.sort(key=lambda cell: cell[0].start)  # every action takes 1: none starts before what it needs

    makers = {kind: [[0] * (microbatches * table.slices) for _ in home] for kind in Kind}  # stage -> number -> node
    makers[Kind.I] = makers[Kind.B]  # what waits for B waits for I as well

    def remote_inputs(kind: Kind, stage: int) -> list[list[int]]:
        """Return the lists that have the nodes of what a stage needs from other ranks."""
        needed = [action for action, *_ in dependencies(Action(kind, stage, 0), table.chains)]
        return [makers[action.kind][action.stage] for action in needed if home[action.stage] != home[stage]]

    inputs_by_kind = {kind: [remote_inputs(kind, stage) for stage in range(len(home))] for kind in Kind}
    nodes, last_nodes = list[Node](), [0] * table.ranks
    for number, cell in enumerate(cells, 1):
        inputs = []
        for _, (kind, stage, microbatch, slice_), *_ in cell:
            index = microbatch + slice_ * microbatches
            for numbers in inputs_by_kind[kind][stage]:
                inputs.append(numbers[index])
            makers[kind][stage][index] = number
        rank = cell[0].rank
        nodes.append(Node(cell, last_nodes[rank], inputs))
        last_nodes[rank] = number
    return nodes
