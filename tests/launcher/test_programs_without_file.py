"""Programs that are in no file: a notebook's cells, `python -c`, standard input, ipython. Their functions run on ranks too."""

import subprocess
import sys

import prompt
import pytest

import penstock as ps

pytestmark = [pytest.mark.ranks, pytest.mark.fresh]

DEFINED = """
from typing import NamedTuple

import torch
import penstock as ps

WIDTH = 8

class Box(NamedTuple):
    hidden: torch.Tensor

class First(torch.nn.Linear):
    def forward(self, inputs):
        return Box(super().forward(inputs))

class Second(torch.nn.Linear):
    def forward(self, box):
        return super().forward(box.hidden)

class Result(dict):
    pass

class Wrong(Exception):
    pass

def train(steps, fails=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(First(WIDTH, WIDTH), Second(WIDTH, WIDTH))
    pipe = ps.Pipeline(model, torch.nn.functional.mse_loss, "1f1b", microbatches=3)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(steps):
        loss = pipe.step(torch.ones(7, WIDTH), target=torch.zeros(7, WIDTH))
        optimizer.step(), optimizer.zero_grad()
    if fails and pipe.topology.rank == 1:
        raise Wrong(f"of rank {pipe.topology.rank}")
    return Result(loss=loss.item(), ranks=pipe.topology.world_size)
"""
LAUNCHED = """
alone, (first, second) = train(3), ps.launch(train, 2, 3)
print(type(first) is Result, first == second, first["loss"] == alone["loss"], alone["ranks"], first["ranks"])
try:
    ps.launch(train, 2, 1, True)
except Wrong as error:
    print(error, "|", "Wrong: of rank 1" in str(error.__cause__))
"""
PRINTED = "True True True 1 2\nof rank 1 | True\n"
PROGRAM = DEFINED + LAUNCHED


def test_ranks_run_what_was_typed():
    ended = prompt.code(PROGRAM)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == PRINTED


@pytest.mark.slow
@pytest.mark.parametrize("how", ["python -c", "standard input", "ipython"])
def test_ranks_run_what_was_typed_in_an_interpreter_of_its_own(how, tmp_path):
    if how == "ipython":
        pytest.importorskip("IPython")
    words = {"python -c": ["-c", PROGRAM], "standard input": ["-"], "ipython": ["-m", "IPython", "--quick", "-c", PROGRAM]}[how]
    given = PROGRAM if how == "standard input" else None
    ended = subprocess.run([sys.executable, *words], cwd=tmp_path, input=given, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == PRINTED


LOCKED = """
import threading
lock = threading.Lock()
def guarded():
    with lock:
        return 1
"""


@pytest.mark.slow
def test_a_notebook_launches_ranks_and_shows_their_errors_with_the_lines_of_the_cell(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [DEFINED, LAUNCHED, "ps.launch(train, 2, 1, True)", LOCKED, "ps.launch(guarded, 2)", "ps.launch(lambda: WIDTH, 2)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, startup_timeout=1000, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    _, launched, fails, _, guarded, function = [cell["outputs"] for cell in notebook["cells"]]

    assert "".join(result["text"] for result in launched if result.get("name") == "stdout") == PRINTED
    assert (fails[-1]["ename"], fails[-1]["evalue"]) == ("Wrong", "of rank 1")
    assert 'raise Wrong(f"of rank {pipe.topology.rank}")' in "".join(fails[-1]["traceback"])
    assert guarded[-1]["evalue"] == (
        "cannot send guarded to other processes (cannot pickle '_thread.lock' object): make lock inside of guarded, "
        "or pass arguments that pickle"
    )
    assert function[-1]["data"]["text/plain"] == "[8, 8]"


@pytest.mark.slow
def test_a_script_sends_its_functions_by_name_and_loads_no_cloudpickle(tmp_path):
    """So its ranks have the classes that the script defines, not copies."""
    program = tmp_path / "program.py"
    launched = LAUNCHED.replace("\n", "\n    ") + '\n    import sys\n    print("cloudpickle" in sys.modules)\n'
    program.write_text(f'{DEFINED}\nif __name__ == "__main__":{launched}')
    ended = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == f"{PRINTED}False\n", ended.stderr


DEBUGGED = """
import penstock as ps

def double(number, stops):
    if stops:
        breakpoint()
    return 2 * number

if __name__ == "__main__":
    print(ps.launch(double, 2, 4, False))
    try:
        ps.launch(double, 2, 4, True)
    except ps.PenstockError as error:
        print(error)
"""


NO_TERMINAL = "came to a breakpoint, but ranks that `launch` starts have no terminal: call the function itself"


def rank_stops():
    breakpoint()


def test_a_breakpoint_on_a_rank_says_how_to_debug():
    with pytest.raises(ps.PenstockError, match=NO_TERMINAL):
        ps.launch(rank_stops, 2)


@pytest.mark.slow
def test_a_script_under_pdb_launches_ranks_and_a_breakpoint_on_a_rank_says_how_to_debug(tmp_path):
    (tmp_path / "program.py").write_text(DEBUGGED)
    words = [sys.executable, "-m", "pdb", "program.py"]
    ended = subprocess.run(words, cwd=tmp_path, input="continue\nquit\n", capture_output=True, text=True)
    assert "[8, 8]" in ended.stdout
    assert NO_TERMINAL in ended.stdout
    assert not ended.stderr
