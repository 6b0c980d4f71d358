"""Lab 10: collectives by hand on four ranks.

A pipeline's ranks exchange messages in pairs. Ranks that share work use collectives: one rank sends to all (broadcast,
scatter), all send to one (reduce, gather), or all to all. Each collective is a few sends and receives. The lab writes them by
hand, prints every rank's numbers before and after, and compares them with torch's. Then it compares three ways to do an
all-reduce, the collective that training needs most, by time and by bytes sent.

    penstock lab 10
    python -m penstock.learn.labs.lab10_collectives
    torchrun --nproc-per-node 3 -m penstock.learn.labs.lab10_collectives

Try: a broadcast as a tree, in which each rank that has the data sends it on. How many messages in turn do 8 ranks need?
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nan

from penstock.learn import collectives
from penstock.learn.collectives import RankGroup
from penstock.learn.lab_helpers import check, on_ranks, ranks_here, say

RANKS = 4
LARGE, SMALL = 1_000_000, 1_000  # floats to sum over the ranks, rounded down to a multiple of the number of ranks
REPEATS = 5


def main() -> None:
    """Show eight collectives; then the steps of a ring all-reduce, and three ways to all-reduce."""
    ranks = ranks_here(RANKS)
    say(f"Lab 10: collectives by hand on {ranks} ranks\n")
    say("Every rank has a piece for every rank: 21 is piece 1 of rank 2. Before -> after:\n")
    show_collectives(ranks)
    show_ring_steps(ranks)
    say(f"\nMeasured: {compare_all_reduces(ranks)}")


@dataclass(frozen=True)
class Collective:
    """A collective by hand, its input, and the collective that is its backward."""

    function: Callable[[RankGroup, Tensor], Tensor | None]
    input_pieces: str  # "all": each rank has all pieces; "piece": each has its own; "root": rank 0 has all, the others none
    backward: str


COLLECTIVES = {  # printed in pairs
    "broadcast": Collective(collectives.broadcast, "root", "reduce"),
    "reduce": Collective(collectives.reduce, "all", "broadcast"),
    "scatter": Collective(collectives.scatter, "root", "gather"),
    "gather": Collective(collectives.gather, "piece", "scatter"),
    "all-gather": Collective(collectives.all_gather, "piece", "reduce-scatter"),
    "reduce-scatter": Collective(collectives.reduce_scatter, "all", "all-gather"),
    "all-reduce": Collective(collectives.all_reduce, "all", "all-reduce"),
    "all-to-all": Collective(collectives.all_to_all, "all", "all-to-all"),
}


def run_torch_collective(name: str, group: RankGroup, tensor: Tensor) -> Tensor | None:
    """Run the collective `name` of torch.distributed. Returns its result as the function by hand does."""
    piece, pieces, is_root = torch.empty(1), torch.empty(group.ranks, 1), group.rank == 0
    match name:
        case "broadcast":
            dist.broadcast(tensor, 0)
        case "reduce":
            dist.reduce(tensor, 0)
            return tensor if is_root else None
        case "scatter":
            dist.scatter(piece, list(tensor) if is_root else None, 0)
            return piece
        case "gather":
            dist.gather(tensor, list(pieces) if is_root else None, 0)
            return pieces if is_root else None
        case "all-gather":
            dist.all_gather(list(pieces), tensor)
            return pieces
        case "reduce-scatter":
            dist.reduce_scatter(piece, list(tensor))
            return piece
        case "all-to-all":
            dist.all_to_all(list(pieces), list(tensor))
            return pieces
        case "all-reduce":
            dist.all_reduce(tensor)
    return tensor


class CollectiveResult(NamedTuple):
    """A collective on one rank: its pieces before and after, `nan` for a piece it does not have."""

    before: Tensor  # (ranks,)
    after: Tensor  # (ranks,)
    equals_torch: bool

    def text(self) -> str:
        """Return the pieces before and after as one line, with a dot for a piece that is not there."""
        lines = (
            "".join("   ." if piece.isnan() else f"  {piece:02.0f}" for piece in pieces) for pieces in (self.before, self.after)
        )
        return "  ->".join(lines)


def run_collective(group: RankGroup, name: str, numbers: Tensor) -> CollectiveResult:
    """Run the collective `name` by hand and by torch. `numbers` (ranks, 1) is this rank's tensor."""
    collective = COLLECTIVES[name]
    tensor = numbers[group.rank] if collective.input_pieces == "piece" else numbers
    result, torch_result = collective.function(group, tensor.clone()), run_torch_collective(name, group, tensor.clone())
    equal = result is torch_result if result is None or torch_result is None else torch.equal(result, torch_result)
    before = None if collective.input_pieces == "root" and group.rank else tensor
    return CollectiveResult(pad_pieces(group, before), pad_pieces(group, result), equal)


