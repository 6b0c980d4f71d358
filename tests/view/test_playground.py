"""The playground: the studio's page without a server, as files that stand alone."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from penstock.view.studio.answers import LIMITS, answer

sys.path.append(str(Path(__file__).parents[2] / "tools" / "site"))
playground, pyodide = import_module("playground"), import_module("pyodide")

FUNCTION = """
def schedule(rank, ranks, microbatches):
    for m in range(microbatches):
        yield f"{rank}F{m}"
        yield f"{rank}B{m}"
"""
BLOCKED = ("torch", "numpy", "werkzeug", "rich", "tyro")
ALONE = f"""
import sys
sys.modules |= dict.fromkeys({BLOCKED})
sys.path.insert(0, sys.argv[1])
from answering import answer_json
for line in sys.stdin:
    told = []
    print(answer_json(line, told.append))
print(told[-1])
print(*{{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names)
"""


@pytest.mark.slow
@pytest.mark.fresh
def test_its_files_answer_alone_as_the_studio_does(tmp_path):
    playground.pack(tmp_path / "penstock.zip")
    questions = [
        {"schedule": "zb-v", "ranks": 4, "microbatches": 8, "costs": {"forward": 2, "send": 0.5}},
        {"csv": "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "file": "mine.csv", "max_in_flight": 3},
        {"python": FUNCTION, "ranks": 3, "microbatches": 2, "costs": {"forward": 2}},
        {"python": FUNCTION, "ranks": 3, "microbatches": 2.5},
        {"python": "def schedule(rank, ranks, microbatches):\n    yield 1 / rank", "ranks": 2, "microbatches": 2},
        {"python": "while = 1", "ranks": 2, "microbatches": 2},
        {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "better": True},
    ]
    command = [sys.executable, "-I", "-S", "-c", ALONE, tmp_path / "penstock.zip"]
    lines = "\n".join(map(json.dumps, questions))
    lines = subprocess.run(command, input=lines, stdout=-1, text=True, check=True).stdout.splitlines()
    *answers, better, data = map(json.loads, lines[:-1])
    rows = [[f"{rank}{kind}{m}" for m in range(2) for kind in "FB"] for rank in range(3)]
    same = [*questions[:2], {"rows": rows, "name": "your schedule", "costs": {"forward": 2}}]
    assert answers == [
        *(json.loads(json.dumps(answer(question))) for question in same),
        {"error": f"microbatches is 2.5: the studio takes a whole number from 1 to {LIMITS['microbatches']}"},
        {"error": "your schedule, line 2: ZeroDivisionError: division by zero, in schedule(0, 2, 2)"},
        {"error": "your schedule, line 1: invalid syntax"},
    ]
    assert better["name"] == "1f1b (searched)"
    assert 0 < data["share"] <= 1
    assert set(lines[-1].split()) <= {"__main__", "answering", "penstock", *BLOCKED}


def test_pyodide_is_the_package_that_the_page_was_written_for_or_is_missing(tmp_path, monkeypatch):
    kept = tmp_path / f"pyodide-{pyodide.VERSION}.tgz"
    kept.write_bytes(b"another package")
    with pytest.raises(pyodide.Missing, match=f"pyodide {pyodide.VERSION} is another package"):
        pyodide.unpacked(tmp_path / "pyodide", tmp_path)
    assert not kept.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pyodide.Missing, match="npm is not installed"):
        pyodide.unpacked(tmp_path / "pyodide", tmp_path)
