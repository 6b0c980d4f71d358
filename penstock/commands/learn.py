"""`penstock lab` and `penstock puzzle`: run a lab; write, check, watch and explain a puzzle's file."""

import time
from pathlib import Path
from textwrap import fill
from typing import Literal, Optional  # not `| None`: see show.py

import tyro

from penstock.commands.command_options import command
from penstock.errors import PenstockError
from penstock.learn.puzzles.check_helpers import CheckFailed
from penstock.learn.puzzles.puzzle_files import FAST_TRACK, PUZZLE_NUMBERS, LearnerFolder, Puzzle, load_puzzle
from penstock.learn.timeline_parts import draw_in_parts
from penstock.schedule import Timeline
from penstock.view.terminal import terminal_width, use_colors

PuzzleAction = Literal["check", "watch", "hint", "reset", "solution"]
POLL_SECONDS = 0.2  # between checks whether a watched file has changed


@command(number="[NUMBER]", file="[FILE]")
class LabCommand:
    """Run a lab, a script that explains and checks one idea."""

    number: tyro.conf.Positional[Optional[int]] = None
    """The lab to run; without a number, list all labs."""
    file: tyro.conf.Positional[Optional[Path]] = None
    """For lab 9: the Python file with your schedule; without a file the lab writes one."""
    fix: bool = False
    """For lab 9: print the correction of the schedule that it hands out."""

    def run(self) -> None:
        """List the labs, or run one."""
        from penstock.learn import lab_list

        if self.number is None:
            for number, lab in lab_list.LABS.items():
                print(f"{number:2}  {lab.title}")
        else:
            lab_list.run(self.number, self.file, self.fix)


@command(what="[NUMBER] [watch | hint | reset | solution]")
class PuzzleCommand:
    """Complete a small file, and check it against numbers.

    `penstock puzzle` lists the twenty-one puzzles. `penstock puzzle 1` writes the file of the first. Complete the file, then
    run the same command again to check it.
    """

    what: tyro.conf.Positional[tuple[str, ...]] = ()
    """Check that puzzle, or do what the word says; without a number, the first puzzle that is not passed."""
    folder: Path = Path("puzzles")
    """Folder of your files; none is ever overwritten."""
    fast_track: bool = False
    """Only the seven puzzles for readers who know pipelines."""
    html: Optional[Path] = None
    """Also draw your table as an HTML page, in this file."""

    def run(self) -> None:
        """List the puzzles, or do what the words say with one."""
        folder = LearnerFolder(self.folder)
        number, action = _parse_words(self.what)
        if not self.what:
            return _list(folder, self.fast_track)
        number = folder.next(self.fast_track) if number is None else number
        if number is None:
            return print("All puzzles are passed.")

        puzzle = load_puzzle(number)
        if action == "hint":
            print(fill(folder.hint(puzzle), terminal_width()))
        elif action == "solution":
            print(folder.solution(puzzle))
        elif action == "reset":
            backup = folder.reset(puzzle)
            print(f"{folder.file(puzzle)} is new{f'; yours is {backup}' if backup else ''}")
        elif action == "watch":
            _watch(folder, puzzle, self)
        elif not _check(folder, puzzle, self):
            raise SystemExit(1)


def _parse_words(words: tuple[str, ...]) -> tuple[int | None, PuzzleAction]:
    number, action = None, "check"
    for word in words:
        if word.isdecimal() and word.isascii():
            number = int(word)
        elif word in ("check", "watch", "hint", "reset", "solution"):
            action = word
        else:
            raise PenstockError(
                f"puzzle takes a number from 1 to {PUZZLE_NUMBERS[-1]}, watch, hint, reset or solution, not {word!r}"
            )
    return number, action  # type: ignore[return-value]


def _list(folder: LearnerFolder, fast: bool) -> None:
    passed_numbers = folder.passed()
    for number in FAST_TRACK if fast else PUZZLE_NUMBERS:
        print(f"{'x' if number in passed_numbers else ' '} {number:2}  {load_puzzle(number).title}")
    next_number = folder.next(fast)
    print(f"\nnext: penstock puzzle {next_number}" if next_number else "\nAll puzzles are passed.")


def _check(folder: LearnerFolder, puzzle: Puzzle, options: PuzzleCommand) -> bool:
    """Check the puzzle's file, or write its stub if there is no file. Return False if the check fails."""
    path = folder.file(puzzle)
    if folder.write_stub(puzzle):
        print(f"{puzzle.number}. {puzzle.statement}\n")
        print(f"{path} is yours to complete. Then: penstock puzzle {puzzle.number}")
        return True

    try:
        result = folder.check(puzzle)
    except CheckFailed as failure:
        print(f"{puzzle.number}. {puzzle.title}: not yet. {failure}")
        _draw(failure.timeline, options.html)
        print(f"a hint: penstock puzzle {puzzle.number} hint")
        return False

    print(f"{puzzle.number}. {puzzle.title}: passed. {result.text}.")
    _draw(result.timeline, options.html)
    next_number = folder.next(options.fast_track, after=puzzle.number)
    print(f"why: penstock puzzle {puzzle.number} solution" + (f"; next: penstock puzzle {next_number}" if next_number else ""))
    return True


def _draw(timeline: Timeline | None, html: Path | None) -> None:
    """Draw the timeline, if there is one, on the terminal and in the file `html`."""
    from penstock.view.files import write
    from penstock.view.record import Record

    if timeline is None:
        return
    print(draw_in_parts(timeline, terminal_width(), use_colors()))
    for path in write([Record((timeline,))], html) if html is not None else ():
        print(f"wrote {path}")


def _watch(folder: LearnerFolder, puzzle: Puzzle, options: PuzzleCommand) -> None:
    """Check whenever the file changes, until the check passes or Ctrl-C."""
    folder.write_stub(puzzle)
    path, checked_version = folder.file(puzzle), None
    print(f"watching {path}; Ctrl-C ends it")
    while True:
        try:
            version = path.stat().st_mtime_ns
        except FileNotFoundError:
            version = None
        if version is not None and version != checked_version:
            checked_version = version
            if _check(folder, puzzle, options):
                return
        time.sleep(POLL_SECONDS)
