"""Lab 6: the same bubble with less memory, and a new way to stop for ever.

GPipe keeps the activations of all M microbatches until the first backward. 1F1B starts the backward of a microbatch as soon as
it can: one forward, one backward. The bubble is the same, but rank r keeps at most P-r microbatches in flight. The lab counts
the tensors that autograd keeps. The price: neighbours now send to each other at the same time, which deadlocks if sends
block, as in lab 3.

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
TOLERANCE = 0.12  # of noise, as a share of the step


def main() -> None:
    """Measure time and memory of GPipe and 1F1B; then verify both with sends that block."""
    ranks = ranks_here(RANKS)
    say(f"Lab 6: 1F1B against GPipe, {ranks} ranks, {MICROBATCHES} microbatches\n")
    bubbles, peaks = {}, {}
    for name in ("gpipe", "1f1b"):
        timeline, peaks[name] = measure(name, ranks)
        bubbles[name] = timeline.bubble
        say(f"{name}, measured: {1e3 * timeline.makespan:.0f} ms, bubble {percent(timeline.bubble)}\n{drawing(timeline)}")
        say(f"  most microbatches in flight, rank by rank: {peaks[name]} counted, {timeline.peak_in_flight} by the table")
        check(
            peaks[name] == timeline.peak_in_flight,
            "autograd keeps what the table says, and nothing longer",
            f"{name} kept {peaks[name]} microbatches on its ranks, the table says {timeline.peak_in_flight}",
        )
    say("\nBy their tables the bubbles are equal. Measured they differ: a rank wakes up late, or another program has its core.")
    say(f"Such noise is different in every run. Up to {percent(TOLERANCE)} of a step is noise here, more would mean something.")
    check_time(
        abs(bubbles["gpipe"] - bubbles["1f1b"]) < TOLERANCE,
        "the bubbles are about the same",
        f"the bubbles differ: gpipe {percent(bubbles['gpipe'])}, 1f1b {percent(bubbles['1f1b'])}; "
        "a very busy machine? run it again",
    )

    say("\nWith sends that block until they are received, as in lab 3:")
    say(f"  {ps.schedule.verify(build('gpipe', ranks), sends='blocking')}")
    deadlock = deadlock_with_blocking_sends(ranks)
    say(f"  {split_deadlock(deadlock)}")
    check(bool(deadlock), "1f1b deadlocks, gpipe does not", "1f1b should deadlock with blocking sends, but was proved")
    say("Penstock does not wait for sends, and posts receives ahead:")
    say(f"  {ps.schedule.verify(build('1f1b', ranks))}")
    max_peaks = {name: max(rank_peaks) for name, rank_peaks in peaks.items()}
    say(
        f"\nMeasured: gpipe keeps {max_peaks['gpipe']} microbatches in flight at a bubble of {percent(bubbles['gpipe'])}, "
        f"1f1b {max_peaks['1f1b']} at {percent(bubbles['1f1b'])}; "
        f"on the last rank it is {peaks['gpipe'][-1]} against {peaks['1f1b'][-1]}."
    )


def measure(name: str, ranks: int) -> tuple[Timeline, tuple[int, ...]]:
    """Measure a step of schedule `name`. Returns its timeline, and the most microbatches that autograd kept on each rank."""
    planned_bubble = ps.schedule.simulate(build(name, ranks)).bubble
    results = best_of(
        lambda: on_ranks(step_with_activation_count, ranks, name),
        lambda results: abs(results[0][0].bubble - planned_bubble),
        good_enough=TOLERANCE / 2,
    )
    return results[0][0], tuple(peak for _, peak in results)


def build(name: str, ranks: int) -> ps.schedule.Schedule:
    """Build the table of schedule `name`."""
    return ps.schedule.build(name, ranks=ranks, microbatches=MICROBATCHES)


def deadlock_with_blocking_sends(ranks: int) -> str:
    """Return the error that names the deadlock of 1F1B with blocking sends: which rank waits for which. Empty without one."""
    try:
        ps.schedule.verify(build("1f1b", ranks), sends="blocking")
    except ps.ScheduleError as error:
        return str(error)
    return ""


def step_with_activation_count(name: str) -> tuple[Timeline, int]:
    """Run a step of schedule `name`. Returns its timeline, and the most microbatches autograd kept on this rank at once."""
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
        """Run the layer: (rows, dim) -> (rows, dim)."""
        with saved_tensors_hooks(partial(SavedTensor, self), lambda saved_tensor: saved_tensor.tensor):
            return self.layer(hidden)

    def count(self, change: int) -> None:
        """Add `change` to the number of activations that are alive, and update the peak."""
        self.alive += change
        self.peak = max(self.peak, self.alive)


class SavedTensor:
    """Holds a saved tensor in the autograd graph, and counts it until the graph frees it."""

    def __init__(self, counter: ActivationCounter, tensor: Tensor) -> None:
        self.counter, self.tensor = counter, tensor
        self.activations = 0 if isinstance(tensor, nn.Parameter) else 1  # the layer also saves its weight
        counter.count(self.activations)

    def __del__(self) -> None:
        self.counter.count(-self.activations)


if __name__ == "__main__":
    main()
