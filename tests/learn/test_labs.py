"""Every lab runs, says what it measured, and notices when something is off."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prompt import python, torchrun
from slow_cases import slow_except

import penstock as ps
from penstock import schedule
from penstock.learn import buckets, devices, lab_helpers, lab_list
from penstock.learn.devices import EmulatedLayer, emulated_step
from penstock.learn.labs import (
    lab1_monolith,
    lab3_ping_pong,
    lab4_naive,
    lab5_gpipe,
    lab6_1f1b,
    lab7_interleaved,
    lab8_zero_bubble,
    lab9_your_schedule,
    lab10_collectives,
    lab11_data_parallel,
    lab12_tensor_parallel,
    lab13_two_axes,
    lab14_recompute_store_communicate,
    lab17_hardware,
    lab18_overlap,
    lab19_sequence,
    lab20_stale,
    lab21_lengths,
    lab22_teacher,
)
from penstock.python_file import table_from_source
from penstock.schedule import Costs, Kind

ROOT = Path(__file__).parents[2]


def ends_with_a_measurement(output: str) -> bool:
    last = output.partition("\nTry: ")[0].rstrip().splitlines()[-1]
    return last.startswith("Measured: ") and any(map(str.isdigit, last))


def run_python(*args: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


AS_A_SCRIPT, UNDER_TORCHRUN = 10, 12  # the others run in this process, as `penstock lab` runs them
RUN_HERE = [number for number in lab_list.LABS if number not in (AS_A_SCRIPT, UNDER_TORCHRUN)]
QUICK = (1, 9, 11, 13, 17, 20, 21, 22)  # the others measure for more than two seconds
JUDGE_TIMES = {3: 1, 4: 2, 5: 5, 6: 1, 7: 3, 8: 6, 14: 4, 18: 4}  # how often a lab does


@pytest.fixture
def judged(monkeypatch):
    """What labs say of the times that they measured, once and however busy the machine is: no test fails of them."""
    facts: list[str] = []
    for number in JUDGE_TIMES:
        module = import_module(lab_list.LABS[number].module)
        monkeypatch.setattr(module, "best_of", lambda measure, error_of, good_enough: measure())
        monkeypatch.setattr(module, "check_time", lambda holds, fact, otherwise: facts.append(fact))
    return facts


@pytest.mark.ranks
@pytest.mark.parametrize("number", slow_except(QUICK, RUN_HERE))
def test_a_lab_passes_its_checks_and_ends_with_a_measurement(number, capsys, judged):
    lab_list.run(number)
    output = capsys.readouterr().out
    assert "checked: " in output or number in JUDGE_TIMES
    assert ends_with_a_measurement(output), output
    assert re.search(r"\nTry: .+[.?]\nThe file: .+\.py\n$", output, re.DOTALL)
    assert len(judged) == JUDGE_TIMES.get(number, 0)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_lab_runs_as_a_script_with_its_output_in_a_pipe():
    output = run_python("-m", lab_list.LABS[AS_A_SCRIPT].module)
    assert "checked: " in output
    assert ends_with_a_measurement(output), output
    assert "\033" not in output


@pytest.mark.slow
@pytest.mark.ranks
def test_a_lab_runs_under_torchrun_and_tells_its_story_once():
    done = torchrun(2, "-m", lab_list.LABS[UNDER_TORCHRUN].module)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert "checked: " in output
    assert ends_with_a_measurement(output), output
    assert output.count("Measured: ") == 1


def test_labs_are_numbered_from_one_and_have_files_of_their_names():
    assert list(lab_list.LABS) == list(range(1, len(lab_list.LABS) + 1))
    for number, lab in lab_list.LABS.items():
        assert lab.number == number
        assert lab.module.startswith(f"penstock.learn.labs.lab{number}_")
        assert (ROOT / (lab.module.replace(".", "/") + ".py")).exists()


def test_an_unknown_lab_is_refused_with_the_numbers_there_are():
    with pytest.raises(ps.PenstockError, match=r"no lab 99: choose one of 1, 2, 3"):
        lab_list.run(99)


@pytest.mark.costly
def test_lab_1_fails_when_the_model_learns_nothing(monkeypatch):
    def noise(centres, rows):
        return torch.randn(rows, centres.shape[1]), torch.randint(len(centres), (rows,))

    monkeypatch.setattr(lab1_monolith, "batch", noise)
    with pytest.raises(SystemExit, match="the model learns nothing"):
        lab1_monolith.main()


def test_lab_3_fits_latency_and_bandwidth_to_the_times_of_messages():
    times = {size: 50e-6 + size / 2e9 for size in (16, 4096, 2**20, 2**24)}
    latency, bandwidth = lab3_ping_pong.fit_latency_and_bandwidth(times)
    assert latency == pytest.approx(50e-6)
    assert bandwidth == pytest.approx(2e9)
    assert lab3_ping_pong.fit_error(times) == pytest.approx(1)
    assert lab3_ping_pong.fit_error({**times, 4096: 10 * times[4096]}) > lab3_ping_pong.MAX_FIT_ERROR


def test_lab_3s_agent_ends_all_ranks_when_one_has_failed():
    assert lab3_ping_pong.run_agent(2, "import os, sys\nsys.exit(int(os.environ['RANK']) > 9)") == [0, 0]
    first, second = lab3_ping_pong.run_agent(
        2, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)"
    )
    assert (first < 0, second) == (True, 7)


def test_lab_4_fails_when_more_than_one_rank_works_at_a_time(monkeypatch):
    def busy(function, ranks, *args):
        if function is emulated_step:
            return [schedule.simulate(args[0], Costs(0.010, 0.010, 0.010))] * ranks
        return [(0.9, None, 0.5, 0.5)] * ranks

    monkeypatch.setattr(lab4_naive, "on_ranks", busy)
    with pytest.raises(SystemExit, match=r"the ranks use 3.60 cores together: more than one of them works at a time"):
        lab4_naive.main()


def test_what_is_disturbed_is_measured_again_but_not_for_ever():
    measured = iter(range(10))
    assert lab_helpers.best_of(lambda: next(measured), lambda found: abs(found - 2), good_enough=0) == 2
    assert lab_helpers.best_of(lambda: next(measured), abs, good_enough=0, tries=3) == 3
    assert next(measured) == 6


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2)])
def test_a_picture_names_every_action_in_80_columns(name, stages, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = schedule.build(name, ranks=4, microbatches=8)
    drawn = lab_helpers.drawing(schedule.simulate(table, Costs(1 / stages, 1 / stages, 1 / stages)))
    assert max(map(len, drawn.splitlines())) <= 80
    for action in {action for row in table.actions for action in row}:
        assert str(action)[0 if stages > 1 else 1 :] in drawn


def test_lab_5_fails_when_the_bubble_is_another_schedules(monkeypatch):
    def naive_step(ranks, microbatches):
        return schedule.simulate(schedule.build("naive", ranks=ranks, microbatches=microbatches))

    monkeypatch.setattr(lab5_gpipe, "measured_step", naive_step)
    with pytest.raises(SystemExit, match=r"with 2 microbatches the bubble should be 60.0 %: .* measured 75.0 %"):
        lab5_gpipe.main()


def test_lab_6_fails_when_an_activation_outlives_its_backward(monkeypatch):
    def leaking(function, ranks, name):
        timeline = schedule.simulate(schedule.build(name, ranks=ranks, microbatches=lab6_1f1b.MICROBATCHES), Costs())
        return [(timeline, 8)] * ranks

    monkeypatch.setattr(lab6_1f1b, "on_ranks", leaking)
    with pytest.raises(SystemExit, match=r"1f1b kept \(8, 8, 8, 8\) .* the table says \(4, 3, 2, 1\)"):
        lab6_1f1b.main()


def test_lab_7_fails_when_the_bubble_is_not_divided(monkeypatch):
    def without_interleaving(function, ranks, table, forward, backward):
        return [lab7_interleaved.simulate_table(lab7_interleaved.build(ranks, 1))] * ranks

    monkeypatch.setattr(lab7_interleaved, "on_ranks", without_interleaving)
    monkeypatch.setattr(lab7_interleaved, "TOLERANCE", 0.1)
    with pytest.raises(SystemExit, match=r"bubble of interleaved-1f1b should be 15.8 %: simulated 15.8 %, measured 27.3 %"):
        lab7_interleaved.main()


def test_lab_7_finds_the_send_cost_from_which_interleaving_is_slower():
    plain, interleaved = lab7_interleaved.build(4, 1), lab7_interleaved.build(4, 2)
    limit = lab7_interleaved.break_even_send_seconds(plain, interleaved)
    for send, pays in ((0.99 * limit, True), (1.01 * limit, False)):
        times = [lab7_interleaved.simulate_table(table, send=send).makespan for table in (interleaved, plain)]
        assert (times[0] < times[1]) is pays


AS_PLANNED = Costs(0.01, 0.01, 0.01)


def lab_8_with(monkeypatch, costs=AS_PLANNED, gradient=lambda name: torch.ones(2)):
    """Lab 8 on devices and a model that are not there: what `costs` say, and `gradient(name of the schedule)`."""

    def run(function, ranks, table, layers):
        part = table.ranks / table.stages
        scaled = Costs(part * costs.forward, part * costs.backward_input, part * costs.backward_weight)
        return [(schedule.simulate(table, scaled), {"weight": gradient(table.name)})] * ranks

    monkeypatch.setattr(lab8_zero_bubble, "on_ranks", run)
    lab8_zero_bubble.main()


def test_lab_8_fails_when_a_gradient_differs_in_a_bit(monkeypatch):
    one_bit = torch.tensor([1.0, 1.0 + torch.finfo(torch.float32).eps])
    with pytest.raises(SystemExit, match="zb-h2 has 1 gradients, of which 0 are those of 1f1b, which has 1"):
        lab_8_with(monkeypatch, gradient=lambda name: one_bit if name == "zb-h2" else torch.ones(2))


def test_lab_8_fails_when_the_backward_is_not_in_two(monkeypatch):
    monkeypatch.setattr(lab8_zero_bubble, "TOLERANCE", 1.0)
    with pytest.raises(SystemExit, match=r"an I takes 20.0 ms and a W 0.0 ms, not 10 and 10"):
        lab_8_with(monkeypatch, Costs(0.01, 0.02, 0))


def test_lab_8_fails_when_the_bubble_stays(monkeypatch):
    with pytest.raises(SystemExit, match=r"1f1b should take 330 ms and little more, it took 561"):
        lab_8_with(monkeypatch, Costs(0.03, 0.02, 0.001))


def test_two_steps_back_to_back_take_each_rank_its_own_time():
    table = schedule.build("zb-h2", ranks=4, microbatches=8)
    once, twice = (schedule.simulate(value) for value in (table, lab8_zero_bubble.two_steps(table)))
    assert (once.makespan, once.span, twice.makespan) == (27, 24, 51)
    schedule.verify(lab8_zero_bubble.two_steps(table))


ZB_H1 = """
def schedule(rank, ranks, microbatches):
    forwards = iter(range(microbatches))
    for _ in range(min(ranks - rank, microbatches)):
        yield f"{rank}F{next(forwards)}"
    for backward in range(microbatches):
        yield f"{rank}I{backward}"
        if backward >= rank:
            yield f"{rank}W{backward - rank}"
        for forward in forwards:
            yield f"{rank}F{forward}"
            break
    for weights in range(microbatches - rank, microbatches):
        yield f"{rank}W{weights}"
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_lab_9_judges_the_schedule_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ZB_H1)
    output = python(Path(lab9_your_schedule.__file__), file).stdout
    assert f"{file}: the target is reached" in output
    assert "checked: all 10 gradients" in output
    assert ends_with_a_measurement(output), output