def pad_pieces(group: RankGroup, data: Tensor | None) -> Tensor:
    """Return (ranks,): all pieces of `data`, or its one piece at this rank's index; `nan` for the others."""
    padded = torch.full((group.ranks,), nan)
    if data is not None:
        padded[group.rank if data.numel() == 1 else slice(None)] = data.squeeze()
    return padded


def backward_holds(group: RankGroup, name: str) -> bool:
    """Return whether f(x) . y = x . b(y), summed over all ranks, for a collective f and its `backward` b."""
    generator = torch.Generator().manual_seed(group.rank)
    x, y = torch.randint(-99, 99, (2, group.ranks, 1), generator=generator).float()
    forward, backward = run_collective(group, name, x), run_collective(group, COLLECTIVES[name].backward, y)
    products = torch.stack([(forward.after * backward.before).nansum(), (forward.before * backward.after).nansum()])
    dist.all_reduce(products)
    return products[0].item() == products[1].item()


def run_all_collectives() -> dict[str, tuple[CollectiveResult, bool]]:
    """Run every collective. Returns this rank's results by name, and whether the named backward is right."""
    group = RankGroup.join()
    numbers = torch.tensor([[10.0 * group.rank + piece] for piece in group.all])
    return {name: (run_collective(group, name, numbers), backward_holds(group, name)) for name in COLLECTIVES}


def show_collectives(ranks: int) -> None:
    """Print all collectives, two side by side, and check results and backwards."""
    results = on_ranks(run_all_collectives, ranks)
    lines_by_name = {
        name: [name, *(f"rank {rank} {result[name][0].text()}" for rank, result in enumerate(results))] for name in COLLECTIVES
    }
    names, width = list(COLLECTIVES), 8 * ranks + 16
    for pair in zip(names[::2], names[1::2], strict=True):
        for left_line, right_line in zip(*(lines_by_name[name] for name in pair), strict=True):
            say(f"  {left_line:{width}}{right_line}")
    different_names = [name for name in names if not all(result[name][0].equals_torch for result in results)]
    check(
        not different_names,
        "torch has the same results on every rank",
        f"torch has other results for {', '.join(different_names)}",
    )
    wrong_names = [name for name in names if not all(result[name][1] for result in results)]
    check(
        not wrong_names,
        "left and right are each other's backward; each of the last two is its own",
        f"the backward is wrong for {', '.join(wrong_names)}",
    )


def show_ring_steps(ranks: int) -> None:
    """Print every step of a ring all-reduce of ones."""
    say("\nA ring all-reduce of ones: a number is the count of ranks that a piece sums. In each step every rank sends one")
    say("piece to the next rank, which in the first half adds it to its own (reduce-scatter), in the second keeps it")
    say("(all-gather):\n")
    states = on_ranks(ring_states, ranks)
    width = max(2 * ranks + 2, 9)
    titles = ["start", *(f"step {step}" for step in range(1, len(states[0])))]
    say(f"  {'':8}{''.join(f'{title:{width}}' for title in titles)}".rstrip())
    for rank, rank_states in enumerate(states):
        say(f"  rank {rank}  {''.join(f'{state:{width}}' for state in rank_states)}".rstrip())
    final_state = " ".join([str(ranks)] * ranks)
    check(
        all(state[-1] == final_state for state in states),
        f"after 2 (n-1) = {len(states[0]) - 1} steps every rank has every piece whole",
        f"the ring should end with {final_state} on every rank; it ends with {[state[-1] for state in states]}",
    )


def ring_states() -> list[str]:
    """Run a ring all-reduce of ones. Returns this rank's pieces after every step, as text."""
    group, states = RankGroup.join(), list[str]()
    tensor = torch.ones(group.ranks, 1)
    collectives.ring_all_reduce(
        group, tensor, lambda pieces: states.append(" ".join(f"{piece:.0f}" for piece in pieces.flatten()))
    )
    return states


class AllReduceTrial(NamedTuple):
    """An all-reduce on one rank."""

    sent: int  # bytes, for the large tensor; 0 if unknown
    equals_rank_0: bool  # bit by bit
    max_error: float  # difference from torch's sum
    large_seconds: float
    small_seconds: float


