"""Cut a model by hand.

A model of n layers is to run on P ranks, each with a piece of neighbouring layers. The slowest rank sets the pace of all,
so no piece may be larger than it must be.

Write `cut(layers, ranks)`: for each rank the range of its layers, in order, as (first, end). No rank may have more than one
layer more than another.

Target: 16 layers on 4 ranks: 4 each. 10 layers on 4 ranks: the largest has 3.
"""

from penstock.learn.puzzles.judge import Missed, Passed, written, yours


@yours
def cut(layers: int, ranks: int) -> list[tuple[int, int]]:
    """For each rank (first, end): its layers are range(first, end)."""
    borders = [rank * layers // ranks for rank in range(ranks + 1)]
    return [(borders[rank], borders[rank + 1]) for rank in range(ranks)]


HINTS = (
    "layers // ranks is what each rank has at least; the rest, layers % ranks, goes to as many ranks, one layer each.",
    "The border before rank r can be r * layers // ranks: then no rounding error adds up.",
)
EXPLANATION = """The border before rank r is r * layers // ranks. Two neighbouring borders differ by the average, rounded
down or up, and the last border is `layers` exactly. Real layers are not alike: `ps.Pipeline(.., example_args=..)` measures
each, and cuts so that the slowest stage is as fast as any cut can make it."""


def check(answers: object) -> Passed:
    """Every number of layers and ranks of a grid."""
    for layers, ranks in [(16, 4), (10, 4), *[(layers, n) for n in range(1, 9) for layers in range(n, 40)]]:
        pieces = written(answers.cut(layers, ranks), f"cut({layers}, {ranks})")  # type: ignore[attr-defined]
        if len(pieces) != ranks:
            raise Missed(f"cut({layers}, {ranks}) has {len(pieces)} pieces, there are {ranks} ranks")
        covered = [layer for begin, end in pieces for layer in range(begin, end)]
        if covered != list(range(layers)):
            missing = sorted(set(range(layers)) - set(covered))
            problem = (
                f"layers {', '.join(map(str, missing))} are on no rank"
                if missing
                else "some layer is there twice, or out of order"
            )
            raise Missed(f"cut({layers}, {ranks}): {problem}")
        sizes = [end - begin for begin, end in pieces]
        if max(sizes) - min(sizes) > 1:
            fewest = -(-layers // ranks)
            raise Missed(
                f"cut({layers}, {ranks}): the slowest rank has {max(sizes)} layers, {fewest} would do; others have {min(sizes)}"
            )
    return Passed("every cut covers all layers, and the slowest rank has as few as can be")