def test_lab_9_hands_out_a_schedule_that_deadlocks_and_never_overwrites_one(tmp_path, capsys):
    file = tmp_path / "my_schedule.py"
    for first in (True, False):
        with pytest.raises(SystemExit, match=r"my_schedule.py deadlocks:\n    rank 0 waits for .*\n    rank 1 waits for"):
            lab9_your_schedule.main(str(file))
        assert ("my_schedule.py is new" in capsys.readouterr().out) is first
    file.write_text("x = 1")
    with pytest.raises(SystemExit, match=r"my_schedule.py has no function schedule\(rank, ranks, microbatches\)"):
        lab9_your_schedule.main(str(file))
    assert file.read_text() == "x = 1"


def test_lab_9_says_how_far_the_target_is(monkeypatch, tmp_path, capsys):
    def run(function, ranks, table):
        return [lab9_your_schedule.Trial(lab9_your_schedule.simulate_equal_stages(table), 2, ())] * ranks

    monkeypatch.setattr(lab9_your_schedule, "on_ranks", run)
    file = tmp_path / "gpipe.py"
    rows = '[f"{rank}F{m}" for m in range(microbatches)] + [f"{rank}B{m}" for m in range(microbatches)]'
    file.write_text(f"def schedule(rank, ranks, microbatches):\n    return {rows}\n")
    with pytest.raises(SystemExit, match=r"gpipe.py misses the target: 6 units of time too many and 4 in flight too many"):
        lab9_your_schedule.main(str(file))
    assert ends_with_a_measurement(capsys.readouterr().out)


