"""Lab 21: rows have lengths: as they arrive, sorted, planned.

Sentences are short and long. A microbatch is a rectangle: its rows are padded to the longest, and padding costs as much as
tokens. The grouping of rows into microbatches decides how much is padded. The order of the microbatches decides how long the
pipeline takes to fill and to drain. Sorted rows need little padding, but a slow order.

    penstock lab 21
    python -m penstock.learn.labs.lab21_lengths

Try: SIGMA = 0.3, rows of similar lengths. Which still saves time, planned groups or a planned order?
"""

import random
from collections.abc import Sequence
from itertools import permutations
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import penstock as ps
from penstock import schedule
from penstock.learn.lab_helpers import check, drawing, percent, say
from penstock.plan.microbatch_order import plan_order
from penstock.schedule import Costs, Timeline

RANKS, ROWS, MICROBATCHES, DRAWS = 4, 64, 16, 12
SIGMA = 1.0  # of the logarithm of the lengths; their median is 148
SIX_COSTS = [4, 1, 2, 1, 1, 2]  # of microbatches
WORDS, IGNORED_TOKEN = 50, -100
Groups = Sequence[Sequence[int]]
METHODS = ("padded to the longest", "fours as they arrive", "the same, planned order", "sorted, in fours", "planned groups")


def main() -> None:
    """Find the best order of six microbatches; time five ways to run 64 rows; compare the loss of two groupings."""
    say(f"Lab 21: {ROWS} rows in {MICROBATCHES} microbatches on {RANKS} ranks\n")
    check_planned_order()
    ratios = compare_methods()
    compare_losses()
    say(
        f"\nMeasured: in the mean over {DRAWS} draws fours as they arrive take {ratios['fours as they arrive']:.1f} times as "
        f"long as planned groups, and with all padded to the longest {ratios['padded to the longest']:.1f} times as long."
    )


def check_planned_order() -> None:
    """Simulate all orders of six microbatches, and check that the planned order is the fastest."""
    orders = {order: simulate_step(order).makespan for order in sorted(set(permutations(SIX_COSTS)))}
    arrival, rising = simulate_step(SIX_COSTS), simulate_step(sorted(SIX_COSTS))
    falling = simulate_step(sorted(SIX_COSTS, reverse=True))
    planned = simulate_step([SIX_COSTS[index] for index in plan_order(SIX_COSTS, build_table(len(SIX_COSTS)))])
    say(f"Six microbatches that cost {SIX_COSTS}, as they arrive: {arrival.makespan:g}\n{drawing(arrival)}\n")
    say(f"planned: {planned.makespan:g}. Cheap ones run first and last:\n{drawing(planned)}\n")
    say(f"sorted: {rising.makespan:g} with the most expensive one last, {falling.makespan:g} with it first")
    best = min(orders.values())
    check(
        planned.makespan == best < arrival.makespan,
        f"none of the {len(orders)} different orders takes less than {best:g}",
        f"the planned order takes {planned.makespan:g}, the best of all {best:g}, the arrival order {arrival.makespan:g}",
    )


def compare_methods() -> dict[str, float]:
    """Simulate each method for several draws of lengths. Returns the method's time, if that of planned groups is 1."""
    draws = [draw_lengths(seed) for seed in range(DRAWS)]
    timelines_by_draw = [{method: simulate_step(microbatch_tokens(lengths, method)) for method in METHODS} for lengths in draws]
    say(
        f"\n{DRAWS} draws of lognormal lengths, sigma {SIGMA:g}; the first has {min(draws[0])} to {max(draws[0])} tokens a row."
    )
    say(f"  {'':26}padding   bubble   time (planned groups: 1)")
    time_ratios = {
        method: fmean(timelines[method].makespan / timelines["planned groups"].makespan for timelines in timelines_by_draw)
        for method in METHODS
    }
    for method in METHODS:
        padding = fmean(1 - sum(lengths) / sum(microbatch_tokens(lengths, method)) for lengths in draws)
        bubble = fmean(timelines[method].bubble for timelines in timelines_by_draw)
        say(f"  {method:24}{percent(padding):>9} {percent(bubble):>8}   {time_ratios[method]:.2f}")
    check(
        all(
            timelines["planned groups"].makespan < min(timelines[method].makespan for method in METHODS[:-1])
            for timelines in timelines_by_draw
        ),
        "planned groups are the fastest of the five in every draw",
        f"planned groups should be the fastest in every draw; the times, if theirs is 1, are {time_ratios}",
    )
    return time_ratios


