"""The command line: find the typed command, parse its options and run it.

Only that command's module is imported, so that commands without torch start fast.
"""

import ast
import difflib
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import penstock
from penstock.distribution import other_distribution_problem
from penstock.errors import PenstockError

GROUPS = {  # group -> command -> its class, whose docstring is its help and whose fields are its options
    "learn": {"lab": "learn.LabCommand", "puzzle": "learn.PuzzleCommand"},
    "schedules": {
        "schedules": "show.SchedulesCommand",
        "show": "show.ShowCommand",
        "compare": "compare.CompareCommand",
        "search": "search.SearchCommand",
        "studio": "pages.StudioCommand",
    },
    "train": {
        "train": "train.train_command.TrainCommand",
        "plan": "plan.PlanCommand",
        "watch": "pages.WatchCommand",
        "generate": "trained_model.GenerateCommand",
        "eval": "trained_model.EvalCommand",
        "export": "trained_model.ExportCommand",
        "export-costs": "traces.ExportCostsCommand",
        "audit": "audit.AuditCommand",
    },
    "machine": {
        "doctor": "machine.machine_commands.DoctorCommand",
        "bench steps": "machine.machine_commands.BenchStepsCommand",
        "bench collectives": "machine.machine_commands.BenchCollectivesCommand",
    },
}
COMMANDS = {name: path for group in GROUPS.values() for name, path in group.items()}


def main() -> None:
    """Run the typed command. An error of Penstock is printed in one line, with exit code 1; Ctrl-C exits with 130."""
    words = sys.argv[1:]
    if not hasattr(penstock, "__version__"):  # another project's package was written over this one, or removed with its files
        reinstall = "files are missing. Run: pip install --force-reinstall --no-deps penstock-pipeline"
        sys.exit(f"penstock: {other_distribution_problem() or reinstall}")
    try:
        with _flush_output():
            if words == ["--version"]:
                print(f"penstock {penstock.__version__}")
            elif words in ([], ["-h"], ["--help"]):
                print(help_text())
            else:
                _parse(words).run()
    except PenstockError as error:
        sys.exit(f"penstock: {error}")
    except BrokenPipeError:  # the reader has ended, as in `penstock show .. | head`
        sys.exit(141)
    except OSError as error:  # a file that cannot be made, read or written
        path = f"{error.filename}: " if error.filename else ""
        sys.exit(f"penstock: {path}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        from penstock.comms.system import explain_error, is_out_of_resources

        if not is_out_of_resources(error):
            raise
        sys.exit(f"penstock: this machine has no room for that, give smaller numbers: {explain_error(error)}")
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        sys.exit(130)


def help_text() -> str:
    """Return a line for each command, in groups: the first line of its class's docstring."""
    lines = ["usage: penstock COMMAND [OPTIONS]", "", "Pipeline-parallel training you can read, prove and see."]
    width = max(map(len, COMMANDS))
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name:{width}}  {_summary(path)}" for name, path in commands.items()]
    lines += ["", "`penstock COMMAND --help` lists its options, `penstock --version` the version."]
    return "\n".join(lines)


def _summary(path: str) -> str:
    """Return the first line of a command's docstring. Its file is read, not imported: some commands import torch."""
    module, _, class_name = path.rpartition(".")
    file = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    docstring = next(ast.get_docstring(node) for node in classes if node.name == class_name)
    return str(docstring).partition("\n")[0]


def _class_of(name: str) -> Any:
    module, _, class_name = COMMANDS[name].rpartition(".")
    return getattr(importlib.import_module(f"penstock.commands.{module}"), class_name)


def _parse(words: Sequence[str]) -> Any:
    """Return the typed command with its options. Raises PenstockError if there is no such command."""
    from penstock.commands.command_options import parse_options

    name = _command_name(words)
    command = _class_of(name)
    options = words[2:] if list(words[:2]) == name.split() else words[1:]
    return parse_options(command, options, name, command.defaults_for(words) if name == "train" else None)


def _command_name(words: Sequence[str]) -> str:
    """Return the command that `words` begin with; `bench` alone is `bench steps`. Raises PenstockError if there is none."""
    word = words[0]
    for name in (" ".join(words[:2]), word, f"{word} steps"):
        if name in COMMANDS:
            return name
    if word.startswith("-"):
        raise PenstockError(f"{word} is an option of no command: `penstock --help` lists the commands")
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise PenstockError(f"there is no command {word!r}{hint}: choose from {', '.join(COMMANDS)}")


@contextmanager
def _flush_output() -> Iterator[None]:
    """Flush the output at the end; if that fails, raise the error once, and not at Python's exit as well.

    Without an output (`>&-`) print nothing, on the ranks too, and keep its file number free. A character that the terminal's
    encoding lacks becomes a question mark.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    finally:
        try:
            print(end="", flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
