"""Simulate a table whose ranks have equal work, however many stages each of them has. No torch."""

from penstock.schedule import Costs, Schedule, Timeline, simulate


def simulate_equal_stages(
    table: Schedule, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0, send: float = 0.0
) -> Timeline:
    """Simulate `table`; F, I and W are the times of a microbatch on a whole rank, `send` that of a message.

    Each of a rank's V stages takes a V-th of them, and its activations count a V-th of a microbatch.
    """
    share = table.ranks / table.num_stages
    return simulate(table, Costs(share * forward, share * backward_input, share * backward_weight, send, act=share))
