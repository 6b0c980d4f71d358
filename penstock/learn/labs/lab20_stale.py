"""Lab 20: a pipeline that never drains, and what stale weights cost.

The schedules of the earlier labs fill and drain once a batch, because the optimizer waits for all gradients. So their numbers
are those of one process. An asynchronous pipeline (PipeDream) does not wait: each stage takes an optimizer step after every
microbatch, and no rank idles. The price: other microbatches change the weights between a microbatch's forward and backward, so
its gradient belongs to older weights. How much older? What does that cost, and what else would change?

    penstock lab 20
    python -m penstock.learn.labs.lab20_stale

Try: twice the BATCHES. How much more time does the pipeline save that never drains?
"""

import math
from collections import deque

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import schedule
from penstock.learn.lab_helpers import check, drawing, percent, say
from penstock.schedule import Schedule

RANKS, MICROBATCHES, BATCHES = 4, 4, 3
DIM, ROWS, UPDATES = 16, 32, 120
RATES = (0.05, 0.2, 0.8, 3.2)  # learning rates to try


def main() -> None:
    """Compute the time saved, the age of gradients and the largest learning rate for it; then train with stale gradients."""
    say(f"Lab 20: {RANKS} stages that never drain\n")
    draining, endless = draining_schedule(), endless_schedule()
    times = [schedule.simulate(table).makespan for table in (draining, endless)]
    say(f"{BATCHES} batches of {MICROBATCHES} microbatches, drained after each: {times[0]:g} units of time (F = 1, B = 2)")
    say(f"{drawing(schedule.simulate(draining))}\n\nand never drained: {times[1]:g}\n{drawing(schedule.simulate(endless))}")
    count = BATCHES * MICROBATCHES
    check(
        times == [3 * (count + BATCHES * (RANKS - 1)), 3 * (count + RANKS - 1)],
        f"filled and drained once instead of {BATCHES} times, it saves {percent(1 - times[1] / times[0])} of the time",
        f"they should take {3 * (count + BATCHES * (RANKS - 1))} and {3 * (count + RANKS - 1)} units, they take {times}",
    )
    ages = [staleness(endless, stage) for stage in range(RANKS)]
    say(f"\nOptimizer steps of a stage between a microbatch's forward and its backward, stage by stage: {ages}")
    check(
        ages == [RANKS - 1 - stage for stage in range(RANKS)],
        "stage s computes with weights that are P-1-s steps old, and must keep P-s versions of them",
        f"stage s should be P-1-s steps behind, the table says {ages}",
    )
    check_rate_limits()
    best = compare_training()
    say(ASYNCHRONOUS_CHANGES)
    say(
        f"\nMeasured: without draining {BATCHES} batches take {times[1]:g} units instead of {times[0]:g}; after {UPDATES} "
        f"updates at the learning rate {best[0]:g} the loss is {best[2]:.2g} with stale gradients, {best[1]:.2g} without."
    )


ASYNCHRONOUS_CHANGES = """
What an asynchronous pipeline would change (Penstock has none, because it promises one process's numbers):
  the table     has no end: optimizer steps are actions in it, and no step includes all stages
  weights       stage s keeps P-s versions, or runs a backward with other weights than the forward's, which is no gradient
  numbers       depend on the schedule and on P; learning rates that work in one process may diverge
  clipping      by the norm of all gradients is impossible: they never exist at the same time
  checkpoints   hold another version of the weights for each stage
Schedules that fill the bubble with W (lab 8) save most of the same time, and keep the numbers."""


def draining_schedule() -> Schedule:
    """Return a table of 1F1B for BATCHES batches, each drained before the next begins."""
    batch_rows = rows_of_1f1b(MICROBATCHES)
    rows = [[text for number in range(BATCHES) for text in shift_microbatches(row, number)] for row in batch_rows]
    return schedule.from_rows("drained", rows)


def endless_schedule() -> Schedule:
    """Return the table of 1F1B for the microbatches of all batches, without draining."""
    return schedule.from_rows("endless", rows_of_1f1b(BATCHES * MICROBATCHES))


