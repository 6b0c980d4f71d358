"""Every schedule on real processes: the bits of one process."""

from collections.abc import Iterator

import pytest
from reference import accumulate, assert_same, data, gradients, make, merged

import penstock as ps

KINDS = ("mlp", "gpt", "mixed")
DEPTH = 12  # layers enough for 4 ranks with 3 stages each


def tables(ranks: int) -> Iterator[tuple[str, int | None, int]]:
    """Name, V, M of everything that is run."""
    for name in ps.schedule.names():
        variable = name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb")
        for stages_per_rank in (2, 3) if variable else (None,):
            for microbatches in range(1, 2 * ranks + 4):
                yield name, stages_per_rank, microbatches


def rows_of(microbatches: int) -> int:
    return 2 * microbatches + 1  # uneven pieces


def rank_every_schedule(ranks: int, kind: str):
    """Two steps with each, without an optimizer between."""
    model, loss_fn = make(kind, depth=DEPTH)
    results = {}
    for table in tables(ranks):
        name, stages_per_rank, microbatches = table
        pipe = ps.Pipeline(model, loss_fn, name, microbatches, seed=None, stages_per_rank=stages_per_rank)
        losses = [
            pipe.step(*inputs, target=target) for *inputs, target in (data(kind, rows_of(microbatches), s) for s in (3, 4))
        ]
        results[table] = losses, gradients(pipe.named_parameters())
        model.zero_grad()
    return results


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_has_the_loss_and_the_gradients_of_one_process(ranks: int, kind: str) -> None:
    everyone = ps.launch(rank_every_schedule, ranks, ranks, kind)
    model, loss_fn = make(kind, depth=DEPTH)
    expected = {}
    for microbatches in {m for _, _, m in tables(ranks)}:
        losses = [accumulate(model, loss_fn, data(kind, rows_of(microbatches), seed), microbatches) for seed in (3, 4)]
        expected[microbatches] = losses, gradients(model.named_parameters())
        model.zero_grad()
    for table in tables(ranks):
        losses, grads = expected[table[2]]
        assert all(each[table][0] == losses for each in everyone), table
        assert_same(merged([each[table][1] for each in everyone]), grads)