def draw_lengths(seed: int) -> list[int]:
    """Return the tokens of each row, in the order in which rows arrive."""
    rng = random.Random(seed)
    return [max(1, int(rng.lognormvariate(5, SIGMA))) for _ in range(ROWS)]


def microbatch_tokens(lengths: Sequence[int], method: str) -> list[int]:
    """Return the padded tokens of each microbatch, in the order in which they run."""
    arrival, size = list(range(len(lengths))), len(lengths) // MICROBATCHES
    if method == "planned groups":
        return padded_tokens(lengths, ps.plan.group_rows(lengths, MICROBATCHES))
    rows = sorted(arrival, key=lambda row: lengths[row]) if method.startswith("sorted") else arrival
    costs = padded_tokens(lengths, [rows[start : start + size] for start in range(0, len(rows), size)])
    if method == "the same, planned order":
        return [costs[index] for index in plan_order(costs, build_table(MICROBATCHES))]
    return [size * max(lengths)] * MICROBATCHES if method == "padded to the longest" else costs


def padded_tokens(lengths: Sequence[int], groups: Groups) -> list[int]:
    """Return the tokens of each group with padding: its rows times its longest."""
    return [len(group) * max(lengths[row] for row in group) for group in groups]


def build_table(microbatches: int) -> schedule.Schedule:
    """Build the table of 1F1B."""
    return schedule.build("1f1b", ranks=RANKS, microbatches=microbatches)


def simulate_step(costs: Sequence[float]) -> Timeline:
    """Simulate a step in which a forward takes its microbatch's cost, and a backward twice as long."""
    return schedule.simulate(build_table(len(costs)), Costs(microbatch_factors=list(costs)))


def compare_losses() -> None:
    """Compare the losses of two groupings of twelve rows: weighted by tokens, and as a mean of means."""
    lengths = [2, 30, 3, 28, 4, 25, 2, 31, 5, 24, 3, 29]
    groupings: list[Groups] = [[range(start, start + 4) for start in (0, 4, 8)], ps.plan.group_rows(lengths, 3)]
    weighted, means = zip(*(step_losses(lengths, groups) for groups in groupings), strict=True)
    weighted_error, means_error = (abs(arrival - planned) for arrival, planned in (weighted, means))
    say(f"\nThe loss of {len(lengths)} rows as they arrive and in planned groups:")
    say(f"  weighted by tokens that count: {weighted[0]:.5f} and {weighted[1]:.5f}")
    say(f"  the mean of means:             {means[0]:.5f} and {means[1]:.5f}")
    check(
        weighted_error < 1e-5 < means_error,
        "weighted by tokens it is the batch's loss for any groups; the mean of means depends on the groups",
        f"the groups change the loss by {weighted_error:.1g}, and the mean of means by {means_error:.1g}",
    )


def step_losses(lengths: Sequence[int], groups: Groups) -> tuple[float, float]:
    """Run a step over these groups in one process. Returns its loss, and the mean of its microbatches' losses."""
    torch.manual_seed(0)  # weights and words are the same in every call
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
    rows = [torch.randint(WORDS, (length,)) for length in lengths]
    pipe = ps.Pipeline([model], token_loss, "1f1b", len(groups), loss_weight=ps.tokens())
    inputs = [pad_sequence([rows[row] for row in group], batch_first=True) for group in groups]
    targets = [pad_sequence([rows[row] for row in group], batch_first=True, padding_value=IGNORED_TOKEN) for group in groups]
    losses: list[Tensor] = []
    loss = pipe.step_microbatches(inputs, targets, order="planned", losses=losses)
    return loss.item(), fmean(map(float, losses))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy over a microbatch's tokens that are not padding."""
    return cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED_TOKEN)


if __name__ == "__main__":
    main()