def rows_of_1f1b(microbatches: int) -> list[list[str]]:
    """Return the rows of 1F1B, as text."""
    return schedule.build("1f1b", ranks=RANKS, microbatches=microbatches).csv_rows()


def shift_microbatches(row: list[str], number: int) -> list[str]:
    """Return `row` with the microbatches of batch `number`."""
    return [f"{text[:2]}{int(text[2:]) + number * MICROBATCHES}" for text in row]


def staleness(table: Schedule, stage: int) -> int:
    """Return the most backwards of a stage between a forward and its backward; the optimizer steps once per backward."""
    row = [str(action)[1:] for action in table.actions[stage]]
    spans = [row[row.index(f"F{m}") : row.index(f"B{m}")] for m in range(table.microbatches)]
    return max(sum(text[0] == "B" for text in texts) for texts in spans)


def check_rate_limits() -> None:
    """Check the largest learning rate on a parabola, by the age of its gradients, by descents just below and above it."""
    say("\nOn a parabola of curvature 1 learning rates below 2 converge. With gradients that are d steps old, the limit is")
    say("2 sin(pi / (4 d + 2)):")
    correct = []
    for age in range(RANKS):
        limit = 2 * math.sin(math.pi / (4 * age + 2))
        converging, diverging = (distance_after_descent(rate * limit, age) for rate in (0.98, 1.02))
        correct.append(converging < 1 < diverging)
        distances = f"at 98 % of it {converging:.0e}, at 102 % {diverging:.0e}"
        say(f"  d = {age}   limit {limit:5.3f}   from 1, after 1000 steps: {distances}")
    check(
        all(correct), "just below it converges, just above it does not", f"of the ages 0 to {RANKS - 1} it held for {correct}"
    )


def distance_after_descent(rate: float, age: int) -> float:
    """Descend a parabola from 1 for 1000 steps with gradients `age` steps old. Returns the largest of the last distances."""
    positions = deque([1.0] * (age + 1), maxlen=max(age + 1, 20))
    for _ in range(1000):
        positions.append(positions[-1] - rate * positions[-1 - age])
    return max(map(abs, positions))


def compare_training() -> tuple[float, float, float]:
    """Train a model of one layer per stage with fresh and with stale gradients.

    Returns the learning rate at which fresh gradients do best, and the losses with fresh and stale gradients.
    """
    say(f"\nThe loss of a model with {RANKS} stages after {UPDATES} updates, by learning rate:")
    say("  rate         fresh      stale")
    losses = {rate: (train(rate, [0] * RANKS), train(rate, [RANKS - 1 - s for s in range(RANKS)])) for rate in RATES}
    for rate, (fresh, stale) in losses.items():
        say(f"  {rate:<8g} {fresh:9.4f} {stale:10.4f}")
    uncut_loss = train(RATES[0], None)
    check(
        losses[RATES[0]][0] == uncut_loss,
        "with gradients of age 0 the loss has the bits of plain training",
        f"with gradients of age 0 the loss is {losses[RATES[0]][0]}, with plain training {uncut_loss}",
    )
    rate = min(losses, key=lambda rate: losses[rate][0])
    return rate, *losses[rate]


def train(rate: float, ages: list[int] | None) -> float:
    """Train with gradients that are ages[s] updates old on stage s; without ages, plainly. Returns the last loss."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(RANKS)]
    model, data = nn.Sequential(*stages), torch.randn(ROWS, DIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    queues = [deque[list[Tensor | None]]() for _ in stages]
    for _ in range(UPDATES):
        mse_loss(model(data), data.sin()).backward()
        for stage, queue, age in zip(stages, queues, ages or [], strict=False):
            queue.append([parameter.grad for parameter in stage.parameters()])
            gradients = queue.popleft() if len(queue) > age else [None] * 2
            for parameter, gradient in zip(stage.parameters(), gradients, strict=True):
                parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return mse_loss(model(data), data.sin()).item()


if __name__ == "__main__":
    main()
