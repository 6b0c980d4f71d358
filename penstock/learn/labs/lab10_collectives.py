"""Lab 10: collectives by hand on four ranks.

A pipeline's ranks talk in pairs. Ranks that share work talk all at once: one has something for all (broadcast, scatter), all
have something for one (reduce, gather), or all for all. Each of these is a few sends and receives: here they are, every
rank's numbers before and after, checked against torch's own. Then the one that training lives on, the all-reduce: three
ways to do it, and how much each rank sends.

    penstock lab 10
    python -m penstock.learn.labs.lab10_collectives
    torchrun --nproc-per-node 3 -m penstock.learn.labs.lab10_collectives

Try: a broadcast as a tree, in which whoever has it sends it on. How many messages in turn does it take for 8 ranks?
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
LARGE, SMALL = 1_000_000, 1_000  # floats to sum over the ranks, about: a multiple of their number
REPEATS = 5


def main() -> None:
    """Eight collectives in pictures; then the all-reduce, step by step and three ways."""
    ranks = ranks_here(RANKS)
    say(f"Lab 10: collectives by hand on {ranks} ranks\n")
    say("Every rank has a piece for every rank: 21 is rank 2's piece 1. Before -> after:\n")
    show_all(ranks)
    watch_the_ring(ranks)
    say(f"\nMeasured: {compare_ways(ranks)}")


@dataclass(frozen=True)
class Collective:
    """One of the eight: by hand, what each rank has before, and which one its backward is."""

    hand: Callable[[RankGroup, Tensor], Tensor | None]
    given: str  # "all" ranks have all pieces, each has its own "piece", or only the "root", rank 0, has all
    backward: str


COLLECTIVES = {  # drawn in pairs
    "broadcast": Collective(collectives.broadcast, "root", "reduce"),
    "reduce": Collective(collectives.reduce, "all", "broadcast"),
    "scatter": Collective(collectives.scatter, "root", "gather"),
    "gather": Collective(collectives.gather, "piece", "scatter"),
    "all-gather": Collective(collectives.all_gather, "piece", "reduce-scatter"),
    "reduce-scatter": Collective(collectives.reduce_scatter, "all", "all-gather"),
    "all-reduce": Collective(collectives.all_reduce, "all", "all-reduce"),
    "all-to-all": Collective(collectives.all_to_all, "all", "all-to-all"),
}


def by_torch(name: str, group: RankGroup, tensor: Tensor) -> Tensor | None:
    """The same by torch.distributed: in place, or into what it is given, a tensor or a list of one for each rank."""
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
    """A collective on one rank: its pieces before and after, `nan` where it has none; whether torch makes the same."""

    before: Tensor  # (ranks,)
    after: Tensor
    as_torch: bool

    def drawn(self) -> str:
        """In one line, a dot where nothing is."""
        lines = (
            "".join("   ." if piece.isnan() else f"  {piece:02.0f}" for piece in pieces) for pieces in (self.before, self.after)
        )
        return "  ->".join(lines)


def see(group: RankGroup, name: str, numbers: Tensor) -> CollectiveResult:
    """Run a collective on `numbers` (ranks, 1), by hand and by torch."""
    collective = COLLECTIVES[name]
    value = numbers[group.rank] if collective.given == "piece" else numbers
    hand, library = collective.hand(group, value.clone()), by_torch(name, group, value.clone())
    are_equal = hand is library if hand is None or library is None else torch.equal(hand, library)
    start = None if collective.given == "root" and group.rank else value
    return CollectiveResult(in_place(group, start), in_place(group, hand), are_equal)


def in_place(group: RankGroup, data: Tensor | None) -> Tensor:
    """(ranks,): all pieces, or one in this rank's place, or none."""
    places = torch.full((group.ranks,), nan)
    if data is not None:
        places[group.rank if data.numel() == 1 else slice(None)] = data.squeeze()
    return places


def backward_holds(group: RankGroup, name: str) -> bool:
    """Whether f(x) . y = x . b(y), summed over all ranks, f being the collective and b what is said to be its backward."""
    generator = torch.Generator().manual_seed(group.rank)
    x, y = torch.randint(-99, 99, (2, group.ranks, 1), generator=generator).float()
    forward, backward = see(group, name, x), see(group, COLLECTIVES[name].backward, y)
    products = torch.stack([(forward.after * backward.before).nansum(), (forward.before * backward.after).nansum()])
    dist.all_reduce(products)
    return products[0].item() == products[1].item()


def see_all() -> dict[str, tuple[CollectiveResult, bool]]:
    """Every collective on this rank, and whether its backward is what it is said to be."""
    group = RankGroup.join()
    numbers = torch.tensor([[10.0 * group.rank + piece] for piece in group.all])
    return {name: (see(group, name, numbers), backward_holds(group, name)) for name in COLLECTIVES}


def show_all(ranks: int) -> None:
    """Every collective drawn, two side by side, and what was checked of it."""
    results = on_ranks(see_all, ranks)
    pictures = {
        name: [name, *(f"rank {rank} {result[name][0].drawn()}" for rank, result in enumerate(results))] for name in COLLECTIVES
    }
    names, width = list(COLLECTIVES), 8 * ranks + 16
    for pair in zip(names[::2], names[1::2], strict=True):
        for left_line, right_line in zip(*(pictures[name] for name in pair), strict=True):
            say(f"  {left_line:{width}}{right_line}")
    different = [name for name in names if not all(result[name][0].as_torch for result in results)]
    check(not different, "torch makes the same on every rank", f"torch makes something else of {', '.join(different)}")
    wrong = [name for name in names if not all(result[name][1] for result in results)]
    check(
        not wrong,
        "left and right are each other's backward; the last two are their own",
        f"the backward is another one than said: {', '.join(wrong)}",
    )


