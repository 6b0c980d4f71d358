"""Lab 21: rows have lengths: as they arrive, sorted, planned.

Sentences are short and long. A microbatch is a rectangle, so each of its rows is padded to its longest, and padding costs what
tokens cost. Which rows share a microbatch decides how much is padded. In which order microbatches run decides how long the
pipeline takes to fill and to drain. Sorting does well in the one and badly in the other.

    penstock lab 21
    python -m penstock.learn.labs.lab21_lengths

Try: SIGMA = 0.3, rows that are nearly alike. Which of the two plans is still worth something?
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
from penstock.schedule import Costs, Timeline
from penstock.schedule.microbatch_order import plan_order

RANKS, ROWS, MICROBATCHES, DRAWS = 4, 64, 16, 12
SIGMA = 1.0  # of the logarithm of the lengths; their median is 148
FEW = [4, 1, 2, 1, 1, 2]  # costs of six microbatches
WORDS, IGNORED = 50, -100
Groups = Sequence[Sequence[int]]
WAYS = ("padded to the longest", "fours as they arrive", "the same, planned order", "sorted, in fours", "planned groups")


def main() -> None:
    """The best order of six microbatches; five ways to run 64 rows; and the loss, which is the same for all of them."""
    say(f"Lab 21: {ROWS} rows in {MICROBATCHES} microbatches on {RANKS} ranks\n")
    order_of_few()
    ratios = five_ways()
    one_loss()
    say(
        f"\nMeasured: in the mean over {DRAWS} draws planned groups take {percent(ratios['fours as they arrive'])} of the time "
        f"of fours as they arrive, and {percent(ratios['padded to the longest'])} of that of padding all to the longest."
    )


def order_of_few() -> None:
    """All orders of six microbatches, timed."""
    orders = {order: step(order).makespan for order in sorted(set(permutations(FEW)))}
    arrival, rising, falling = step(FEW), step(sorted(FEW)), step(sorted(FEW, reverse=True))
    planned = step([FEW[index] for index in plan_order(FEW, table(len(FEW)))])
    say(f"Six microbatches that cost {FEW}, as they arrive: {arrival.makespan:g}\n{drawing(arrival)}\n")
    say(f"planned: {planned.makespan:g}. Cheap ones run first and last:\n{drawing(planned)}\n")
    say(f"sorted: {rising.makespan:g} with the most expensive one last, {falling.makespan:g} with it first")
    best = min(orders.values())
    check(
        planned.makespan == best < arrival.makespan,
        f"none of the {len(orders)} different orders takes less than {best:g}",
        f"the planned order takes {planned.makespan:g}, the best of all {best:g}, the arrival order {arrival.makespan:g}",
    )


def five_ways() -> dict[str, float]:
    """Time each way on several draws of lengths. Return, by way, the time of planned groups as a share of its own."""
    draws = [lengths_of_rows(seed) for seed in range(DRAWS)]
    steps = [{way: step(tokens(lengths, way)) for way in WAYS} for lengths in draws]
    say(
        f"\n{DRAWS} draws of lognormal lengths, sigma {SIGMA:g}; the first has {min(draws[0])} to {max(draws[0])} tokens a row."
    )
    say(f"  {'':26}padding   bubble   time of planned groups / its time")
    shares = {way: fmean(ways["planned groups"].makespan / ways[way].makespan for ways in steps) for way in WAYS}
    for way in WAYS:
        padding = fmean(1 - sum(lengths) / sum(tokens(lengths, way)) for lengths in draws)
        bubble = fmean(ways[way].bubble for ways in steps)
        say(f"  {way:24}{percent(padding):>9} {percent(bubble):>8}   {shares[way]:.2f}")
    check(
        all(ways["planned groups"].makespan < min(ways[way].makespan for way in WAYS[:-1]) for ways in steps),
        "planned groups are the fastest of the five in every draw",
        f"planned groups should be the fastest in every draw; as shares of the others' times they take {shares}",
    )
    return shares


def lengths_of_rows(seed: int) -> list[int]:
    """Tokens of each row, as they arrive."""
    rng = random.Random(seed)
    return [max(1, int(rng.lognormvariate(5, SIGMA))) for _ in range(ROWS)]


def tokens(lengths: Sequence[int], way: str) -> list[int]:
    """Return the padded tokens of each microbatch, in the order in which they run."""
    arrival, size = list(range(len(lengths))), len(lengths) // MICROBATCHES
    if way == "planned groups":
        return padded(lengths, ps.plan.group_rows(lengths, MICROBATCHES))
    rows = sorted(arrival, key=lambda row: lengths[row]) if way.startswith("sorted") else arrival
    costs = padded(lengths, [rows[start : start + size] for start in range(0, len(rows), size)])
    if way == "the same, planned order":
        return [costs[index] for index in plan_order(costs, table(MICROBATCHES))]
    return [size * max(lengths)] * MICROBATCHES if way == "padded to the longest" else costs


def padded(lengths: Sequence[int], groups: Groups) -> list[int]:
    """Return rows x longest of each group."""
    return [len(group) * max(lengths[row] for row in group) for group in groups]


def table(microbatches: int) -> schedule.Schedule:
    """1F1B."""
    return schedule.build("1f1b", ranks=RANKS, microbatches=microbatches)


def step(costs: Sequence[float]) -> Timeline:
    """A step in which a forward takes as long as its microbatch costs, and a backward twice as long."""
    return schedule.simulate(table(len(costs)), Costs(microbatch_factors=list(costs)))


def one_loss() -> None:
    """The loss of twelve rows, grouped in two ways: weighted by tokens, and the mean of the microbatches' means."""
    lengths = [2, 30, 3, 28, 4, 25, 2, 31, 5, 24, 3, 29]
    groupings: list[Groups] = [[range(start, start + 4) for start in (0, 4, 8)], ps.plan.group_rows(lengths, 3)]
    weighted, means = zip(*(loss_of(lengths, groups) for groups in groupings), strict=True)
    off, off_means = (abs(one - other) for one, other in (weighted, means))
    say(f"\nThe loss of {len(lengths)} rows as they arrive and in planned groups:")
    say(f"  weighted by tokens that count: {weighted[0]:.5f} and {weighted[1]:.5f}")
    say(f"  the mean of means:             {means[0]:.5f} and {means[1]:.5f}")
    check(
        off < 1e-5 < off_means,
        "weighted by tokens it is the batch's, however rows are grouped; the mean of means is another for other groups",
        f"the groups change the loss by {off:.1g}, and the mean of means by {off_means:.1g}",
    )


def loss_of(lengths: Sequence[int], groups: Groups) -> tuple[float, float]:
    """Run a step over these groups in one process. Return its loss and the mean of its microbatches' losses."""
    torch.manual_seed(0)  # weights and words are the same in every call
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
    rows = [torch.randint(WORDS, (length,)) for length in lengths]
    pipe = ps.Pipeline([model], token_loss, "1f1b", len(groups), loss_weight=ps.tokens())
    inputs = [pad_sequence([rows[row] for row in group], batch_first=True) for group in groups]
    targets = [pad_sequence([rows[row] for row in group], batch_first=True, padding_value=IGNORED) for group in groups]
    losses: list[Tensor] = []
    loss = pipe.step_microbatches(inputs, targets, order="planned", losses=losses)
    return loss.item(), fmean(map(float, losses))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over a microbatch's tokens that count."""
    return cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


if __name__ == "__main__":
    main()