def test_lab_9_hides_what_mends_its_schedule_until_asked(monkeypatch, capsys):
    results, mended = [], []
    monkeypatch.setattr(lab9_your_schedule, "judge", lambda table: (results.append(table.name), ("judged 1", ""))[1])
    for fix in (False, True):
        lab_list.run(9, fix=fix)
        mended.append(lab9_your_schedule.REPAIR in capsys.readouterr().out)
    assert (results, mended) == (["1f1b", "the mended my_schedule.py"], [False, True])
    with pytest.raises(ps.PenstockError, match="lab 3 has nothing to mend: leave --fix out, or choose lab 9"):
        lab_list.run(3, fix=True)


def test_lab_9_fails_when_a_gradient_differs_from_one_process(monkeypatch):
    def run(function, ranks, table):
        return [lab9_your_schedule.Trial(lab9_your_schedule.simulate_equal_stages(table), 2, ("0.weight",))] * ranks

    monkeypatch.setattr(lab9_your_schedule, "on_ranks", run)
    with pytest.raises(SystemExit, match=r"4 of 8 gradients differ from one process: 0.weight, "):
        lab9_your_schedule.main()


@pytest.mark.ranks
def test_lab_9_adds_up_in_the_order_of_the_table():
    rule = """
def schedule(rank, ranks, microbatches):
    yield from (f"{rank}F{m}" for m in range(microbatches))
    yield from (f"{rank}I{m}" for m in reversed(range(microbatches)))
    yield from (f"{rank}W{m * (rank + 2) % microbatches}" for m in range(microbatches))
"""
    trials = lab_helpers.on_ranks(lab9_your_schedule.run_on_rank, 2, table_from_source("shuffled", rule, 2, 7))
    assert [(trial.num_gradients, trial.different_names) for trial in trials] == [(2, ()), (4, ())]


