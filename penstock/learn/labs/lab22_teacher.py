"""Lab 22: a second model in the idle time.

Distillation compares a model's outputs with those of a larger one, the teacher, which is not trained: it has forwards only. As
a pipeline of its own before each step it takes M + P - 1 forwards more. But the ranks of the step idle for 3 (P - 1) units,
and M = 8 forwards of the teacher take 8. You place them by hand, those of the next batch, which nothing in this step waits for.

    penstock lab 22
    torchrun --nproc-per-node 4 -m penstock.learn.labs.lab22_teacher

Try: change `in_the_gaps`. Which single forwards shorten the step if they run later, or between two actions of the last rank?
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock import schedule
from penstock.learn.lab_helpers import check, drawing, on_ranks, say
from penstock.schedule import Schedule, simulate, verify, with_teacher

RANKS, MICROBATCHES = 4, 8
DIM, ROWS, STEPS = 8, 16, 3
MARK = f"{RANKS}TEACHER_AHEAD"  # the teacher's first stage is stage P, and its forwards are of the next batch
Places = Callable[[int], Sequence[int]]  # of a rank: before its how many-th action each microbatch's forward runs, from 0


class Trained(NamedTuple):
    """What training has made on one rank: the losses, and the weights of its stage by name."""

    losses: list[float]
    weights: dict[str, Tensor]


def main() -> None:
    """Place the teacher's forwards in three ways, compare the fastest with `with_teacher`, and train with it."""
    say(
        f"Lab 22: a second model on {RANKS} ranks, {MICROBATCHES} microbatches; F = 1, B = 2, a teacher as large as the model\n"
    )
    alone = simulate(one_f_one_b()).makespan
    forwards = MICROBATCHES + RANKS - 1
    say(f"1F1B alone takes {alone:g}, the teacher as a pipeline of its own {forwards:g}, both together {alone + forwards:g}.")
    say(f"{drawing(simulate(one_f_one_b()))}\n")

    tables = {name: place(name, places) for name, places in PLACEMENTS.items()}
    times = {name: simulate(table).makespan for name, table in tables.items()}
    for name, table in tables.items():
        say(f"The teacher's forwards {name}: {times[name]:g}\n{drawing(simulate(table))}\n")
    best = min(tables, key=lambda name: times[name])
    check(
        best == "in the gaps" and times[best] < alone + forwards,
        f"in the gaps they make the step {times[best] - alone:g} longer, not {forwards:g}",
        f"in the gaps should be the fastest of {times}, and less than {alone + forwards:g}",
    )
    compare_with_rule(times[best], alone)
    check_training(tables[best])
    say(
        f"\nMeasured: a step with a teacher takes {times[best] / alone:.2f} of the model's own instead of "
        f"{(alone + forwards) / alone:.2f}, and {STEPS} steps of distillation have the losses and weights of one process."
    )


def at_the_start(rank: int) -> list[int]:
    """Place all forwards of the teacher before the rank's own actions."""
    return [0] * MICROBATCHES


def at_the_end(rank: int) -> list[int]:
    """Place all forwards of the teacher behind the rank's own actions."""
    return [2 * MICROBATCHES] * MICROBATCHES


def in_the_gaps(rank: int) -> list[int]:
    """Place as many as there is time for where the rank waits for its first gradient, and the others at the end."""
    warmup = RANKS - rank  # forwards before the first backward
    fitting = min(3 * (RANKS - 1 - rank), MICROBATCHES)  # the first gradient comes from the last rank: F and B of each between
    return [warmup] * fitting + [2 * MICROBATCHES] * (MICROBATCHES - fitting)


PLACEMENTS: dict[str, Places] = {"at the start": at_the_start, "at the end": at_the_end, "in the gaps": in_the_gaps}


def one_f_one_b() -> Schedule:
    """Build the table of 1F1B."""
    return schedule.build("1f1b", ranks=RANKS, microbatches=MICROBATCHES)


def place(name: str, places: Places) -> Schedule:
    """Return 1F1B's table with the teacher's forwards at these places. Raises ScheduleError if it deadlocks."""
    rows = []
    for rank, own_actions in enumerate(one_f_one_b().csv_rows()):
        row = [MARK] if rank == 0 else []
        for number in range(len(own_actions) + 1):
            row += [f"{RANKS + rank}F{m}" for m, at in enumerate(places(rank)) if at == number]
            row += own_actions[number : number + 1]
        rows.append(row)
    table = schedule.from_rows(name, rows)
    verify(table)
    return table


def compare_with_rule(time: float, alone: float) -> None:
    """Compare the time of the table by hand with that of `with_teacher`'s."""
    table = with_teacher(one_f_one_b())
    by_rule = simulate(table).makespan
    say(
        f"\n`with_teacher` takes {by_rule:g}. It also moves the model's actions, and runs some backwards in halves (I, then W):"
    )
    say(f"{drawing(simulate(table))}")
    check(
        alone <= by_rule < alone + MICROBATCHES + RANKS - 1,
        f"by hand it takes {time:g}, by the rule {by_rule:g}, without a teacher {alone:g}",
        f"the rule should take less than one after the other: it takes {by_rule:g}",
    )


def check_training(table: Schedule) -> None:
    """Train with `table` on all ranks, and check losses and weights against one process."""
    trained, (losses, weights) = on_ranks(train, RANKS, table), train_in_one_process()
    merged = {name: weight for rank in trained for name, weight in rank.weights.items()}
    different = [name for name, weight in weights.items() if not torch.equal(merged[name], weight)]
    check(
        all(rank.losses == losses for rank in trained) and not different,
        f"{STEPS} steps of distillation with this table: losses {losses[0]:.4f} to {losses[-1]:.4f}, "
        "bit by bit those of one process",
        f"losses are {trained[0].losses}, in one process {losses}; weights that differ: {different}",
    )


def train(table: Schedule) -> Trained:
    """Train on this rank: each step runs the teacher's forwards of the next batch in its idle time."""
    student, teacher = models()
    pipe = ps.Pipeline(student, distillation_loss, table, MICROBATCHES, teacher=teacher)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses, all_batches = [], batches()
    for number, (inputs, target) in enumerate(all_batches):
        next_args = tuple(inputs for inputs, _ in all_batches[number + 1 : number + 2])
        losses.append(pipe.step(inputs, target=target, next_args=next_args).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, {name: parameter.detach() for name, parameter in pipe.named_parameters()})


def train_in_one_process() -> Trained:
    """Train the same model without a pipeline: the teacher before each loss, gradients summed over the microbatches."""
    student, teacher = models()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    losses = []
    for inputs, target in batches():
        total = torch.zeros(())
        for part, part_target in zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            with torch.no_grad():
                taught = teacher(part)
            loss = distillation_loss(student(part), part_target, taught)
            loss.backward(torch.full_like(loss, 1 / MICROBATCHES))
            total += loss.detach() / MICROBATCHES
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, {name: parameter.detach() for name, parameter in student.named_parameters()})


def models() -> tuple[nn.Sequential, nn.Sequential]:
    """Return a model of one layer for each rank, and a teacher, which is not trained."""
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(RANKS)]) for _ in range(2))
    return student, teacher


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and targets of each step."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, ROWS, DIM, generator=generator)) for _ in range(STEPS)]


def distillation_loss(output: Tensor, target: Tensor, teacher_output: Tensor) -> Tensor:
    """Return the distance to the target and to the teacher's output."""
    return mse_loss(output, target) + mse_loss(output, teacher_output)


if __name__ == "__main__":
    main()
