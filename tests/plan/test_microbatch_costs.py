"""What microbatches take, fitted to steps that ran: the coefficients are found, and orders and groups follow them."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from runners import on_ranks
from torch import Tensor, nn

import penstock as ps
from penstock.batch.pieces import Shape
from penstock.plan.list_order import microbatch_order
from penstock.plan.microbatch_costs import MicrobatchCosts, MicrobatchFit, fit_microbatches
from penstock.schedule.schedule import from_rows
from penstock.schedule.table import Kind
from penstock.schedule.transform import without_teacher


def _samples(count: int, outliers: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """2 us a token, 3 ns a token and length, 400 us, with 1 % of noise."""
    rng = random.Random(0)
    samples = []
    for _ in range(count):
        rows, longest = rng.randint(1, 9), int(rng.lognormvariate(5, 1)) + 1
        seconds = rows * longest * (2e-6 + 3e-9 * longest) + 4e-4
        samples.append((rows, rows * longest, seconds * rng.gauss(1, 0.01) * (3 if rng.random() < outliers else 1)))
    return tuple(np.array(samples, dtype=float).T)  # type: ignore[return-value]


@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_coefficients_are_found_also_where_some_actions_were_disturbed(outliers: float) -> None:
    fit = fit_microbatches(*_samples(400, outliers))
    assert fit[:3] == pytest.approx((2e-6, 3e-9, 4e-4), rel=0.05)
    assert fit.error < 0.02
    assert fit.samples == 400


def test_from_equal_microbatches_others_take_as_much_as_they_have_tokens() -> None:
    fit = fit_microbatches(np.full(9, 4.0), np.full(9, 400.0), np.full(9, 0.02))
    assert fit.evaluate(4, 100) == pytest.approx(0.02)
    assert fit.evaluate(8, 100) == pytest.approx(0.04)


def test_the_cost_is_that_of_the_rank_that_takes_longest_and_a_step_is_predicted() -> None:
    """Stages 0 and 2 on rank 0; stage 2 compares tokens."""
    forwards = [MicrobatchFit(1, 0, 0, 0, 9), MicrobatchFit(3, 0, 0, 0, 9), MicrobatchFit(1, 0.1, 5, 0, 9)]
    fits = {(Kind.F, stage): fit for stage, fit in enumerate(forwards)} | {(Kind.B, stage): forwards[stage] for stage in (0, 1)}
    fits |= {(Kind.I, 2): MicrobatchFit(1, 0, 0, 0, 9), (Kind.W, 2): MicrobatchFit(3, 0, 0, 0, 9)}
    costs = MicrobatchCosts(fits, (0, 1, 0))
    assert costs(1, 10) == max(10 + 10 + 10 + 10 + 5 + 40, 60)
    step = costs.step_costs([(1, 10), (3, 10)])
    assert step.forward == [[10, 30], [30, 90], [25, 65]]
    assert step.backward == [[10, 30], [30, 90], [40, 120]]
    assert step.backward_input == [[5, 15], [15, 45], [10, 30]]
    assert step.backward_weight == [[5, 15], [15, 45], [30, 90]]


def test_a_planned_order_follows_the_costs() -> None:
    """Of as many elements, long rows cost more: they go into the middle. Without costs the given order is as good."""
    schedule = ps.schedule.build("1f1b", ranks=4, microbatches=8)
    inputs = [Shape(rows, 64, "") for rows in (1, 2, 4, 8, 16, 32, 64, 16)]
    costs = MicrobatchCosts(
        {(kind, stage): MicrobatchFit(0, 1, 0, 0, 9) for kind in (Kind.F, Kind.B) for stage in range(4)}, (0, 1, 2, 3)
    )
    assert microbatch_order("planned", inputs, lambda _: schedule) == list(range(8))
    planned = microbatch_order("planned", inputs, lambda _: schedule, costs)
    assert 0 not in planned[:2] + planned[-2:]
    assert {planned[0], planned[-1]} <= {5, 6, 7}


def test_a_limit_may_be_in_bytes() -> None:
    """Stages 0 and 2, on rank 0, keep 100 bytes a token and 1000 for any microbatch; rank 1 keeps less."""
    kept = {0: MicrobatchFit(60, 0, 1000, 0, 9), 1: MicrobatchFit(90, 0, 0, 0, 9), 2: MicrobatchFit(40, 0, 0, 0, 9)}
    seconds = {(kind, stage): MicrobatchFit(1, 0, 0, 0, 9) for kind in (Kind.F, Kind.B) for stage in range(3)}
    costs = MicrobatchCosts(seconds, (0, 1, 0), activations=kept)
    assert costs.bytes(4, 10) == 5000
    groups = ps.plan.group_rows([10] * 8, 2, cost=costs, limit="5kB")
    assert [len(group) for group in groups] == [4, 4]
    with pytest.raises(ps.MismatchError, match=r"of at most 4.9 kB: give 3 microbatches or more"):
        ps.plan.group_rows([10] * 8, 2, cost=costs, limit="4.9 kB")
    with pytest.raises(ps.MismatchError, match=r"row 1 of length 80 takes 9 kB alone, more than the limit of 5 kB"):
        ps.plan.group_rows([10, 80], 2, cost=costs, limit="5kB")
    with pytest.raises(ps.MismatchError, match="limit='5kB' is in bytes, which"):
        ps.plan.group_rows([10] * 8, 2, limit="5kB")
    with pytest.raises(ps.PenstockError, match="of 3 stages the activations of 0 were measured"):
        MicrobatchCosts(seconds, (0, 1, 0)).bytes(4, 10)

    schedule = ps.schedule.build("gpipe", ranks=2, microbatches=2)
    inputs = [Shape(4, 40, ""), Shape(2, 20, "")]
    assert microbatch_order("given", inputs, lambda _: schedule, costs, "8kB") == [0, 1]
    with pytest.raises(
        ps.MismatchError, match=r"order='given' has up to 8 kB in flight on rank 0, more than the limit of 7 kB"
    ):
        microbatch_order("given", inputs, lambda _: schedule, costs, "7kB")


def test_a_limit_in_bytes_counts_a_teachers_outputs_that_wait() -> None:
    """Both outputs wait on rank 1 before the first loss; then one waits beside the activation, which takes 10 bytes a token."""
    rows = [["2TEACHER", "2F0", "2F1", "0F0", "0F1", "0B0", "0B1"], ["3F0", "3F1", "1F0", "1B0", "1F1", "1B1"]]
    both = from_rows("taught", rows)
    fit = MicrobatchFit(10, 0, 0, 0, 9)
    seconds = {(kind, stage): MicrobatchFit(1, 0, 0, 0, 9) for kind in (Kind.F, Kind.B) for stage in range(2)}
    outputs = {1: MicrobatchFit(100, 0, 0, 0, 9)}
    costs = MicrobatchCosts(seconds, (0, 1), activations={0: fit, 1: fit}, teacher_outputs=outputs)
    assert costs.bytes(4, 10) == 4000  # a group of this size is above a limit that its output alone exceeds
    assert "stage 1 teacher's output: 100 bytes a token" in str(costs)

    inputs = [Shape(4, 40, ""), Shape(2, 20, "")]
    chosen = partial(microbatch_order, "given", inputs, lambda _: without_teacher(both), costs)
    assert chosen("6kB", lambda _: both) == [0, 1]
    with pytest.raises(ps.MismatchError, match=r"has up to 6 kB in flight on rank 1, more than the limit of 5.9 kB"):
        chosen("5.9kB", lambda _: both)
    assert chosen(60, lambda _: both) == [0, 1]  # padded tokens are those of activations


@pytest.mark.parametrize("order", ["None", "sorted", [0.0, 1.0], [0, 2], [0], ["0", "1"]])
def test_an_order_that_is_none_is_refused(order: Any) -> None:
    schedule, inputs = ps.schedule.build("1f1b", ranks=2, microbatches=2), [Shape(1, 9, "")] * 2
    with pytest.raises(ps.MismatchError, match="is no order of 2 microbatches: give 'given', 'planned', or each index"):
        microbatch_order(order, inputs, lambda _: schedule)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def _fitted() -> Any:
    pipe = ps.Pipeline(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), _loss, "interleaved-1f1b", 2)
    with pytest.raises(ps.PenstockError) as caught:
        pipe.plan_costs()
    for rows in (3, 5, 2):
        entries = [torch.ones(rows, 4), torch.ones(2 * rows, 4)]
        pipe.step_microbatches(entries, entries, order="planned")
    costs = pipe.plan_costs()
    pipe.step_microbatches(entries, entries, order="planned")
    return str(caught.value), dict(costs.fits), costs(3, 4), str(costs), dict(costs.activations), costs.message_seconds


@pytest.mark.ranks
def test_all_ranks_fit_the_same_costs_after_two_steps() -> None:
    first, second = on_ranks(_fitted, 2)
    assert first == second
    error, fits, seconds, text, activations, message_seconds = first
    assert "run two steps over lists" in error
    assert {stage for _, stage in fits} == {0, 1, 2, 3}
    assert all(fit.samples == 4 for fit in fits.values())
    assert 0 < seconds < 1
    assert text.startswith("stage 0 B: ")
    assert "stage 3 activations: " in text
    assert len(message_seconds) == 3
    assert min(message_seconds) >= 0
    # A linear layer keeps its input of 4 float32 a row; the last stage's loss keeps its difference and its input besides.
    assert all(activations[stage].evaluate(9, 4) == pytest.approx(9 * 4 * 4) for stage in (1, 2))
    assert all(fit.samples == 2 for fit in activations.values())