def watch_the_ring(ranks: int) -> None:
    """Every step of an all-reduce of ones in a ring."""
    say("\nAll-reduce in a ring, of ones, so that a number says how many ranks are in a piece. In each step every rank sends")
    say("one piece to the next rank, which first adds it to its own (reduce-scatter), then keeps it (all-gather):\n")
    states = on_ranks(ring_of_ones, ranks)
    width = max(2 * ranks + 2, 9)
    titles = ["start", *(f"step {step}" for step in range(1, len(states[0])))]
    say(f"  {'':8}{''.join(f'{title:{width}}' for title in titles)}".rstrip())
    for rank, value in enumerate(states):
        say(f"  rank {rank}  {''.join(f'{state:{width}}' for state in value)}".rstrip())
    final_state = " ".join([str(ranks)] * ranks)
    check(
        all(state[-1] == final_state for state in states),
        f"after 2 (n-1) = {len(states[0]) - 1} steps every rank has every piece whole",
        f"the ring should end with {final_state} on every rank; it ends with {[state[-1] for state in states]}",
    )


def ring_of_ones() -> list[str]:
    """This rank's pieces after every step."""
    group, states = RankGroup.join(), list[str]()
    tensor = torch.ones(group.ranks, 1)
    collectives.ring_all_reduce(
        group, tensor, lambda pieces: states.append(" ".join(f"{piece:.0f}" for piece in pieces.flatten()))
    )
    return states


class AllReduceTrial(NamedTuple):
    """A way to sum, on one rank."""

    sent: int  # bytes, of the large sum; 0 where it is not known
    same: bool  # the bits of rank 0
    off: float  # from torch's sum, at most
    large: float  # seconds
    small: float


def torchs_all_reduce(group: RankGroup, tensor: Tensor) -> Tensor:
    """Gloo's, which does not say what it sends."""
    dist.all_reduce(tensor)
    return tensor


WAYS: dict[str, Callable[[RankGroup, Tensor], Tensor]] = {
    "one adds": collectives.all_reduce,
    "each sends all to all": collectives.all_gather_and_sum,
    "a ring": collectives.ring_all_reduce,
    "torch": torchs_all_reduce,
}


def compare_ways(ranks: int) -> str:
    """Bytes and seconds of every way. Returns what was measured."""
    size, width = 4 * (LARGE // ranks * ranks), max(6 * ranks, 18)
    trials = on_ranks(try_ways, ranks)
    say(
        f"\nTo sum {size / 1e6:.3g} MB over the ranks: what each sends, and the time; then the time for {4 * SMALL / 1e3:g} KB:"
    )
    say(f"  {'':24}{'MB sent, by rank':{width}}{f'{size / 1e6:.3g} MB':>10} {f'{4 * SMALL / 1e3:g} KB':>10}")
    for way, rank_0_trial in trials[0].items():
        sent_text = "".join(f"{trial[way].sent / 1e6:<6.3g}" for trial in trials) if rank_0_trial.sent else "?"
        say(f"  {way:24}{sent_text:{width}}{1e3 * rank_0_trial.large:7.2f} ms {1e3 * rank_0_trial.small:7.2f} ms")
    say(f"The ring is for much data. With little, its {2 * (ranks - 1)} messages in turn count, each with its latency.")
    ring, share = [trial["a ring"] for trial in trials], 2 * (ranks - 1) / ranks
    check(
        all(result.sent == 2 * (ranks - 1) * size // ranks for result in ring),
        f"in the ring every rank sends 2 (n-1)/n = {share:.3g} times its data: never twice, however many ranks there are",
        f"in the ring every rank should send {share:.3g} times its {size} bytes; they sent {[result.sent for result in ring]}",
    )
    check(
        all(result.same for result in ring),
        "the ring leaves the same bits on all ranks: a piece is added up once, and handed round",
        "the ring leaves other bits on other ranks",
    )
    off = max(trial.off for trial in trials[0].values())
    check(
        off < 1e-5,
        f"the ways agree within {off:.0e}: each adds in an order of its own, and the last bits of a sum depend on it",
        f"the ways to sum differ by {off:.0e}",
    )
    root, library = trials[0]["one adds"], trials[0]["torch"]
    return (
        f"to sum {size / 1e6:.3g} MB over {ranks} ranks, one that adds for all sends {root.sent / 1e6:.3g} MB and takes "
        f"{1e3 * root.large:.1f} ms; in a ring every rank sends {ring[0].sent / 1e6:.3g} MB, in {1e3 * ring[0].large:.1f} ms "
        f"({1e3 * library.large:.1f} ms by torch)."
    )


def try_ways() -> dict[str, AllReduceTrial]:
    """Every way to sum, on this rank."""
    group, trials = RankGroup.join(), {}
    generator = torch.Generator().manual_seed(group.rank)
    large, small = (torch.randn(group.ranks, count // group.ranks, generator=generator) for count in (LARGE, SMALL))
    torch_sum = torchs_all_reduce(group, large.clone())
    for way, add in WAYS.items():
        group.sent = 0
        total = add(group, large.clone())
        sent_bytes, rank_0_sum = group.sent, total.clone()
        dist.broadcast(rank_0_sum, 0)
        off = (total - torch_sum).abs().max().item()
        trials[way] = AllReduceTrial(
            sent_bytes, torch.equal(total, rank_0_sum), off, seconds(add, group, large), seconds(add, group, small)
        )
    return trials


def seconds(add: Callable[[RankGroup, Tensor], Tensor], group: RankGroup, tensor: Tensor) -> float:
    """The least disturbed of some repetitions."""
    times = []
    for _ in range(REPEATS):
        copy = tensor.clone()
        dist.barrier()
        start = time.perf_counter()
        add(group, copy)
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
