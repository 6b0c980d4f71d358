"""A run's measured steps as what its layers cost: each takes of its stage's time the share that it took measured alone."""

from collections.abc import Sequence
from itertools import pairwise

from penstock.partition.balance import Balance
from penstock.plan.layers import Layer, Layers
from penstock.schedule import Kind, Measurement

FILE = "costs.json"  # its name in the folder of a run


def of_run(measured: Measurement, balance: Balance, parameters: Sequence[float], rows: int) -> Layers:
    """What the layers of `balance`, with so many bytes of `parameters` each, took in steps with microbatches of so many rows.

    The engine's time for an action is in its layers'; what messages took is not: that is `measured.send`.
    """
    layers = []
    times = measured.costs.table(measured.schedule.stages)
    sizes = measured.sizes or ((0.0, 0.0),) * measured.schedule.stages
    for stage, (start, end) in enumerate(pairwise((*balance.starts, len(balance.costs)))):
        for place in range(start, end):
            share = balance.costs[place] / balance.stages[stage] if balance.stages[stage] else 1 / (end - start)
            forward, full, inputs, weights = (share * times[kind][stage] for kind in Kind)
            activation, keep = (share * each for each in sizes[stage])
            layer = Layer(balance.names[place], forward, full - weights, weights, activation, keep, parameters[place])
            layers.append(layer._replace(split=max(0.0, inputs + weights - full)))
    return Layers.of(layers, rows)