def test_a_written_schedule_places_each_stage_where_its_actions_are():
    table = schedule.build("zb-v", ranks=3, microbatches=4)
    rule = f"def schedule(rank, ranks, microbatches): return {table.csv_rows()}[rank]"
    assert table_from_source("zb-v", rule, 3, 4) == table


@pytest.mark.ranks
def test_the_collectives_by_hand_are_those_of_torch_on_any_number_of_ranks():
    for seen in lab_helpers.on_ranks(lab10_collectives.run_all_collectives, 3):
        assert [name for name, (result, backward) in seen.items() if not (result.equals_torch and backward)] == []
    assert [states[-1] for states in lab_helpers.on_ranks(lab10_collectives.ring_states, 3)] == ["3 3 3"] * 3


def backward_of_an_all_gather(claimed: str) -> bool:
    lab10_collectives.COLLECTIVES["all-gather"] = replace(lab10_collectives.COLLECTIVES["all-gather"], backward=claimed)
    return lab10_collectives.backward_holds(lab10_collectives.RankGroup.join(), "all-gather")


@pytest.mark.ranks
def test_lab_10_tells_a_backward_from_another_collective():
    for claimed, holds in (("reduce-scatter", True), ("all-to-all", False)):
        assert lab_helpers.on_ranks(backward_of_an_all_gather, 3, claimed) == [holds] * 3


