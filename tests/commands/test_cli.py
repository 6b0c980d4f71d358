"""The commands, run as a person would."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from prompt import penstock, python
from safetensors.torch import load_file

from penstock.commands import cli, show
from penstock.commands.machine import doctor
from penstock.commands.train.config import TrainConfig, saved_options
from penstock.errors import PenstockError
from penstock.model import GPT, GPTConfig
from penstock.schedule import Action, Event, Kind, Timeline
from penstock.view.terminal import draw

pytestmark = pytest.mark.ranks

SMALL = ["--steps", "3", "--batch", "8", "--width", "16", "--context", "16", "--layers", "3", "--microbatches", "4"]


def fresh(*words, launcher=("-m", "penstock")):
    """In an interpreter of its own."""
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, env=environment)


def test_train_compares_bit_for_bit_and_leaves_metrics_and_weights_of_the_uncut_model(tmp_path):
    done = penstock("train", "--ranks", "2", "--compare", "--dropout", "0.1", "--out", str(tmp_path), *SMALL)
    assert done.returncode == 0, done.stderr
    assert "equal to the last bit, all steps" in done.stdout
    assert done.stdout.count("equal to the last bit") == 2
    (folder,) = tmp_path.iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert f"{records[-1]['loss']:.4f}" in done.stdout
    begun, kept = [json.loads(line) for line in (folder / "digests.jsonl").read_text().splitlines()]
    assert (begun["step"], kept["step"]) == (0, 3)
    assert kept["weights"].keys() == kept["gradients"].keys() == dict.fromkeys(begun["run"]["names"]).keys()
    model = GPT(GPTConfig(context=16, width=16, layers=3, heads=4))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert json.loads((folder / "run.json").read_text())["losses"] == [record["loss"] for record in records]


WRONG_OPTIONS = [
    (["tran"], "there is no command 'tran' (did you mean train?): choose from lab, puzzle, "),
    (["schedules", "--long"], "Unrecognized options: --long"),
    (["train", "--schedule", "1f1"], "unknown schedule '1f1' (did you mean 1f1b?)"),
    (["train", "--ranks", "0"], "--ranks 0 is too small: use 1 or more"),
    (["train", "--ranks", "50"], "use --ranks 11 or fewer"),
    (["train", "--data", "READM.md"], "did you mean README.md?"),
    (["train", "--width", "30"], "--width 30 does not divide by 4 heads: use 28"),
    (["train", "--model", "gtp"], "'gpt'"),
    (["train", "--microbatch", "3"], "--microbatches"),
    (["train", "--checkpoint-every", "-1"], "--checkpoint-every -1 is no number of steps: use 0 (at the end) or more"),
    (["train", "--keep", "0"], "--keep 0 is too small: use 1 or more"),
    (["train", "--resume", "test"], "--resume test is no run, it has no run.json (did you mean tests?)"),
    (["show", "gpip"], "did you mean gpipe?"),
    (["show", "zb-h1", "--weights", "3"], "--weights 3 is a part of --backward 2: give no more than that"),
    (
        ["show", "dualpipe-v", "--overlap", "2"],
        "overlap is 2.0: give the share of the shorter action that is hidden, 0 to 1",
    ),
    (["show", "my.csv", "--group-size", "2"], "the table my.csv is read as it stands: leave out group_size"),
    (["lab", "77"], "there is no lab 77"),
]
TYPED = """
import contextlib, io, json, sys
from penstock.commands import cli

for words in json.loads(sys.argv[1]):
    sys.argv, code = ["penstock", *words], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([out.getvalue(), code, "torch" in sys.modules]))
