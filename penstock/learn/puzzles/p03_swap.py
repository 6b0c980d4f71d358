"""A swap without a deadlock.

The ranks form a ring. Each sends a tensor to the next rank and receives one from the previous rank. Here a send returns only
when its receive has been posted, as with large messages: if all ranks send first, they wait for each other for ever.

Write `orders(rank, ranks)`: return what the rank does, in order: "send" (to the next rank) and "receive" (from the previous
rank), once each.

Target: rings of 2 to 9 ranks finish in at most 3 rounds. In a round every pair of a waiting send and a waiting receive
completes.
"""

from penstock.learn.puzzles.check_helpers import CheckFailed, CheckPassed, require_answer, solution


@solution
def orders(rank: int, ranks: int) -> list[str]:
    """Return what the rank does, in order."""
    return ["send", "receive"] if rank % 2 == 0 else ["receive", "send"]


HINTS = (
    "If only rank 0 receives first, there is no deadlock, but the ranks go one after the other: as many rounds as ranks.",
    "Let neighbours begin with different operations.",
)
EXPLANATION = """Even ranks send first, odd ranks receive first: every even rank meets the odd rank after it, then the odd
ranks send. In a ring of odd length two neighbours begin with the same operation, which costs a third round and no more. The
other solution is not to wait: puzzle 10 uses asynchronous sends, because in 1F1B neighbours send to each other at the same
time."""


def check(answers: object) -> CheckPassed:
    """Simulate every ring, round by round. Raises CheckFailed."""
    for ranks in range(2, 10):
        ring = [list(require_answer(answers.orders(rank, ranks), f"orders({rank}, {ranks})")) for rank in range(ranks)]  # type: ignore[attr-defined]
        for rank, order in enumerate(ring):
            if sorted(order) != ["receive", "send"]:
                raise CheckFailed(f"orders({rank}, {ranks}) is {order}: give 'send' and 'receive' once each")
        rounds = _count_rounds(ring, ranks)
        if rounds > 3:
            raise CheckFailed(f"{ranks} ranks need {rounds} rounds, the target is 3: each rank waits for the previous one")
    return CheckPassed("every ring of 2 to 9 ranks finishes in at most 3 rounds")


def _count_rounds(orders: list[list[str]], ranks: int) -> int:
    """Return how many rounds the ranks' operations take. Raises CheckFailed for a deadlock."""
    count = 0
    while any(orders):
        senders = [
            rank for rank in range(ranks) if orders[rank][:1] == ["send"] and orders[(rank + 1) % ranks][:1] == ["receive"]
        ]
        if not senders:
            stuck = [f"rank {rank} waits to {order[0]}" for rank, order in enumerate(orders) if order]
            raise CheckFailed(f"{ranks} ranks deadlock: {', '.join(stuck)}")
        for rank in senders:
            orders[rank].pop(0)
            orders[(rank + 1) % ranks].pop(0)
        count += 1
    return count
