"""Lab 6: the same bubble with less memory, and a new way to stop for ever.

GPipe keeps the activations of all M microbatches until the first backward. 1F1B lets a microbatch go back as soon as it
can: one forward, one backward. The bubble is the same, but rank r keeps at most P-r microbatches in flight. What autograd
really keeps is counted here, tensor by tensor. The price: neighbours now send to each other at the same time, and with
sends that block, that is the mistake of lab 3 again.

    penstock lab 6
    python -m penstock.learn.labs.lab6_1f1b
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab6_1f1b

Try: twice the MICROBATCHES. Which of the two peaks grows?
"""

from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.learn.devices import DIM, EmulatedLayer, fastest_step
from penstock.learn.lab_helpers import best_of, check, check_time, drawing, on_ranks, percent, ranks_here, say, split_deadlock
from penstock.schedule import Timeline

RANKS, MICROBATCHES = 4, 8
FORWARD, BACKWARD = 0.005, 0.010  # seconds of one microbatch on one rank
TOLERANCE = 0.12  # of the step


def main() -> None:
    """Both schedules measured side by side, then both under sends that block."""
    ranks = ranks_here(RANKS)
    say(f"Lab 6: 1F1B against GPipe, {ranks} ranks, {MICROBATCHES} microbatches\n")
    bubbles, peaks = {}, {}
    for name in ("gpipe", "1f1b"):
        timeline, peaks[name] = measured(name, ranks)
        bubbles[name] = timeline.bubble
        say(f"{name}, measured: {1e3 * timeline.makespan:.0f} ms, bubble {percent(timeline.bubble)}\n{drawing(timeline)}")
        say(f"  most microbatches in flight, rank by rank: {peaks[name]} counted, {timeline.peak_in_flight} by the table")
        check(
            peaks[name] == timeline.peak_in_flight,
            "autograd keeps what the table says, and nothing longer",
            f"{name} kept {peaks[name]} microbatches on its ranks, the table says {timeline.peak_in_flight}",
        )
    check_time(
        abs(bubbles["gpipe"] - bubbles["1f1b"]) < TOLERANCE,
        "the bubbles are about the same",
        f"the bubbles differ: gpipe {percent(bubbles['gpipe'])}, 1f1b {percent(bubbles['1f1b'])}; "
        "a very busy machine? run it again",
    )

    say("\nWith sends that block until they are received, as in lab 3:")
    say(f"  {ps.schedule.verify(build('gpipe', ranks), sends='blocking')}")
    circle = blocking_circle(ranks)
    say(f"  {split_deadlock(circle)}")
    check(bool(circle), "1f1b deadlocks, gpipe does not", "1f1b was proved with blocking sends, which it must not be")
    say("Penstock does not wait for its sends, and posts receives ahead:")
    say(f"  {ps.schedule.verify(build('1f1b', ranks))}")
    max_peaks = {name: max(rank_peaks) for name, rank_peaks in peaks.items()}
    say(
        f"\nMeasured: gpipe keeps {max_peaks['gpipe']} microbatches in flight at a bubble of {percent(bubbles['gpipe'])}, "
        f"1f1b {max_peaks['1f1b']} at {percent(bubbles['1f1b'])}; "
        f"on the last rank it is {peaks['gpipe'][-1]} against {peaks['1f1b'][-1]}."
    )


def measured(name: str, ranks: int) -> tuple[Timeline, tuple[int, ...]]:
    """A step of schedule `name`, and the most microbatches that autograd kept, rank by rank."""
    plan = ps.schedule.simulate(build(name, ranks)).bubble
    results = best_of(
        lambda: on_ranks(watched_step, ranks, name),
        lambda results: abs(results[0][0].bubble - plan),
        good_enough=TOLERANCE / 2,
    )
    return results[0][0], tuple(peak for _, peak in results)


def build(name: str, ranks: int) -> ps.schedule.Schedule:
    """The table of schedule `name`."""
    return ps.schedule.build(name, ranks=ranks, microbatches=MICROBATCHES)


def blocking_circle(ranks: int) -> str:
    """Return how 1F1B stops when sends block: which rank waits for which. Empty if it does not stop."""
    try:
        ps.schedule.verify(build("1f1b", ranks), sends="blocking")
    except ps.ScheduleError as error:
        return str(error)
    return ""


def watched_step(name: str) -> tuple[Timeline, int]:
    """The timeline of a step, measured, and the most microbatches autograd kept on this rank at once."""
    topology = ps.comms.init_distributed(backend="gloo")
    stages = [ActivationCounter(EmulatedLayer(DIM, FORWARD, BACKWARD)) for _ in range(topology.world_size)]
    timeline = fastest_step(ps.Pipeline(stages, mse_loss, schedule=name, microbatches=MICROBATCHES))
    return timeline, stages[topology.rank].peak


class ActivationCounter(nn.Module):
    """A layer that counts the activations autograd keeps for its backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.alive = self.peak = 0

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, dim) -> the same."""
        with saved_tensors_hooks(partial(Kept, self), lambda kept: kept.tensor):
            return self.layer(hidden)

    def count(self, change: int) -> None:
        """One activation more, or one less."""
        self.alive += change
        self.peak = max(self.peak, self.alive)


class Kept:
    """What the autograd graph holds in place of a saved tensor: gone when the graph lets it go."""

    def __init__(self, watched: ActivationCounter, tensor: Tensor) -> None:
        self.watched, self.tensor = watched, tensor
        self.activations = 0 if isinstance(tensor, nn.Parameter) else 1  # the layer also saves its weight
        watched.count(self.activations)

    def __del__(self) -> None:
        self.watched.count(-self.activations)


if __name__ == "__main__":
    main()
