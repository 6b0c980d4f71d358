"""Plans fit, take what the simulator says, are no slower than families on even cuts, and say why they are no faster."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from penstock import PenstockError
from penstock.partition.balance import balanced_starts
from penstock.plan import LayerCost, ModelProfile, load, plan
from penstock.plan.model_profile import ProfileSample
from penstock.plan.partition_search import Limits, PartitionSearch
from penstock.plan.result import robustness
from penstock.plan.schedule_timer import ScheduleTimer
from penstock.plan.stage_costs import LayerChain
from penstock.plan.step_bound import min_step_seconds
from penstock.schedule import Costs, build, simulate, verify
from penstock.schedule.catalog import FAMILIES

MB = 1e6


def layers(count=16, head=1.0):
    """Blocks of 6 ms and 10 MB a row, 2 MB of it their input; the last one as many times as slow."""
    block = LayerCost("", 0.002, 0.002, 0.002, 10 * MB, 4 * MB, 1 * MB, 2 * MB)
    blocks = [block._replace(name=f"blocks.{number}") for number in range(count)]
    times = {name: head * getattr(block, name) for name in ("forward", "backward_input", "backward_weight")}
    return [*blocks[:-1], blocks[-1]._replace(name="head", **times)]


def quick(memory=1e9, ranks=4, batch=16, head=1.0, **options):
    return plan(layers(head=head), ranks, memory, batch=batch, **{"effort": "quick", **options})


@pytest.mark.slow
def test_a_plan_is_proved_and_takes_what_the_simulator_says_it_takes():
    for found in quick(memory=120 * MB, send=0.0001, bandwidth=1e9):
        verify(found.schedule)
        assert found.seconds == pytest.approx(simulate(found.schedule, found.costs).makespan)
        assert found.seconds >= found.bound > 0
        assert max(found.peak_memory) <= 120 * MB
        assert len(found.cuts) == found.schedule.num_stages - 1
        assert len(found.recompute) == found.schedule.num_stages


@pytest.mark.slow
def test_the_best_comes_first_and_the_same_seed_gives_the_same_plans():
    once, again = quick(memory=100 * MB, head=2.5), quick(memory=100 * MB, head=2.5)
    assert once == again
    assert (
        len({(value.schedule.actions, value.cuts) for value in quick(microbatches=1)}) == 5
    )  # most families are one table then
    assert [result.seconds for result in once] == sorted(result.seconds for result in once)


class UniformRecomputeChain(LayerChain):
    """All stages of it have one recomputation, whether that fits or not."""

    def __init__(self, layers, recompute):
        super().__init__(layers)
        self.recompute = recompute

    def stage_cost(self, start, end):
        stage = super().stage_cost(start, end)
        fitting = [policy for policy in stage.policies if policy.recompute == self.recompute]
        return stage._replace(policies=(*fitting, stage.policies[-1])[:1])


@pytest.mark.slow
@pytest.mark.parametrize("memory", [100 * MB, 130 * MB, 250 * MB])
def test_no_family_on_an_even_cut_that_fits_is_faster_than_the_plan(memory):
    best, line = quick(memory, head=3.0, microbatches=8)[0], LayerChain(ModelProfile.from_layers(layers(head=3.0)).costs_at(2))
    for name, family in FAMILIES.items():
        table = ScheduleTimer(build(name, 4, 8))
        even = tuple(balanced_starts(line.layer_seconds, 4 * family.stages_per_rank))
        for value in (line, *(UniformRecomputeChain(line.layers, way) for way in (None, "stage", "block"))):
            candidate = PartitionSearch(value, table, Limits((memory,) * 4)).evaluate(even)
            assert candidate.excess_bytes or best.seconds <= candidate.seconds * (1 + 1e-9), name


@pytest.mark.slow
def test_memory_that_is_short_is_made_up_for_by_recomputation_of_the_stages_that_need_it():
    for head in (1.0, 8.0):  # also where it would cost nothing, since others take longer
        assert set(quick(memory=1e9, microbatches=8, head=head)[0].recompute) == {None}
    tight = quick(memory=100 * MB, microbatches=8)[0]
    assert {"stage", "block"} & set(tight.recompute)
    assert tight.costs.act[0] < 20 * MB * 4


@pytest.mark.costly
def test_a_dear_layer_gets_a_stage_of_its_own_and_is_named():
    best = quick(head=8.0, ranks=4, microbatches=16, batch=16)[0]
    assert best.cuts[-1] == "head"
    assert best.ranks == 3  # a fourth would save nothing
    assert "head alone is 35% of the work" in best.why


@pytest.mark.costly
def test_fewer_ranks_are_used_where_that_is_faster():
    assert quick(ranks=4, send=0.2, microbatches=1, batch=1)[0].ranks == 1


@pytest.mark.slow
def test_ranks_that_share_cores_take_no_less_than_their_work_does():
    work = 16 * 16 * 0.006
    counts = [4, 16]
    assert quick(cores=2, microbatches=counts)[0].seconds >= work / 2
    assert quick(microbatches=counts)[0].seconds < work / 3


def test_a_rank_that_is_slow_gets_fewer_layers():
    best = quick(speeds=[1, 0.4, 1, 1], schedules=["1f1b"], fewer=False)[0]
    begins = [0, *(int(cut.removeprefix("blocks.").replace("head", "15")) for cut in best.cuts), 16]
    counts = [end - start for start, end in pairwise(begins)]
    assert counts[1] < min(counts[0], *counts[2:])
    assert best.costs.forward[1] / counts[1] == pytest.approx(best.costs.forward[0] / counts[0] / 0.4)
    assert best.bound <= best.seconds
    with pytest.raises(PenstockError, match="a number above 0 for each rank"):
        quick(speeds=[1, 1])


def test_what_the_engine_takes_counts_once_for_each_action():
    for name, actions in (("1f1b", 2 * 8), ("gpipe", 2 * 8)):  # F and B of 8 microbatches
        free, taken = (quick(action=value, schedules=[name], microbatches=8, fewer=False)[0].timeline for value in (0, 0.001))
        assert sum(taken.busy) == pytest.approx(sum(free.busy) + 4 * actions * 0.001)


@pytest.mark.costly
def test_a_backward_in_two_takes_as_much_longer_as_the_layers_say():
    def seconds(name, split=0.0):
        every = [layer._replace(split=split) for layer in layers()]
        return plan(every, 4, 1e9, batch=16, effort="quick", schedules=[name], microbatches=8, fewer=False)[0].seconds

    assert seconds("zb-h1") < seconds("1f1b") == seconds("1f1b", split=0.002)
    longer = 8 * 2 * 4 * 0.002  # on a rank that splits all: microbatches, their rows, layers
    assert seconds("zb-h1", split=0.002) >= seconds("zb-h1") + 0.9 * longer


@pytest.mark.costly
def test_all_ranks_are_used_if_that_is_asked():
    assert quick(ranks=4, send=0.2, microbatches=2, batch=2, fewer=False)[0].ranks == 4


@pytest.mark.slow
def test_a_search_for_tables_tells_how_far_it_is_and_ends_when_it_is_told_to():
    results = []

    def enough(what, share, seconds):
        results.append((what, share, seconds))
        return True

    options = {"ranks": 4, "memory": 100 * MB, "batch": 16, "microbatches": 8}
    found = plan(layers(head=2.5), **options, effort="long", progress=enough)[0]
    assert found.seconds <= plan(layers(head=2.5), **options, effort="quick")[0].seconds * (1 + 1e-9)
    assert results[0][0].startswith("table 1 of")


@pytest.mark.slow
def test_where_nothing_fits_the_rank_the_bytes_and_what_would_fit_are_named():
    with pytest.raises(
        PenstockError, match=r"rank \d misses .* of .*activations\. What fits: .*16 microbatches.* for each rank"
    ):
        quick(memory=60 * MB, microbatches=2)
    with pytest.raises(PenstockError, match=r"What fits: \d ranks"):
        quick(memory=40 * MB)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 0}, "1 rank or more"),
        ({"memory": [1e9, 1e9]}, "for 4 ranks"),
        ({"memory": -1}, "above 0"),
        ({"microbatches": 17}, "use 1 to 16"),
        ({"schedules": ["1f2b"]}, "no schedule '1f2b'"),
        ({"schedules": "1f2b"}, "no schedule '1f2b'"),
        ({"memory": "2 lumps"}, "write it as 2GB"),
        ({"memory": 0}, "above 0"),
        ({"batch": 0}, "1 row or more"),
        ({"microbatches": 0}, "use 1 to 16"),
        ({"dp": 3}, "such as 4"),
        ({"dp": 4, "microbatches": 8}, "less rows each"),
        ({"ranks": 2.5}, "whole numbers"),
        ({"bandwidth": 0}, "bandwidth=0 cannot be"),
        ({"ranks": 32, "fewer": False}, "more stages than the 16 layers"),
        ({"memory": None}, "memory is None for 4 ranks: give bytes above 0"),
        ({"memory": [1e9, None]}, "give bytes above 0"),
        ({"microbatches": "8"}, "microbatches='8': give a whole number"),
        ({"microbatches": 4.0}, "microbatches=4.0: give a whole number"),
        ({"dp": None}, "dp=None: give a whole number"),
        ({"speeds": 0.5}, "speeds are 0.5 for 4 ranks"),
        ({"optimizer": None}, "optimizer=None cannot be"),
        ({"optimizer": float("inf")}, "optimizer=inf cannot be: give a number of 0 or more"),
        ({"seed": None}, "seed=None: give a whole number"),
        ({"microbatches": []}, r"microbatches=\[\]: give a whole number"),
        ({"schedules": 3}, "no schedule 3: choose from"),
        ({"schedules": [["1f1b"]]}, r"no schedule \['1f1b'\]"),
        ({"effort": ["quick"]}, r"effort=\['quick'\]: use quick"),
    ],
)
def test_what_cannot_be_planned_for_is_told(wrong, message):
    with pytest.raises(PenstockError, match=message):
        quick(**wrong)


@pytest.mark.costly
def test_numbers_of_numpy_are_numbers(tmp_path):
    np = pytest.importorskip("numpy")
    counts = {"ranks": 4, "batch": 16, "dp": 1, "microbatches": 8, "seed": 3, "cores": 2, "optimizer": 2}
    amounts = {"memory": [1e9] * 4, "speeds": [1, 0.5, 1, 1], "send": 0.5, "bandwidth": 2e9, "action": 0.25}
    given = {name: np.int64(value) for name, value in counts.items()}
    given |= {name: np.array(value, dtype=np.float32)[()] for name, value in amounts.items()}
    [found, *_], [same, *_] = quick(**given), quick(**counts, **amounts)
    assert found == same
    found.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == found
    measured = ModelProfile.from_layers([LayerCost("a", np.float32(0.5), 1, 1)], rows=np.int64(8))
    measured.save(tmp_path / "layers.json")
    assert ModelProfile.load(tmp_path / "layers.json") == measured


def test_layers_that_take_no_time_are_told():
    with pytest.raises(PenstockError, match=r"what ps\.plan\.measure returns, or a list of ps\.plan\.LayerCost"):
        plan(LayerCost("a", 1, 1, 1), 1, 1e9, batch=1)
    with pytest.raises(PenstockError, match="all layers take 0 seconds"):
        plan([LayerCost("a", 0, 0, 0)], 1, 1e9, batch=1)


def test_replicas_share_ranks_and_rows_and_sum_what_their_parameters_are():
    options = {"schedules": "1f1b", "fewer": False, "microbatches": 4}
    one, two, four = (quick(dp=dp, bandwidth=1e9, **options)[0] for dp in (1, 2, 4))
    assert (one.dp, one.ranks, two.dp, two.ranks) == (1, 4, 2, 2)
    summed = 2 * (2 - 1) / 2 * 8 * MB / 1e9  # a ring of two: half of the 8 layers' gradients there, half back
    assert two.seconds == pytest.approx(two.timeline.makespan + summed)
    assert two.bound <= two.seconds
    best = quick(dp=[1, 2, 4], bandwidth=1e9, **options)[0]
    assert best == min(one, two, four, key=lambda value: value.seconds) == four  # no pipeline, no bubble
    assert "on 1 rank, 4 replicas" in str(best)
    assert "the replicas sum their gradients" in quick(dp=4, bandwidth=1e7, **options)[0].why


def test_memory_is_that_of_the_largest_microbatch():
    even, uneven = (quick(batch=batch, microbatches=4, schedules="1f1b", fewer=False)[0] for batch in (8, 5))
    assert uneven.costs.act == even.costs.act  # of 2, 1, 1, 1 rows
    assert uneven.seconds < even.seconds


@pytest.mark.slow
def test_replicas_asked_for_twice_are_tried_once_and_batches_nobody_divides_are_planned_for():
    few = {"schedules": ["1f1b", "zb-v"], "microbatches": [4, 8]}
    assert quick(dp=[2, 2], **few) == quick(dp=2, **few)
    with pytest.raises(PenstockError, match="nothing fits"):
        quick(memory=1e3, dp=[2, 2], **few)
    assert quick(batch=127, ranks=8, schedules="1f1b")[0].microbatches == 32


def test_noise_leaves_the_sum_of_gradients_in_the_step():
    found = quick(dp=2, bandwidth=1e9, schedules="1f1b", microbatches=4)[0]
    assert robustness(found, share=0.0, draws=3) == pytest.approx((found.seconds, found.seconds))


def test_a_plans_stages_predict_its_own_step_and_other_tables():
    found = quick(send=0.001, bandwidth=1e9, schedules="1f1b", microbatches=8)[0]
    assert found.measurement.predict(found.schedule).makespan == pytest.approx(found.timeline.makespan)
    other = build("gpipe", 4, 8)
    assert found.measurement.predict(other).makespan == pytest.approx(simulate(other, found.costs).makespan)


def test_schedules_that_need_more_stages_than_there_are_layers_are_told():
    with pytest.raises(PenstockError, match="zb-v: all have more stages than the 1 layers"):
        plan(layers(1), 1, 1e9, batch=1, schedules=["zb-v"], effort="quick")


@pytest.mark.slow
def test_no_plan_is_below_the_bound():
    line = layers(head=5.0)
    for ranks in (1, 3, 5):
        for found in plan(line, ranks, 1e12, batch=12, effort="quick"):
            bound = min_step_seconds(
                ModelProfile.from_layers(line).costs_at(12 / found.microbatches), found.ranks, found.microbatches
            )
            assert found.seconds >= bound * (1 - 1e-9)


SLICED = [("1f1b", {"slices": 3}), ("zb-h1", {"slices": 4}), ("interleaved-1f1b", {"slices": 2})]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in FAMILIES if name != "dualpipe-v"), *SLICED])
def test_a_timed_table_takes_what_the_simulator_says(name, options):
    schedule = build(name, 3, 5, **options)
    stages = schedule.stages
    forward, inputs, weights = ([1 + (stage * step) % 5 for stage in range(stages)] for step in (2, 3, 4))
    table, full = ScheduleTimer(schedule), [i + w for i, w in zip(inputs, weights, strict=True)]
    lags = [0.5 * (a != b) for a, b in pairwise(schedule.placement)]
    planned = simulate(schedule, Costs(forward, inputs, weights, send=0.5))
    assert table.makespan([*forward, *full, *inputs, *weights], [*lags, 0]) == pytest.approx(planned.makespan)
    shared = table.makespan([*forward, *full, *inputs, *weights], [*lags, 0], cores=1)
    assert sum(planned.busy) <= shared * (1 + 1e-9)
    assert planned.makespan <= shared * (1 + 1e-9)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in FAMILIES), *SLICED])
def test_a_timed_table_takes_no_less_than_its_least(name, options):
    table = ScheduleTimer(build(name, 4, 8, **options))
    stages = len(table.placement)
    costs = [cost for cost in (1.0, 2.0, 1.0, 1.0) for _ in range(stages)]
    assert table.makespan_lower_bound(costs) <= table.makespan(costs, [0.0] * stages) * (1 + 1e-9)


@pytest.mark.parametrize(("name", "options"), [("1f1b", {}), ("zb-v", {}), ("v-min", {}), *SLICED])
def test_the_fullest_that_a_table_makes_its_ranks_is_what_the_simulator_says(name, options):
    timer, act, keep = ScheduleTimer(build(name, 4, 9, **options)), 3.0, 5.0
    peaks = simulate(timer.schedule, Costs(act=act, keep=keep)).peak_memory
    sizes = [act, keep] * (timer.schedule.num_stages // 4)
    fullest = [max(sum(map(float.__mul__, sizes, map(float, row))) for row in rows) for rows in timer.peak_counts]
    assert fullest == pytest.approx(peaks)


def test_gradients_that_wait_for_earlier_slices_take_memory():
    line = [layer._replace(keys_and_values=8 * MB) for layer in layers(8)]
    for slices, more in ((1, 0.0), (4, 0.75 * 2 * 8 * MB)):  # two layers a stage
        with_keys, without = (
            plan(some, 4, 1e9, batch=4, microbatches=4, schedules="1f1b", slices=slices, fewer=False, effort="quick")[0]
            for some in (line, layers(8))
        )
        assert list(with_keys.costs.act) == pytest.approx([act + more for act in without.costs.act])
        held = with_keys.timeline.peak_in_flight
        extra = [with_ - peak for with_, peak in zip(with_keys.peak_memory, without.peak_memory, strict=True)]
        assert extra == pytest.approx([more * in_flight for in_flight in held])


@pytest.mark.costly
def test_slices_are_planned_where_they_make_the_step_shorter(tmp_path):
    families = {"schedules": ["1f1b", "zb-h1"], "microbatches": 4}
    whole, sliced = (quick(slices=slices, fewer=False, bandwidth=1e9, send=1e-5, **families)[0] for slices in (1, [1, 4]))
    assert sliced.schedule.slices == 4
    assert sliced.bound <= sliced.seconds < whole.seconds
    assert sliced.seconds == pytest.approx(simulate(sliced.schedule, sliced.costs).makespan)
    assert max(sliced.peak_memory) <= max(whole.peak_memory)
    assert robustness(sliced, share=0.0, draws=1) == pytest.approx((sliced.seconds, sliced.seconds))
    assert "4 microbatches in 4 slices: " in str(sliced)
    sliced.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json").timeline == sliced.timeline

    dear_actions = quick(slices=[1, 4], action=0.02, **families)[0]  # each slice is one more action of 20 ms
    assert dear_actions.schedule.slices == 1


def test_slices_that_cannot_be_planned_are_refused():
    with pytest.raises(PenstockError, match="slices=0: a microbatch is cut into 1 slice or more"):
        quick(slices=[2, 0])
    told = "v-min, zb-v: without slices, so slices=2 cannot be planned; gpipe, 1f1b, interleaved-1f1b, zb-h1 have them"
    with pytest.raises(PenstockError, match=told):
        quick(slices=2, schedules=["v-min", "zb-v"])


@pytest.mark.slow
def test_a_plan_is_read_as_it_was_written(tmp_path):
    found = quick(memory="100MB", ranks=8, dp=2, send=0.001)[0]
    found.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json")
    assert again == replace(found, costs=again.costs)
    assert again.timeline == found.timeline


NO_PLANS = [{"format": "x"}, {"cuts": []}, {"microbatches": 3}, {"recompute": [1]}, {"schedule": None}, {"bound": 0}, {"dp": 0}]
NO_PLANS += [{"seconds": float("nan")}, {"batch": -1}, {"peak_memory": [1.0]}, {"peak_memory": [-1.0] * 4}]


@pytest.mark.costly
@pytest.mark.parametrize("change", NO_PLANS)
def test_a_file_that_is_no_plan_is_refused(tmp_path, change):
    path = tmp_path / "plan.json"
    quick(schedules="1f1b", microbatches=4)[0].save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PenstockError, match="is no plan"):
        load(path)


def test_layers_are_read_as_they_were_written_and_lie_on_a_line(tmp_path):
    few, many = (layers(3)[0]._replace(forward=seconds) for seconds in (0.003, 0.009))
    known = ModelProfile((*ModelProfile.from_layers([few], 2).samples, *ModelProfile.from_layers([many], 8).samples))
    known.save(tmp_path / "costs.json")
    assert ModelProfile.load(tmp_path / "costs.json") == known
    assert known.costs_at(4)[0].forward == pytest.approx(0.005)
    assert known.costs_at(16)[0].forward == pytest.approx(0.017)
    assert known.costs_at(16)[0].parameters == few.parameters
    steep = ModelProfile(
        (*ModelProfile.from_layers([few], 2).samples, *ModelProfile.from_layers([many._replace(forward=0.03)], 8).samples)
    )
    assert steep.costs_at(1)[0].forward == pytest.approx(0.0015)  # on the line it would be nothing
    noisy = ModelProfile(
        (*ModelProfile.from_layers([few], 2).samples, *ModelProfile.from_layers([many._replace(forward=0.001)], 8).samples)
    )
    assert noisy.costs_at(64)[0].forward == few.forward  # more rows take no less


def test_layers_that_several_ranks_measured_count_with_the_mean():
    fast, slow = (
        [LayerCost("a", 1.0, 2.0, 3.0), LayerCost("b", 4.0, 0.0, 2.0)],
        [LayerCost("a", 3.0, 4.0, 3.0), LayerCost("b", 5.0, 0.0, 4.0)],
    )
    mean = ModelProfile.mean_of(
        [ModelProfile((ProfileSample(2, tuple(fast)), ProfileSample(8, tuple(value)))) for value in (fast, slow)]
    )
    assert mean.samples[0] == (2, tuple(fast))
    assert mean.samples[1] == (8, (LayerCost("a", 2.0, 3.0, 3.0), LayerCost("b", 4.5, 0.0, 3.0)))


def test_microbatches_much_larger_than_those_that_were_measured_are_tried_only_if_asked():
    known = ModelProfile(
        tuple(ModelProfile.from_layers(layers(), rows).samples[0] for rows in (1, 4))
    )  # as long for 4 rows as for 1
    find = partial(plan, known, 2, 1e9, batch=32, effort="quick", schedules="1f1b")
    assert find()[0].microbatches == 4
    assert find(microbatches=1)[0].microbatches == 1