"""


def test_a_wrong_option_fails_before_torch_is_imported_with_the_nearest_that_works():
    done = fresh(json.dumps([words for words, _ in WRONG_OPTIONS]), launcher=("-c", TYPED))
    assert (done.returncode, done.stderr) == (0, "")
    for (words, message), line in zip(WRONG_OPTIONS, done.stdout.splitlines(), strict=True):
        printed, code, imported = json.loads(line)
        assert not imported, words
        assert code not in (0, None), words
        assert message in f"{printed}{code}", words
        assert "Traceback" not in printed, words


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --schedule damaged.csv", "damaged.csv is damaged, or no CSV table: 'utf-8' codec can't decode byte 0xff"),
        ("train --schedule folder.csv", "the table folder.csv does not exist"),
        ("train --resume folder.csv", "--resume folder.csv is no run, it has no run.json: give the folder of a run"),
        ("train --resume run", "run/run.json is damaged, it is not what `penstock train` wrote there: resume another run"),
        ("train --data short.txt", "--data short.txt has 5 bytes: at least 1301 are needed for a context of 64"),
        ("train --model mlp --width 32", "--width 32 is less than the images' 64 pixels: use 64 or more"),
        ("train --out short.txt", "short.txt cannot be written: File exists"),
        ("train --seed -1", "--seed -1 is no seed: use 0 or more"),
        ("train --learning-rate nan", "--learning-rate nan is no rate: use a number like 1e-3"),
        ("show damaged.csv", "damaged.csv is damaged, or no CSV table: 'utf-8' codec can't decode byte 0xff"),
        ("show words.csv", "words.csv, row 1 (rank 0), cell 1: cannot read 'hello' as an action"),
        ("show 1f1b --csv nowhere/table.csv", "nowhere/table.csv cannot be written: No such file or directory"),
        ("show run/run.json", "run/run.json is not a timeline that Penstock wrote: Expecting property name"),
        ("show list.json", "list.json is not a timeline that Penstock wrote: it is no JSON object"),
        ("show exits.py", "exits.py, line 1: SystemExit: 0"),
        ("plan exits.py:build", "exits.py, line 1: SystemExit: 0"),
        (f"show {'a' * 300}", f"{'a' * 300}: File name too long"),
        ("puzzle 0", "there is no puzzle 0: choose from 1 to 21"),
        ("puzzle 1 --folder short.txt", "short.txt: File exists"),
        ("puzzle --folder run", "run/progress.json cannot be read ('int' object is not iterable): delete it to begin anew"),
        ("export rum", "rum does not exist (did you mean run?)"),
        ("bench --steps 0", "--steps 0 is too few: use 1 or more"),
        ("bench --forward -1", "--forward -1 is no amount: use a number of 0 or more"),
        ("bench --forward nan", "--forward nan is no amount: use a number of 0 or more"),
        ("show --forward 1e308 --send 1e308", "the costs add up to more than a number can say: give smaller ones"),
        ("watch short.txt", "short.txt is no run, it has no run.json: give another"),
        ("train --resume run/run.json", "--resume run/run.json is no run, it has no run.json: give another"),
        ("train --ranks 99999999999", "--ranks 99999999999 are more than the model's 11 layers: use --ranks 11 or fewer"),
        (
            "train --schedule interleaved-1f1b --stages-per-rank 99",
            "396 stages need more layers than the model's 11: use --stages-per-rank 2 or fewer, or --layers",
        ),
        ("plan --costs deep.json", "deep.json does not say what a model's layers cost: RecursionError('maximum recursion"),
        ("train --restarts -1", "--restarts -1 is no number of times: use 0 (none) or more"),
        ("train --ranks 2 --least 3", "--least 3 of 2 processes cannot be: use 1 to 2"),
        ("train --digests-every -1", "--digests-every -1 is no number of steps: use 0 (none) or more"),
        ("train --batch 1 --dp 2", "--batch 1 has no row for each of 2 replicas: use 2 or more"),
        ("train --tp 3", "--tp 3: the GPT's 4 heads can be shared by 1, 2 or 4 ranks, the MLP by none"),
        ("train --tp 2 --dropout 0.1", "--tp 2 --dropout 0.1: ranks that share products drop alike; use --dropout 0"),
        ("train --dropout 1", "--dropout 1.0 is not a share: use 0 up to, but not including, 1"),
        ("--colour", "--colour is an option of no command: `penstock --help` lists the commands"),
        ("puzzle hnt", "puzzle takes a number from 1 to 21, watch, hint, reset or solution, not 'hnt'"),
        ("lab 3 mine.py", "lab 3 takes no file: leave mine.py out, or choose lab 9"),
        ("lab 9 mine.py --fix", "--fix is about the schedule that lab 9 hands out: leave mine.py out"),
        ("plan model.txt", "model.txt names no function: write it as model.py:build"),
        ("plan modle.py:build", "modle.py:build names no function: modle.py is no file"),
        ("plan raises.py:build", "build() fails: raises.py, line 1: ZeroDivisionError: division by zero"),
        (
            "plan raises.py:build_nothing",
            "raises.py:build_nothing must be a function that returns (model, args) or (model, args,",
        ),
        ("export-costs run --rows 0", "--rows 0 is too small: use 1 or more"),
        ("studio --port 99999", "--port 99999 cannot be used: ports are numbers up to 65535; leave it out to take a free one"),
    ],
)
def test_a_mistake_is_told_in_one_line(line, message, tmp_path, monkeypatch):
    (tmp_path / "damaged.csv").write_bytes(b"0F0,0B0\n\xff\xfe")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "words.csv").write_text("hello,world\n")
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{damaged")
    (tmp_path / "run" / "progress.json").write_text('{"passed": 5}')
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    (tmp_path / "raises.py").write_text("build = lambda: 1 / 0\nbuild_nothing = lambda: None")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["penstock", *line.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert str(ended.value).startswith(f"penstock: {message}")
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize(("words", "out", "code"), [("lab", "pipe", 141), ("--version", "pipe", 141), ("lab", "full", 1)])
def test_output_that_nobody_takes_ends_the_command_without_a_traceback(words, out, code):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    target = writer if out == "pipe" else os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "penstock", *words.split()]
    done = subprocess.run(command, stdout=target, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, "" if out == "pipe" else "penstock: No space left on device\n")


@pytest.mark.parametrize("words", ["show 1f1b", "show zb-v --csv {}.csv", "compare 1f1b gpipe"])
def test_files_are_written_also_where_nobody_takes_the_output(words, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-m", "penstock", *words.format(tmp_path / "table").split()]
    done = subprocess.run([*command, "--html", tmp_path / "page.html"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    assert "</html>" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "table.csv").is_file() == ("--csv" in words)


@pytest.mark.slow
def test_a_training_needs_no_output(tmp_path):
    words = ["train", "--ranks", "2", *SMALL, "--out", tmp_path]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "penstock", *words]
    assert subprocess.run(closed).returncode == 0
    (folder,) = tmp_path.iterdir()
    assert (folder / "timeline.html").is_file()


def test_output_that_is_closed_or_lacks_a_character_ends_no_command():
    closed = ["sh", "-c", f"{sys.executable} -m penstock schedules >&-"]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    program = (
        "import sys; from penstock.commands import cli; sys.argv = ['penstock', '--version']; cli.main(); print('\\u0735')"
    )
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ascii_only)
    assert (done.returncode, done.stdout.splitlines()[1:], done.stderr) == (0, ["?"], "")


@pytest.mark.parametrize(
    "wrong", [{"ranks": "2"}, {"dp": None}, {"schedule": 1}, {"model": "gtp"}, {"data": True}, {"dropout": []}, {"plan": {}}]
)
def test_settings_of_other_types_are_told(wrong, tmp_path):
    right = TrainConfig().to_json()
    (tmp_path / "run.json").write_text(json.dumps({"config": right}))
    assert saved_options(tmp_path) == {name: right[name] for name in right.keys() - {"resume", "compare", "watch"}}
    without = {name: value for name, value in right.items() if name not in wrong}
    for config in (right | wrong, None, [], {}, *([without] if {*wrong} & {"model", "data", "dropout"} else [])):
        (tmp_path / "run.json").write_text(json.dumps({"config": config}))
        with pytest.raises(PenstockError, match=r"run\.json is damaged, it is not what `penstock train` wrote there: resume"):
            saved_options(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--width", "1000000000000"], "this machine has no room for that, give smaller numbers: RuntimeError: .*memory"),
        pytest.param(
            ["--device", "mps"],
            "device 'mps' was asked for, but torch finds no GPU of Apple's here: use device='cpu'$",
            marks=pytest.mark.skipif(sys.platform == "darwin", reason="there is one"),
        ),
    ],
)
def test_what_this_machine_does_not_have_is_told_in_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["penstock", "train", "--ranks", "1", *SMALL, "--out", str(tmp_path), *words])
    with pytest.raises(SystemExit, match=f"^penstock: {message}"):
        cli.main()


def test_an_environment_that_torchrun_has_not_made_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["penstock", "train"])
    with pytest.raises(SystemExit, match=r"^penstock: RANK is set here, but WORLD_SIZE is '': start the command with torchrun"):
        cli.main()
    program = tmp_path / "program.py"
    program.write_text("import penstock as ps\nps.comms.init_distributed()\n")
    done = python(program)
    assert done.returncode == 1
    assert "PenstockError: RANK=0 is set here, but not all that torchrun sets with it" in done.stderr


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_every_command_fits_80_columns_and_names_its_values(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["penstock", *name.split(), "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: penstock {name} [-h]")
    assert max(map(len, printed.splitlines())) <= 80
    for word in ("None", "STR", "[INT]", "[PATH]", "(default: )"):
        assert word not in printed


def test_the_help_lists_every_command_on_a_line_in_its_group(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["penstock", "--help"])
    cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[:-1] for line in lines if line.endswith(":")] == [*cli.GROUPS]
    for name in cli.COMMANDS:
        assert [line for line in lines if re.match(rf"  {name}  +[A-Z].*\.$", line)], name


@pytest.mark.parametrize("path", sorted(Path(cli.__file__).parent.rglob("*.py")), ids=lambda path: path.stem)
def test_the_help_of_an_option_is_one_line_of_the_source(path):  # tyro breaks the line where the source does
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for text in node.body[1:]:
                assert not (isinstance(text, ast.Expr) and "\n" in getattr(text.value, "value", "")), ast.unparse(text)


def test_a_word_that_is_no_number_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["penstock", "show", "--group-size", "two"])
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main()
    assert "Error parsing --group-size: invalid literal for int() with base 10: 'two'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_in_one_line(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["penstock", "studio", "--port", str(port)])
        with pytest.raises(SystemExit, match=f"^penstock: --port {port} cannot be used: Address already in use; leave it out"):
            cli.main()


def test_show_draws_the_table_with_its_bubble_and_memory(tmp_path):
    done = penstock("show", "1f1b", "--ranks", "2", "--microbatches", "3", "--csv", str(tmp_path / "table.csv"))
    picture = done.stdout.splitlines()[1:5]
    assert picture == [
        "rank 0 |F0-------F1-------..................B0================F2-------B1================.........B2================",
        "rank 1 |.........F0-------B0================F1-------B1================F2-------B2================..................",
        "makespan 12, bubble 25.0% (longest rank's span 12, bubble 25.0%), activations in flight 2/1",
        "time of all ranks: busy 75.0%, idle 25.0% by fill 12.5%, order 0.0%, imbalance 0.0%, drain 12.5%, communication 0.0%",
    ]
    again = penstock("show", str(tmp_path / "table.csv"))
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[1:-1]


def test_show_takes_the_schedules_options_and_what_everything_costs():
    table = ["--ranks", "2", "--microbatches", "2", "--stages-per-rank", "2", "--group-size", "1"]
    costs = ["--forward", "1", "--backward", "4", "--weights", "1", "--send", "1"]
    assert penstock("show", "interleaved-zb", *table, *costs).stdout.splitlines()[1:] == [
        "rank 0 |0F0.........2F00F1...............2I0======2W02F1.........0I0======0W0...2I1======2W1............0I1======0W1",
        "rank 1 |......1F0.........3F03I0======1F1............1I0======3W03F13I1======1W0............1I1======3W11W1.........",
        "makespan 36, bubble 44.4% (longest rank's span 36, bubble 44.4%), activations in flight 3/3 (2 for each microbatch)",
        "time of all ranks: busy 55.6%, idle 44.4% by fill 12.5%, order 4.2%, imbalance 0.0%, drain 15.3%, communication 12.5%",
        "these costs are of a stage; at those of a rank, as in `penstock compare`: "
        "makespan 22, memory at most 1.5 microbatches on a rank",
    ]


def test_show_draws_an_overlapped_pair_as_one_block():
    done = penstock("show", "dualpipe-v", "--ranks", "1", "--microbatches", "3", "--overlap", "1")
    assert done.stdout.splitlines()[1:3] == [
        "rank 0 |0F0----1F0----0F1----1B0==========={1F1 0B0=====}{0F2 1B1=====}{1F2 0B1=====}1B2===========0I2====0W2~~~~",
        "makespan 15, bubble 0.0% (longest rank's span 15, bubble 0.0%), activations in flight 3 (2 for each microbatch)",
    ]


@pytest.mark.parametrize("block", ["{2F5 1B3==}", "{2F5 1B3}", "{F5B3==}", "{F5B3}", "{FB=}", "{FB}", "{=}", "{}", "&"])
def test_a_pair_is_named_as_far_as_there_is_room(block):
    pair = Action(Kind.F, 2, 5), Action(Kind.B, 1, 3)
    rows = tuple(Event(0, action, 0, len(block)) for action in pair), (Event(1, Action(Kind.F, 0, 0), 0, 20),)
    assert draw(Timeline("one", rows, overlaps=frozenset({pair})), width=28).splitlines()[0] == f"rank 0 |{block:.<20}"


def test_a_pair_has_a_colour_of_its_own():
    pair = Action(Kind.F, 2, 5), Action(Kind.B, 1, 3)
    row = tuple(Event(0, action, 0, 10) for action in pair)
    assert draw(Timeline("one", (row,), overlaps=frozenset({pair})), 18, color=True) == ("rank 0 |\033[30;45m{2F5 1B3}\033[0m ")


def test_schedules_lists_them_all():
    from penstock.schedule import names

    listed = [line.split()[0] for line in penstock("schedules").stdout.splitlines()[1:] if line]
    assert listed[: len(names())] == names()
    narrow = "\n".join(show._schedule_lines(80)).splitlines()
    assert max(map(len, narrow)) <= 80
    assert [line.split(":")[0] for line in narrow if not line.startswith(" ")] == names()


def test_help_imports_no_torch():
    lines = [["--help"], *([*name.split(), "--help"] for name in cli.COMMANDS)]
    done = fresh(json.dumps(lines), launcher=("-c", TYPED))
    assert [json.loads(line)[1:] for line in done.stdout.splitlines()] == [[0, False]] * len(lines)


@pytest.mark.parametrize("name", ["schedules", "show"])
def test_only_the_command_that_was_typed_is_imported(name):
    code = f"import sys; sys.argv = ['penstock', '{name}']\nfrom penstock.commands.cli import main\nmain()\n"
    code += "print({'torch', 'typeguard', 'multiprocessing', 'penstock.commands.train'} & {*sys.modules})"
    assert fresh(launcher=("-c", code)).stdout.splitlines()[-1] == "set()"


@pytest.mark.slow
def test_bench_and_doctor_say_what_they_measured(monkeypatch, capsys):
    for words in (["2"], ["3", "--schedule", "zb-v"]):  # here: the ranks' server is there already, and torch imported
        steps = ["bench", "--ranks", "2", "--forward", "2", "--steps", "2", "--microbatches", *words]
        monkeypatch.setattr(sys, "argv", ["penstock", *steps])
        cli.main()
        output = capsys.readouterr().out
        assert "the table, at nominal costs" in output
        assert "the table, at the actions' own costs" in output
    examined = fresh("doctor")
    messages = [line for line in examined.stdout.splitlines() if line.startswith("+ a message")]
    assert len(messages) == 6, examined.stderr  # of three sizes: the pipeline's way, and by Gloo
    assert all(re.search(r", +[\d,]+ bytes take +\d+ us, [\d.]+ GB/s$", line) for line in messages), messages
    assert all(("by Gloo" in line) == (number >= 3) for number, line in enumerate(messages))


@pytest.mark.parametrize(
    ("version", "message"), [("2.15.0+cpu", ""), ("2.16.0", "- Penstock is tested with torch up to 2.15: ")]
)
def test_doctor_says_when_torch_is_newer_than_what_was_tested(capsys, version, message):
    doctor._warn_if_untested(version)
    said = capsys.readouterr().out
    assert said.startswith(message)
    assert bool(said) == bool(message)
