"""Lab 20: a pipeline that never drains, and what stale weights cost.

Every schedule of the labs before fills and drains once a batch, since the optimizer waits for all gradients: that is what
makes the numbers those of one process. An asynchronous pipeline (PipeDream) does not wait: each stage takes an optimizer step
after every microbatch, and no rank is ever idle. The price: a microbatch's backward comes back after others have changed the
weights, so its gradient is one of older weights. How much older? What does that cost, and what would it change?

    penstock lab 20
    python -m penstock.learn.labs.lab20_stale

Try: twice the BATCHES. Which of the two gains more time, and which loses more of it to its smaller learning rate?
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
    """The time that is won, how old the gradients are, which learning rates bear it, and a model that learns with it."""
    say(f"Lab 20: {RANKS} stages that never drain\n")
    drained, endless = in_turn(), without_end()
    times = [schedule.simulate(value).makespan for value in (drained, endless)]
    say(f"{BATCHES} batches of {MICROBATCHES} microbatches, drained after each: {times[0]:g} steps")
    say(f"{drawing(schedule.simulate(drained))}\n\nand never drained: {times[1]:g}\n{drawing(schedule.simulate(endless))}")
    count = BATCHES * MICROBATCHES
    check(
        times == [3 * (count + BATCHES * (RANKS - 1)), 3 * (count + RANKS - 1)],
        f"filled and drained once instead of {BATCHES} times: {percent(1 - times[1] / times[0])} of the time is won",
        f"they should take {3 * (count + BATCHES * (RANKS - 1))} and {3 * (count + RANKS - 1)} steps, they take {times}",
    )
    ages = [staleness(endless, stage) for stage in range(RANKS)]
    say(f"\nOptimizer steps of a stage between a microbatch's forward and its backward, stage by stage: {ages}")
    check(
        ages == [RANKS - 1 - stage for stage in range(RANKS)],
        "stage s works with weights that are P-1-s steps old, and must keep P-s versions of them",
        f"stage s should be P-1-s steps behind, the table says {ages}",
    )
    how_far_a_step_may_go()
    best = learn()
    say(WOULD_CHANGE)
    say(
        f"\nMeasured: without draining {BATCHES} batches take {times[1]:g} steps instead of {times[0]:g}; after {UPDATES} "
        f"updates at the learning rate {best[0]:g} the loss is {best[2]:.2g} with stale gradients, {best[1]:.2g} without."
    )


WOULD_CHANGE = """
What an asynchronous pipeline would change (Penstock has none, for its promise is one process's numbers):
  the table     has no end: optimizer steps are actions in it, and nothing is a step of the whole
  weights       P-s versions on stage s, or a backward by other weights than its forward's, which is no gradient at all
  numbers       depend on the schedule and on P; learning rates that worked in one process may diverge
  clipping      by the norm of all gradients has no moment at which there are all
  checkpoints   have a version of their own for each stage
Schedules that fill the bubble with W (lab 8) win most of the same time, and keep the numbers."""


def in_turn() -> Schedule:
    """1F1B for one batch after the other, each drained before the next begins."""
    rows = [[text for number in range(BATCHES) for text in shifted(row, number)] for row in one_batch(MICROBATCHES)]
    return schedule.from_rows("drained", rows)


def without_end() -> Schedule:
    """1F1B as if all were one batch."""
    return schedule.from_rows("endless", one_batch(BATCHES * MICROBATCHES))


def one_batch(microbatches: int) -> list[list[str]]:
    """The rows of 1F1B."""
    return schedule.build("1f1b", ranks=RANKS, microbatches=microbatches).csv_rows()


def shifted(row: list[str], number: int) -> list[str]:
    """The same row for a later batch."""
    return [f"{text[:2]}{int(text[2:]) + number * MICROBATCHES}" for text in row]


def staleness(table: Schedule, stage: int) -> int:
    """How many backwards of a stage, and so its steps, lie between a forward and its backward, at most."""
    row = [str(action)[1:] for action in table.actions[stage]]
    between = [row[row.index(f"F{m}") : row.index(f"B{m}")] for m in range(table.microbatches)]
    return max(sum(text[0] == "B" for text in texts) for texts in between)


def how_far_a_step_may_go() -> None:
    """The largest learning rate on a parabola, by the age of its gradients: by a formula, and tried."""
    say("\nOn a parabola of curvature 1 a learning rate up to 2 converges. With gradients that are d steps old it is up to")
    say("2 sin(pi / (4 d + 2)):")
    correct = []
    for age in range(RANKS):
        limit = 2 * math.sin(math.pi / (4 * age + 2))
        below, above = (rolled(rate * limit, age) for rate in (0.98, 1.02))
        correct.append(below < 1 < above)
        say(f"  d = {age}   up to {limit:5.3f}   from 1, after 1000 steps: at 98 % of it {below:.0e}, at 102 % {above:.0e}")
    check(
        all(correct), "just below it converges, just above it does not", f"of the ages 0 to {RANKS - 1} it held for {correct}"
    )


def rolled(rate: float, age: int) -> float:
    """How far from its lowest point a ball is that began at 1: the largest of the last positions after many steps."""
    positions = deque([1.0] * (age + 1), maxlen=max(age + 1, 20))
    for _ in range(1000):
        positions.append(positions[-1] - rate * positions[-1 - age])
    return max(map(abs, positions))


def learn() -> tuple[float, float, float]:
    """A model of a layer for each stage, trained with fresh gradients and with stale ones.

    Returns a learning rate at which the first does best, and both losses at it.
    """
    say(f"\nThe loss of a model with {RANKS} stages after {UPDATES} updates, by learning rate:")
    say("  rate         fresh      stale")
    losses = {rate: (trained(rate, [0] * RANKS), trained(rate, [RANKS - 1 - s for s in range(RANKS)])) for rate in RATES}
    for rate, (fresh, stale) in losses.items():
        say(f"  {rate:<8g} {fresh:9.4f} {stale:10.4f}")
    alone = trained(RATES[0], None)
    check(
        losses[RATES[0]][0] == alone,
        "at age 0 it is the training that everybody knows, to the bit",
        f"at age 0 the loss is {losses[RATES[0]][0]}, in one process {alone}",
    )
    rate = min(losses, key=lambda rate: losses[rate][0])
    return rate, *losses[rate]


def trained(rate: float, ages: list[int] | None) -> float:
    """The loss in the end; stage s has gradients that are ages[s] updates old. Without ages: plain steps."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(RANKS)]
    model, data = nn.Sequential(*stages), torch.randn(ROWS, DIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    queues = [deque[list[Tensor | None]]() for _ in stages]
    for _ in range(UPDATES):
        mse_loss(model(data), data.sin()).backward()
        for stage, queue, age in zip(stages, queues, ages or [], strict=False):
            queue.append([parameter.grad for parameter in stage.parameters()])
            arrived = queue.popleft() if len(queue) > age else [None] * 2
            for parameter, gradient in zip(stage.parameters(), arrived, strict=True):
                parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return mse_loss(model(data), data.sin()).item()


if __name__ == "__main__":
    main()