def test_lab_10_fails_when_torch_makes_something_else(monkeypatch):
    def run(function, ranks):
        zeros = torch.zeros(ranks)
        seen = {
            name: (lab10_collectives.CollectiveResult(zeros, zeros, name != "gather"), True)
            for name in lab10_collectives.COLLECTIVES
        }
        return [seen] * ranks

    monkeypatch.setattr(lab10_collectives, "on_ranks", run)
    with pytest.raises(SystemExit, match=r"torch has other results for gather$"):
        lab10_collectives.main()


def test_lab_11_fails_when_the_gradient_or_a_replica_is_another(monkeypatch):
    def run(function, ranks):
        return [replica._replace(weights=weights) for weights in trained]

    trained, one_bit = [torch.zeros(2), torch.zeros(2)], torch.tensor([0.0, torch.finfo(torch.float32).tiny])
    replica = lab11_data_parallel.Replica(3, 1.0, 0.3, 0.02, 0.0, trained[0], trained[0])
    monkeypatch.setattr(lab11_data_parallel, "on_ranks", run)
    with pytest.raises(SystemExit, match="the weighted sum of the gradients is 2e-02 off"):
        lab11_data_parallel.main()
    replica, trained[1] = replica._replace(weighted_error=0.0), one_bit
    with pytest.raises(SystemExit, match="only 1 of 2 replicas have the weights of rank 0"):
        lab11_data_parallel.main()


def test_some_buckets_are_better_than_one_and_than_one_for_each_layer():
    ends = [buckets.plan_backward(count)[-1].end for count in lab18_overlap.BUCKETS]
    layers, backward = buckets.NUM_LAYERS, buckets.BACKWARD_SECONDS
    assert ends[0] == pytest.approx(layers * backward + buckets.all_reduce_seconds(layers))
    assert ends[-1] == pytest.approx(backward + layers * buckets.all_reduce_seconds(1))
    assert min(ends) not in (ends[0], ends[-1])


@pytest.mark.ranks
def test_ring_attention_is_that_of_one_process_on_any_number_of_ranks():
    assert (
        max(max(result.values()) for result in lab_helpers.on_ranks(lab19_sequence.compare_ring_attention, 3))
        < lab19_sequence.EXACT
    )


def test_a_mesh_with_its_pipeline_outermost_keeps_all_but_activations_within_a_machine():
    assert lab17_hardware.count_crossing_pairs(("pp", "dp", "tp")) == {"pp": 4, "dp": 0, "tp": 0}
    assert lab17_hardware.count_crossing_pairs(("dp", "tp", "pp")) == {"pp": 0, "dp": 4, "tp": 0}


