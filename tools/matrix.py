"""The tests on each supported release of torch and Python, in an environment each: writes docs/reference/releases.md.

    make matrix                                             every cell for which this machine has the Python; takes hours
    make matrix MATRIX="--torch 2.15.0 --python 3.12 3.13"  some cells; the others stay as they were
    make matrix MATRIX="--index-url https://download.pytorch.org/whl/cpu"   with the small builds of torch, for CPUs only
    make matrix MATRIX="--tests tests/mesh tests/engine"    some of the tests
    python tools/matrix.py --ready ENVIRONMENT ...          in environments that have torch and the tests' packages already

Results are kept in docs/reference/releases.json, from which the table is written, so a cell can be refreshed alone.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TABLE = ROOT / "docs" / "reference" / "releases.json", ROOT / "docs" / "reference" / "releases.md"
RELEASES = ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
EXTRAS = "mlp,transformers,png,studio,dev"
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
VERSIONS = "import sys, torch; print(torch.__version__.split('+')[0], '%d.%d' % sys.version_info[:2])"
Result = dict[str, Any]  # passed and skipped: counts; failed: names of tests; tests: which there were


def main() -> None:
    """Every cell that is asked for, one after the other."""
    options = arguments()
    results: dict[str, Result] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wheel = built_wheel()
    for python in environments(options, wheel):
        cell = output(python, "-c", VERSIONS)
        print(f"torch and Python {cell}: {' '.join(options.tests)}", flush=True)
        results[cell] = tested(python, options.tests)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        TABLE.write_text(table(results))


def arguments() -> argparse.Namespace:
    """The words of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION", help="or the path of one")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH")
    parser.add_argument("--index-url", help="where pip finds torch")
    parser.add_argument("--environments", type=Path, default=ROOT / ".matrix", help="where they are made, and kept")
    parser.add_argument("--ready", nargs="+", type=Path, metavar="ENVIRONMENT", help="use these and make none")
    return parser.parse_args()


# ---- environments


def environments(options: argparse.Namespace, wheel: Path) -> Iterator[Path]:
    """The interpreter of each environment, with the wheel installed."""
    if options.ready:
        for folder in map(Path.absolute, options.ready):
            pip(folder / "bin" / "python", "--no-deps", "--force-reinstall", wheel)
            yield folder / "bin" / "python"
        return
    for release, word in product(options.torch, filter(is_here, options.python)):
        try:
            folder = options.environments.absolute() / f"torch-{release}-python-{output(command(word), '-c', VERSION)}"
            yield made(folder, release, command(word), options.index_url, wheel)
        except subprocess.CalledProcessError as error:
            print(f"torch {release} with Python {word} is left out: {error}", file=sys.stderr)


def command(word: str) -> str:
    """What starts the Python that `--python` gives by its version or path."""
    return word if os.sep in word else f"python{word}"


def is_here(word: str) -> bool:
    """Whether that Python runs; says so where it does not."""
    try:
        output(command(word), "-c", VERSION)
    except (OSError, subprocess.CalledProcessError):  # also one that a version manager has a name for only
        print(f"there is no {command(word)} on this machine: it is left out", file=sys.stderr)
        return False
    return True


def made(folder: Path, release: str, base: str, index_url: str | None, wheel: Path) -> Path:
    """An environment of the Python `base` with this release of torch; one that is there is used again."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([base, "-m", "venv", folder], check=True)
    pip(python, f"torch=={release}", *(["--index-url", index_url] if index_url else []))
    pinned = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith(("torch==", "setuptools=="))
    ]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*pinned, f"torch=={release}"]))
    pip(python, "-c", constraints, f"penstock-pipeline[{EXTRAS}] @ {wheel.as_uri()}")
    pip(python, "--no-deps", "--force-reinstall", wheel)  # also where an older one of the same version was
    return python


def pip(python: Path, *words: str | Path) -> None:
    """`pip install`, in the environment of `python`."""
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words], check=True)


def built_wheel() -> Path:
    """The project's wheel, as it is now."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-wheel-"))
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # what setuptools built before, it would pack again
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    return next(folder.glob("*.whl"))


def output(*words: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


# ---- tests


def tested(python: Path, tests: list[str]) -> Result:
    """Run the tests on the installed wheel: `PYTHONSAFEPATH` keeps the checkout's own package out of sight."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words: list[str | Path] = [
            python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *tests,
        ]
        subprocess.run(words, cwd=ROOT, env=environment, check=False)
        return {"tests": " ".join(tests), **counts(ElementTree.parse(report))}


def counts(report: "ElementTree.ElementTree[Any]") -> Result:
    """What pytest's JUnit file says."""
    cases = list(report.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed)
    return {"passed": len(cases) - len(failed) - len(skipped), "failed": names, "skipped": len(skipped)}


def table(results: dict[str, Result]) -> str:
    """docs/reference/releases.md."""
    order = sorted(results, key=lambda cell: [int(part) for part in cell.replace(" ", ".").split(".")])
    rows = [row(cell, results[cell]) for cell in order]
    failures = [f"* torch {cell}: `{name}`" for cell in order for name in results[cell]["failed"]]
    return "\n".join([*HEAD, *rows, *(["", "What failed:", "", *failures] if failures else []), ""])


HEAD = [
    "# The tests on each release of torch and Python",
    "",
    "Written by `make matrix` (tools/matrix.py), which installs the wheel in a new environment for each row.",
    "",
    "| torch | Python | passed | failed | skipped | tests |",
    "|---|---|---|---|---|---|",
]


def row(cell: str, result: Result) -> str:
    """A line of the table."""
    torch, python = cell.split()
    return f"| {torch} | {python} | {result['passed']} | {len(result['failed'])} | {result['skipped']} | {result['tests']} |"


if __name__ == "__main__":
    main()