def torch_all_reduce(group: RankGroup, tensor: Tensor) -> Tensor:
    """Sum by Gloo, which does not report the bytes it sends."""
    dist.all_reduce(tensor)
    return tensor


ALL_REDUCES: dict[str, Callable[[RankGroup, Tensor], Tensor]] = {
    "rank 0 adds": collectives.all_reduce,
    "all send all to all": collectives.all_gather_and_sum,
    "a ring": collectives.ring_all_reduce,
    "torch": torch_all_reduce,
}


def compare_all_reduces(ranks: int) -> str:
    """Print bytes and seconds of every all-reduce, and check them. Returns the measurements as text."""
    size, width = 4 * (LARGE // ranks * ranks), max(6 * ranks, 18)
    trials = on_ranks(try_all_reduces, ranks)
    say(
        f"\nTo sum {size / 1e6:.3g} MB over the ranks: what each rank sends, and the time; the time for {4 * SMALL / 1e3:g} KB:"
    )
    say(f"  {'':24}{'MB sent, by rank':{width}}{f'{size / 1e6:.3g} MB':>10} {f'{4 * SMALL / 1e3:g} KB':>10}")
    for method, rank_0_trial in trials[0].items():
        sent_text = "".join(f"{trial[method].sent / 1e6:<6.3g}" for trial in trials) if rank_0_trial.sent else "?"
        times = f"{1e3 * rank_0_trial.large_seconds:7.2f} ms {1e3 * rank_0_trial.small_seconds:7.2f} ms"
        say(f"  {method:24}{sent_text:{width}}{times}")
    say(f"A ring is for large tensors. With small ones the latency of its {2 * (ranks - 1)} messages in turn dominates.")
    ring, data_ratio = [trial["a ring"] for trial in trials], 2 * (ranks - 1) / ranks
    check(
        all(trial.sent == 2 * (ranks - 1) * size // ranks for trial in ring),
        f"in the ring every rank sends 2 (n-1)/n = {data_ratio:.3g} times its data: less than twice for any number of ranks",
        f"in the ring every rank should send {data_ratio:.3g} times its {size} bytes; it sent {[trial.sent for trial in ring]}",
    )
    check(
        all(trial.equals_rank_0 for trial in ring),
        "the ring leaves the same bits on all ranks: each piece is summed once, then sent around",
        "the ring leaves different bits on the ranks",
    )
    max_error = max(trial.max_error for trial in trials[0].values())
    check(
        max_error < 1e-5,
        f"the all-reduces agree within {max_error:.0e}: each adds in another order, on which the last bits of a sum depend",
        f"the all-reduces differ by {max_error:.0e}",
    )
    root, torch_trial = trials[0]["rank 0 adds"], trials[0]["torch"]
    return (
        f"to sum {size / 1e6:.3g} MB over {ranks} ranks, a root that adds for all sends {root.sent / 1e6:.3g} MB and takes "
        f"{1e3 * root.large_seconds:.1f} ms; in a ring every rank sends {ring[0].sent / 1e6:.3g} MB, in "
        f"{1e3 * ring[0].large_seconds:.1f} ms ({1e3 * torch_trial.large_seconds:.1f} ms by torch)."
    )


def try_all_reduces() -> dict[str, AllReduceTrial]:
    """Run every all-reduce. Returns this rank's trials by name."""
    group, trials = RankGroup.join(), {}
    generator = torch.Generator().manual_seed(group.rank)
    large, small = (torch.randn(group.ranks, count // group.ranks, generator=generator) for count in (LARGE, SMALL))
    torch_sum = torch_all_reduce(group, large.clone())
    for method, all_reduce in ALL_REDUCES.items():
        group.sent = 0
        total = all_reduce(group, large.clone())
        sent_bytes, rank_0_sum = group.sent, total.clone()
        dist.broadcast(rank_0_sum, 0)
        max_error = (total - torch_sum).abs().max().item()
        times = [fastest_seconds(all_reduce, group, tensor) for tensor in (large, small)]
        trials[method] = AllReduceTrial(sent_bytes, torch.equal(total, rank_0_sum), max_error, *times)
    return trials


def fastest_seconds(all_reduce: Callable[[RankGroup, Tensor], Tensor], group: RankGroup, tensor: Tensor) -> float:
    """Return the seconds of the fastest of some repetitions, the least disturbed."""
    times = []
    for _ in range(REPEATS):
        copy = tensor.clone()
        dist.barrier()
        start = time.perf_counter()
        all_reduce(group, copy)
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