def test_a_stage_that_never_drains_is_as_many_steps_behind_as_there_are_ranks_after_it():
    assert [lab20_stale.staleness(lab20_stale.endless_schedule(), stage) for stage in range(4)] == [3, 2, 1, 0]
    assert lab20_stale.distance_after_descent(1.9, 0) < 1 < lab20_stale.distance_after_descent(1.9, 1)


def test_lab_21_fails_when_another_order_takes_less(monkeypatch):
    monkeypatch.setattr(lab21_lengths, "plan_order", lambda costs, table: list(range(len(costs))))
    with pytest.raises(SystemExit, match="the planned order takes 76, the best of all 59"):
        lab21_lengths.main()


def test_the_teachers_forwards_by_hand_are_as_long_as_the_pictures_say():
    times = {name: schedule.simulate(lab22_teacher.place(name, at)).makespan for name, at in lab22_teacher.PLACEMENTS.items()}
    assert times == {"at the start": 41, "at the end": 44, "in the gaps": 38}


@pytest.mark.slow
@pytest.mark.ranks
def test_lab_22_fails_when_the_teacher_is_trained_with_other_outputs(monkeypatch):
    monkeypatch.setattr(lab22_teacher, "distillation_loss", lambda output, target, teacher_output: output.sum())
    with pytest.raises(SystemExit, match=r"losses are .*, in one process"):
        lab22_teacher.check_training(lab22_teacher.place("by hand", lab22_teacher.in_the_gaps))


def off_without_sum_gradients() -> list[str]:
    lab12_tensor_parallel.SumGradients.backward = staticmethod(lambda ctx, gradient: gradient)
    return [name for name, pair in lab12_tensor_parallel.compare_blocks().compared.items() if pair.errors[0] > 1e-3]


@pytest.mark.ranks
def test_without_the_all_reduce_of_the_backward_only_the_gradient_of_the_input_is_wrong():
    assert lab_helpers.on_ranks(off_without_sum_gradients, 2) == [["X.grad"]] * 2


def test_lab_12_fails_when_a_gradient_is_off(monkeypatch):
    def run(function, ranks):
        pair = lab12_tensor_parallel.ComparedPart((2, 2), (2, 1), (0.5, 0.0))
        return [lab12_tensor_parallel.RankResult({"0.weight.grad": pair}, 0, [1, 1], 1)] * ranks

    monkeypatch.setattr(lab12_tensor_parallel, "on_ranks", run)
    with pytest.raises(SystemExit, match="by hand they are 5e-01 off"):
        lab12_tensor_parallel.main()


def test_lab_13_fails_when_replicas_or_the_weights_of_one_process_are_others():
    zero, one = torch.zeros(1), torch.ones(1)
    with pytest.raises(SystemExit, match=r"replicas have different b$"):
        lab13_two_axes.check_weights([{"a": zero}, {"a": zero}, {"b": zero}, {"b": one}], {"a": zero, "b": zero})
    with pytest.raises(SystemExit, match=r"the weights are 1e\+00 off"):
        lab13_two_axes.check_weights([{"a": zero}, {"a": zero}, {"b": one}, {"b": one}], {"a": zero, "b": zero})


