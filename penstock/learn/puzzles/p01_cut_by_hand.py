"""Cut a model by hand.

A model of n layers runs on P ranks, and each rank gets consecutive layers. The slowest rank sets the pace of all, so no rank
should have more layers than necessary.

Write `cut(layers, ranks)`: return for each rank, in order, the range of its layers as (first, end). The numbers of layers of
two ranks may differ by one at most.

Target: 16 layers on 4 ranks: 4 each. 10 layers on 4 ranks: 3 at most.
"""

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, require_answer, solution


@solution
def cut(layers: int, ranks: int) -> list[tuple[int, int]]:
    """Return (first, end) for each rank, whose layers are range(first, end)."""
    borders = [rank * layers // ranks for rank in range(ranks + 1)]
    return [(borders[rank], borders[rank + 1]) for rank in range(ranks)]


HINTS = (
    "Every rank has at least layers // ranks layers. The remaining layers % ranks go to as many ranks, one layer each.",
    "Let rank r begin at layer r * layers // ranks: then no rounding error adds up.",
)
EXPLANATION = """Rank r begins at layer r * layers // ranks. Two neighbouring borders differ by the average, rounded down or
up, and the last border is exactly `layers`. Real layers take different times: `ps.Pipeline(.., example_args=..)` measures
them, and chooses the cut whose slowest stage is fastest."""


def check(answers: object) -> CheckPassed:
    """Check 1 to 8 ranks with up to 39 layers. Raises CheckFailed."""
    for layers, ranks in [(16, 4), (10, 4), *[(layers, n) for n in range(1, 9) for layers in range(n, 40)]]:
        ranges = require_answer(answers.cut(layers, ranks), f"cut({layers}, {ranks})")  # type: ignore[attr-defined]
        if len(ranges) != ranks:
            raise CheckFailed(f"cut({layers}, {ranks}) returns {len(ranges)} ranges for {ranks} ranks")
        covered = [layer for begin, end in ranges for layer in range(begin, end)]
        if covered != list(range(layers)):
            missing = sorted(set(range(layers)) - set(covered))
            problem = (
                f"layers {', '.join(map(str, missing))} are on no rank"
                if missing
                else "a layer is there twice, or out of order"
            )
            raise CheckFailed(f"cut({layers}, {ranks}): {problem}")
        sizes = [end - begin for begin, end in ranges]
        if max(sizes) - min(sizes) > 1:
            fewest = -(-layers // ranks)
            raise CheckFailed(
                f"cut({layers}, {ranks}): the slowest rank has {max(sizes)} layers, {fewest} would do; others have {min(sizes)}"
            )
    return CheckPassed("every cut covers all layers, and the slowest rank has as few as possible")
