"""A swap without a circle.

The ranks stand in a ring, and each gives a tensor to the next and takes one from the one before. Here a send waits until
its receive is there (for large messages it does): if all send first, all wait for ever.

Write `orders(rank, ranks)`: what the rank does, in order: "send" (to the next) and "receive" (from the one before), once
each.

Target: every ring of 2 to 9 ranks comes to its end, in 3 rounds at most however long it is. (A round: all that can meet
do.)
"""

from penstock.learn.puzzles.judge import Missed, Passed, written, yours


@yours
def orders(rank: int, ranks: int) -> list[str]:
    """What the rank does, in order."""
    return ["send", "receive"] if rank % 2 == 0 else ["receive", "send"]


HINTS = (
    "If only rank 0 receives first nothing stops, but the ring unrolls one rank after the other: that takes as many "
    "rounds as ranks.",
    "Let neighbours do different things first.",
)
EXPLANATION = """Even ranks send first, odd ranks receive first: every even rank meets the odd one after it, then the other
way around. In a ring of odd length two neighbours do the same first, which costs a third round and no more. The other way
out is not to wait: asynchronous sends, which puzzle 10 uses, since in 1F1B neighbours send to each other at the same
moment."""


def check(answers: object) -> Passed:
    """Play the ring, round by round."""
    for ranks in range(2, 10):
        todo = [list(written(answers.orders(rank, ranks), f"orders({rank}, {ranks})")) for rank in range(ranks)]  # type: ignore[attr-defined]
        for rank, call in enumerate(todo):
            if sorted(call) != ["receive", "send"]:
                raise Missed(f"orders({rank}, {ranks}) is {call}: each of 'send' and 'receive' once")
        rounds = _rounds(todo, ranks)
        if rounds > 3:
            raise Missed(f"{ranks} ranks need {rounds} rounds, the target is 3: each waits for the one before")
    return Passed("every ring of 2 to 9 ranks comes to its end in 3 rounds at most")


def _rounds(todo: list[list[str]], ranks: int) -> int:
    """How many rounds it takes. Raises Missed for a circle."""
    count = 0
    while any(todo):
        meeting = [rank for rank in range(ranks) if todo[rank][:1] == ["send"] and todo[(rank + 1) % ranks][:1] == ["receive"]]
        if not meeting:
            stuck = [f"rank {rank} waits to {call[0]}" for rank, call in enumerate(todo) if call]
            raise Missed(f"with {ranks} ranks it stops for ever: {', '.join(stuck)}")
        for rank in meeting:
            todo[rank].pop(0)
            todo[(rank + 1) % ranks].pop(0)
        count += 1
    return count