def test_lab_14_fails_when_a_block_keeps_more_or_gradients_differ():
    lab = lab14_recompute_store_communicate
    dim, rows = next(iter(lab.SIZES.items()))
    size = 4 * dim * rows * lab.BLOCKS
    held = {lab.STORE: (9 * size, 0), lab.RECOMPUTE: (size, 0), lab.COMMUNICATE: (0, 9 * size)}
    seconds = {lab.STORE: 1.0, lab.RECOMPUTE: 1.5, lab.COMMUNICATE: 19.0}
    trial = lab.ActivationTrial(held, seconds, equal=True, recompute_seconds=0.5, bandwidth=size)
    assert [trial.expected_seconds(method) for method in lab.METHODS] == [0, 0.5, 18]
    lab.check_trial(dim, trial)
    with pytest.raises(SystemExit, match="the gradients depend on the way"):
        lab.check_trial(dim, replace(trial, equal=False))
    with pytest.raises(SystemExit, match=r"they hold .*'recompute': \(2.0, 0.0\)"):
        lab.check_trial(dim, replace(trial, held_bytes=held | {lab.RECOMPUTE: (2 * size, 0)}))
    with pytest.raises(SystemExit, match=r"to recompute, a step of dim .* should take 1500.0 ms, it takes 4000.0"):
        lab.check_trial(dim, replace(trial, seconds=seconds | {lab.RECOMPUTE: 4.0}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("(", r"mine.py, line 2: '\(' was never closed"),
        (
            "import nothing_there",
            r"mine.py, line 2: ModuleNotFoundError: No module named 'nothing_there', in schedule\(0, 2, 3\)",
        ),
        ("yield [][rank]", r"mine.py, line 2: IndexError: list index out of range, in schedule\(0, 2, 3\)"),
        ("yield f'{rank}X0'", r"mine.py: cannot read '0X0' as an action: .* it is action 1 that schedule\(0, 2, 3\) yields"),
        ("yield 3", r"mine.py: cannot read '3' as an action"),
        ("pass", r"mine.py: schedule\(0, 2, 3\) returns None: let it yield actions"),
        ("while True: yield '0F0'", r"mine.py: schedule\(0, 2, 3\) yields more than 10000 actions: does it ever end\?"),
        ("yield f'{2 * rank}F0'", "mine.py: stage 1 is on no rank; number the stages from 0 without a gap"),
    ],
)
def test_what_is_wrong_with_a_written_schedule_is_told_in_one_line(body, message):
    with pytest.raises(ps.ScheduleError, match=message) as refused:
        table_from_source("mine.py", f"def schedule(rank, ranks, microbatches):\n    {body}\n", 2, 3)
    assert "\n" not in str(refused.value)


def test_a_written_schedule_of_other_parameters_is_refused():
    with pytest.raises(
        ps.ScheduleError, match=r"mine.py: TypeError: schedule\(\) takes 1 positional argument but 3 were given"
    ):
        table_from_source("mine.py", "def schedule(rank):\n    yield f'{rank}F0'\n", 2, 3)


@pytest.mark.ranks
def test_a_lab_for_two_ranks_says_so_when_torchrun_started_three(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="runs on 2 ranks, torchrun started 3: use --nproc-per-node 2"):
        lab_helpers.on_ranks(lab3_ping_pong.ping_pong, 2)


def test_only_rank_0_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    lab_helpers.say("hello")
    assert capsys.readouterr().out == ""


def test_an_emulated_layer_takes_its_time_and_multiplies(monkeypatch):
    slept = []
    monkeypatch.setattr(devices, "time", SimpleNamespace(sleep=slept.append))
    layer = EmulatedLayer(3, forward_seconds=0.02, backward_seconds=0.04)
    hidden = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    output = layer(hidden)
    assert slept == [0.02]
    output.sum().backward()
    assert slept == [0.02, 0.04]
    assert torch.equal(output, hidden)
    assert torch.equal(layer.weight.grad, torch.tensor([5.0, 7.0, 9.0]))
    assert torch.equal(hidden.grad, torch.ones(2, 3))


@pytest.mark.ranks
def test_an_emulated_device_takes_the_time_of_its_weights_in_w():
    table = schedule.build("zb-h1", ranks=2, microbatches=3)
    timeline = lab_helpers.on_ranks(emulated_step, 2, table, 0.01, 0.02, 0.03)[0]
    least = {Kind.F: 0.01, Kind.I: 0.02, Kind.W: 0.03, Kind.B: 0.05}
    assert {event.action.kind for event in timeline.events} == set(least)
    for event in timeline.events:
        assert event.end - event.start >= least[event.action.kind], event
