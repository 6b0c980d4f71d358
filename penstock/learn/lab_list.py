"""The list of the labs. A module's `main()` runs its lab."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from penstock.errors import PenstockError
from penstock.launcher.forkserver import start_forkserver_early


@dataclass(frozen=True)
class Lab:
    """A lab: its module, whose `main()` runs it, and its title."""

    number: int
    module: str
    title: str

    def run(self, *words: str) -> None:
        """Run this lab, then print what to try; `words` may have a file or `--fix`. Raises SystemExit if a check fails."""
        from penstock.learn.lab_helpers import say  # here: a list of the labs needs no torch

        module = importlib.import_module(self.module)
        module.main(*words)
        say(f"\n{_try_text(module)}\nThe file: {module.__file__}")


def _try_text(module: ModuleType) -> str:
    """Return the paragraph of a lab's docstring that says what to change in it."""
    return next(text for text in (module.__doc__ or "").split("\n\n") if text.startswith("Try: ")).strip()


_TITLES = {
    "lab1_monolith": "one process, the whole model",
    "lab2_cut_by_hand": "two halves, the gradient carried over by hand, and the memory wall",
    "lab3_ping_pong": "two processes, a message, and how two ranks deadlock",
    "lab4_naive": "a cut model without a schedule: one rank works, the others wait",
    "lab5_gpipe": "microbatches fill the pipeline",
    "lab6_1f1b": "the same bubble with less memory, and a new deadlock",
    "lab7_interleaved": "several stages on each rank: a smaller bubble, more messages",
    "lab8_zero_bubble": "the backward in two halves: where the bubble went, by two clocks",
    "lab9_your_schedule": "a schedule of your own: proved, scored, run",
    "lab10_collectives": "collectives by hand on four ranks, and how much each rank sends",
    "lab11_data_parallel": "data parallel from one all-reduce",
    "lab12_tensor_parallel": "tensor parallel with its backward, by hand and declared",
    "lab13_two_axes": "two axes: 2 x 2, pipeline x data",
    "lab14_recompute_store_communicate": "recompute, store or communicate: three ways to have an activation",
    "lab15_fsdp": "FSDP by hand: replicas that each hold a shard of the weights",
    "lab16_transformer": "PyTorch's tutorial: a transformer cut by hand and by tracing",
    "lab17_hardware": "bandwidths from a core to a network, and what a link is worth",
    "lab18_overlap": "time a message, then hide it behind compute",
    "lab19_sequence": "the sequence axis: attention over ranks that each have a part of the tokens",
    "lab20_stale": "a pipeline that never drains, and what stale weights cost",
    "lab21_lengths": "rows of different lengths: as they arrive, sorted, planned",
    "lab22_teacher": "a second model in the idle time: its forwards placed by hand",
}

LABS: dict[int, Lab] = {
    number: Lab(number, f"penstock.learn.labs.{name}", title) for number, (name, title) in enumerate(_TITLES.items(), start=1)
}


SINGLE_PROCESS_LAB, SCHEDULE_LAB = 1, 9  # the one without ranks; the one that takes a learner's file


def run(number: int, file: Path | None = None, fix: bool = False) -> None:
    """Run lab `number`. Raises PenstockError if there is none, SystemExit if a check fails."""
    if number not in LABS:
        raise PenstockError(f"there is no lab {number}: choose one of {', '.join(map(str, LABS))}")
    if file is not None and number != SCHEDULE_LAB:
        raise PenstockError(f"lab {number} takes no file: leave {file} out, or choose lab {SCHEDULE_LAB}")
    if fix and number != SCHEDULE_LAB:
        raise PenstockError(f"lab {number} has nothing to mend: leave --fix out, or choose lab {SCHEDULE_LAB}")
    if fix and file is not None:
        raise PenstockError(f"--fix is about the schedule that lab {SCHEDULE_LAB} hands out: leave {file} out")
    if number != SINGLE_PROCESS_LAB:
        start_forkserver_early()
    words = ["--fix"] if fix else [str(file)] if file is not None else []
    LABS[number].run(*words)
