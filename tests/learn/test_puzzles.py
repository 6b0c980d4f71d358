"""Every puzzle: its solution passes, wrong ones fail with a sentence that says what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.learn.puzzles.check_helpers import CheckFailed
from penstock.learn.puzzles.puzzle_files import FAST_TRACK, PUZZLE_NUMBERS, LearnerFolder, load_puzzle

RANKS = {4, 6, 10, 16, 17, 18, 20}
EVERY = [pytest.param(number, marks=[pytest.mark.ranks] if number in RANKS else []) for number in PUZZLE_NUMBERS]

# number -> (text of the solution, what replaces it, the message)
WRONG = {
    1: [
        ("rank * layers // ranks", "rank * (layers // ranks)", "layers 8, 9 are on no rank"),
        ("rank * layers // ranks for rank in range(ranks + 1)]",
         "rank * (layers // ranks) for rank in range(ranks)] + [layers]",
         "the slowest rank has 4 layers, 3 would do"),
    ],
    2: [
        ("adam = 2 * 4", "adam = 4", "12.8 GB, 4 GB too few"),
        ("4 * activations * in_flight", "4 * activations", "16.2 GB, it should be 16.8 GB"),
    ],
    3: [
        ("if rank % 2 == 0", "if True", "2 ranks deadlock: rank 0 waits to send, rank 1 waits to send"),
        ("if rank % 2 == 0", "if rank", "4 ranks need 4 rounds, the target is 3"),
    ],
    4: [
        (".requires_grad_()", "", "None cannot be sent"),
        ("        output.backward(receive(output.shape, source=1))", "        receive(output.shape, source=1)",
         "rank 0: 0.weight has no gradient"),
    ],
    5: [
        ("sum(mean * count for mean, count in zip(means, counts, strict=True) if count) / sum(counts)",
         "sum(means) / len(means)",
         r"3.5 \(the mean of means\)"),
        (" if count)", ")", "is nan: ignore a microbatch"),
    ],
    6: [
        ("torch.full_like(output, shares[m])", "torch.ones_like(output)", "of 0.weight differs .* times the right one"),
        ("activations.append((value, output))", "activations.insert(0, (value, output))", "differs from one process"),
    ],
    7: [
        ("(ranks - 1) / (microbatches + ranks - 1)", "(ranks - 1) / microbatches", r"is \d+.\d%, simulated it is"),
        ("math.ceil((ranks - 1) * (1 - most) / most - 1e-9)", "math.ceil((ranks - 1) / most)", "would do"),
    ],
    8: [
        ('["0B0", "1B0", "1F1", "0F1"]', '["0B0", "0F0", "1F1", "0F1"]', "0F0 is not in the cycle"),
        ('["1F0", "1B0", "1F1", "1B1"]', '["1F1", "1F0", "1B0", "1B1"]', "deadlocks"),
    ],
    9: [
        ("warmup = min(ranks - 1 - rank, microbatches)", "warmup = microbatches", "8 microbatches in flight, the target is 4"),
        ("warmup = min(ranks - 1 - rank, microbatches)", "warmup = min(rank, microbatches)", "deadlocks"),
    ],
    10: [
        ("        del value, output  # frees the activations of the layers too\n", "", "rank 0 of 4 holds 5 microbatches"),
        ("warmup = min(ranks - 1 - rank, microbatches)", "warmup = microbatches", "holds 8 microbatches at once, 1F1B holds"),
    ],
    11: [
        ("for chunk in (1, 0) for m in group]", "for chunk in (0, 1) for m in group]", "deadlocks"),
        ("ranks + 2 * (ranks - 1 - rank)", "2 * ranks + 2 * (ranks - 1 - rank)", "microbatches in flight, the target is 5.5"),
    ],
    12: [
        ("dy @ weight", "dy.t() @ x", r"dx has the shape \(4, 3\), it should be \(5, 3\)"),
        ("dy.sum(0)", "dy.mean(0)", "db differs from one process"),
    ],
    13: [
        ("        if m >= rank:\n            yield next(weights)\n", "", "8 microbatches in flight, the target is 4"),
        ("min(ranks - rank, microbatches)", "min(1, microbatches)", "units of time, the target is 27"),
    ],
    14: [
        ("3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0", "3I0 3W0 0I0 0W0 3F1 3I1 3W1 0F3", "units of time, the target is 13"),
        ("2I3 1I3 1W2 2W3 1W3", "2I3 1I3 1W2 2W3", "lacks 1W3"),
    ],
    15: [
        ("slot + 6 * m", "slot + 5 * m", "is not complete"),
        ("slot + 6 * m", "slot + 12 * m", "units of time, the target is 32"),
    ],
    16: [
        (" + received", "", "does not have the sum"),
        ("    pieces = list(tensor.clone().chunk(ranks))", "    swap(tensor)\n    pieces = list(tensor.clone().chunk(ranks))",
         "sends 48 elements for a tensor of 24, the target is 24"),
    ],
    17: [
        ("all_reduce(dhidden @ a)", "dhidden @ a", "dx is off by .*: is it a partial sum"),
        ("* (preactivation > 0)", "", "off by"),
    ],
    18: [
        (" / ranks", "", "its norm is 2 times the mean's"),
        ("reduce_scatter(dy.t() @ x)", "(dy.t() @ x).chunk(ranks)[0]", "the gradient is off"),
    ],
    19: [
        ("    torch.set_rng_state(state)\n", "", "differs from one process"),
        ("    torch.set_rng_state(current_state)\n", "", "the next random numbers differ"),
    ],
    20: [
        ('("1f1b", "zb-h1", "zb-h2")]', '("1f1b",)]', "0.0% faster than 1f1b on average, the target is 5 %"),
        ('("1f1b", "zb-h1", "zb-h2")]', '("gpipe",)]', "microbatches in flight, the target is|1f1b takes"),
    ],
    21: [
        ("reversed(range(slices))", "range(slices)", "rank 0 has 0B0 before 0B0.1, which it needs"),
        ("ranks - 1 - rank + slices - 1", "ranks * slices", "microbatches in flight, the target is 1.75"),
    ],
}  # fmt: skip


def folder_with_file(tmp_path, number, text):
    folder = LearnerFolder(tmp_path)
    folder.path.mkdir(exist_ok=True)
    folder.file(load_puzzle(number)).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("number", EVERY)
def test_the_solution_passes_and_what_is_handed_out_does_not(number, tmp_path):
    exercise = load_puzzle(number)
    folder = LearnerFolder(tmp_path)
    assert folder.write_stub(exercise)
    with pytest.raises(CheckFailed, match="returned nothing yet"):
        folder.check(exercise)
    folder_with_file(tmp_path, number, exercise.solution)
    assert folder.check(exercise).text
    assert folder.passed() == {number}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("send(hidden.grad, to=0)", "pass", r"rank 0 waits in receive\(\(10, 8\), source=1\); rank 1 has returned"),
        pytest.param(
            "        send(output, to=1)\n", "",
            r"rank 0 waits in receive\(\(10, 8\), source=1\); rank 1 waits in receive\(\(10, 8\), source=0\)",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_message_that_no_rank_sends_is_told_with_the_call_of_each_rank(old, new, message, tmp_path):
    exercise = load_puzzle(4)
    assert old in exercise.solution
    with pytest.raises(CheckFailed, match=message):
        folder_with_file(tmp_path, 4, exercise.solution.replace(old, new)).check(exercise)


@pytest.mark.parametrize("number", EVERY)
def test_wrong_ones_are_told_what_is_wrong(number, tmp_path):
    exercise = load_puzzle(number)
    assert len(WRONG[number]) == 2
    for old, new, message in WRONG[number]:
        assert old in exercise.solution
        folder = folder_with_file(tmp_path, number, exercise.solution.replace(old, new))
        with pytest.raises(CheckFailed, match=message) as failure:
            folder.check(exercise)
        assert "Traceback" not in str(failure.value)
        assert not folder.passed()


def test_a_learners_file_is_never_overwritten(tmp_path):
    folder, exercise = LearnerFolder(tmp_path), load_puzzle(9)
    assert folder.write_stub(exercise)
    folder.file(exercise).write_text("mine")
    assert not folder.write_stub(exercise)
    backup = folder.reset(exercise)
    assert backup.read_text() == "mine"
    assert folder.file(exercise).read_text() == exercise.stub
    assert folder.reset(exercise) != backup
    assert backup.read_text() == "mine"


def test_hints_come_one_by_one_and_the_solution_after_the_puzzle(tmp_path):
    folder, exercise = LearnerFolder(tmp_path), load_puzzle(9)
    folder.write_stub(exercise)
    assert folder.hint(exercise).startswith("hint 1 of 2: ")
    assert folder.hint(exercise).startswith("hint 2 of 2: ")
    with pytest.raises(PenstockError, match="is shown once yours has passed"):
        folder.solution(exercise)
    folder_with_file(tmp_path, 9, exercise.solution)
    folder.check(exercise)
    assert exercise.explanation in folder.solution(exercise)
    assert folder.next() == 1
    assert folder.next(after=9) == 10
    assert folder.next(after=21) == 1
    assert folder.next(fast=True) == FAST_TRACK[0]


@pytest.mark.parametrize("path_form", ["as it is", "from here"])
def test_what_cannot_run_is_told_with_its_line(tmp_path, monkeypatch, path_form):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path if path_form == "as it is" else Path("puzzles")  # which is what the command is given
    for text, message in (
        ("def row(:", "p09_1f1b.py, line 1: "),
        ("def row(rank, ranks, microbatches):\n    return 1 / 0", "line 2: Zero"),
        (
            "def row(rank, ranks, microbatches):\n    while True: yield '0F0'",
            "yields more than 10000 actions: does it ever end",
        ),
    ):
        with pytest.raises(CheckFailed, match=message):
            folder_with_file(folder, 9, text).check(load_puzzle(9))


@pytest.mark.slow
@pytest.mark.ranks
def test_the_command_hands_out_judges_and_needs_no_torch_for_tables(tmp_path):
    def penstock(*words):
        script = "import sys; from penstock.commands.cli import main; sys.argv = ['penstock', *sys.argv[1:]]\ntry: main()\n"
        script += "finally: print('torch' in sys.modules)"
        command = [sys.executable, "-c", script, "puzzle", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert "p09_1f1b.py is yours to complete" in penstock("9").stdout
    failure = penstock("9")
    assert failure.returncode == 1
    assert "not yet. row(0, 4, 8) returned nothing yet" in failure.stdout
    (tmp_path / "puzzles" / "p09_1f1b.py").write_text(load_puzzle(9).solution)
    passed = penstock("9")
    assert passed.returncode == 0, passed.stderr
    assert "passed. 33 units of time" in passed.stdout
    assert "rank 3 |" in passed.stdout
    assert passed.stdout.endswith("False\n")
    assert "x  9  1F1B as a table" in penstock().stdout
    assert "there is no puzzle 22: choose from 1 to 21" in penstock("22").stderr
    assert "puzzle takes a number from 1 to 21, watch" in penstock("hnt").stderr
