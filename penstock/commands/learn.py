"""`penstock lab` and `penstock puzzle`: run a lab; hand out, check, watch and explain a puzzle."""

import time
from pathlib import Path
from textwrap import fill
from typing import Literal, Optional  # not `| None`: see show.py

import tyro

from penstock.commands.options import command
from penstock.errors import PenstockError
from penstock.learn.puzzles.book import FAST_TRACK, NAMES, Folder, Puzzle, puzzle
from penstock.learn.puzzles.judge import Missed
from penstock.learn.timeline_parts import draw_in_parts
from penstock.schedule import Timeline
from penstock.view.terminal import colors, terminal_width

PuzzleAction = Literal["check", "watch", "hint", "reset", "solution"]
POLL_SECONDS = 0.2  # between looks at a watched file


@command(number="[NUMBER]", file="[FILE]")
class LabCommand:
    """Run a lab, a script that explains and checks one idea."""

    number: tyro.conf.Positional[Optional[int]] = None
    """The lab to run; without a number all labs are listed."""
    file: tyro.conf.Positional[Optional[Path]] = None
    """For lab 9: the Python file with your schedule; if there is none, the lab writes it."""
    fix: bool = False
    """For lab 9: print what mends the schedule that it hands out."""

    def run(self) -> None:
        """List the labs, or run one."""
        from penstock.learn import catalog

        if self.number is None:
            for number, lab in catalog.LABS.items():
                print(f"{number:2}  {lab.title}")
        else:
            catalog.run(self.number, self.file, self.fix)


@command(what="[NUMBER] [watch | hint | reset | solution]")
class PuzzleCommand:
    """Complete a small file; its target is checked in numbers.

    The command `penstock puzzle` lists the twenty-one puzzles. `penstock puzzle 1` hands out the first. Complete the file, then
    the same command checks it.
    """

    what: tyro.conf.Positional[tuple[str, ...]] = ()
    """Check that puzzle, or what the word says; without a number the first puzzle that is not passed."""
    folder: Path = Path("puzzles")
    """Folder of your files; none is ever overwritten."""
    fast_track: bool = False
    """Only the seven puzzles for readers who know pipelines."""
    html: Optional[Path] = None
    """Also draw your table as a page for the browser, in this file."""

    def run(self) -> None:
        """List the puzzles, or do what the words say with one of them."""
        folder = Folder(self.folder)
        number, action = _parse_words(self.what)
        if not self.what:
            return _list(folder, self.fast_track)
        number = folder.next(self.fast_track) if number is None else number
        if number is None:
            return print("All puzzles are passed.")

        book_puzzle = puzzle(number)
        if action == "hint":
            print(fill(folder.hint(book_puzzle), terminal_width()))
        elif action == "solution":
            print(folder.solution(book_puzzle))
        elif action == "reset":
            backup = folder.reset(book_puzzle)
            print(f"{folder.file(book_puzzle)} is new{f'; yours is {backup}' if backup else ''}")
        elif action == "watch":
            _watch(folder, book_puzzle, self)
        elif not _check(folder, book_puzzle, self):
            raise SystemExit(1)


def _parse_words(words: tuple[str, ...]) -> tuple[int | None, PuzzleAction]:
    number, action = None, "check"
    for word in words:
        if word.isdecimal() and word.isascii():
            number = int(word)
        elif word in ("check", "watch", "hint", "reset", "solution"):
            action = word
        else:
            raise PenstockError(f"puzzle takes a number from 1 to {len(NAMES)}, watch, hint, reset or solution, not {word!r}")
    return number, action  # type: ignore[return-value]


def _list(folder: Folder, fast: bool) -> None:
    passed_numbers = folder.passed()
    for number in FAST_TRACK if fast else range(1, len(NAMES) + 1):
        print(f"{'x' if number in passed_numbers else ' '} {number:2}  {puzzle(number).title}")
    following = folder.next(fast)
    print(f"\nnext: penstock puzzle {following}" if following else "\nAll puzzles are passed.")


def _check(folder: Folder, book_puzzle: Puzzle, options: PuzzleCommand) -> bool:
    """Hand the puzzle out if the folder has no file for it, else check the file. Return whether it is passed."""
    path = folder.file(book_puzzle)
    if folder.hand_out(book_puzzle):
        print(f"{book_puzzle.number}. {book_puzzle.story}\n")
        print(f"{path} is yours to complete. Then: penstock puzzle {book_puzzle.number}")
        return True

    try:
        result = folder.check(book_puzzle)
    except Missed as missed:
        print(f"{book_puzzle.number}. {book_puzzle.title}: not yet. {missed}")
        _draw(missed.picture, options.html)
        print(f"a hint: penstock puzzle {book_puzzle.number} hint")
        return False

    print(f"{book_puzzle.number}. {book_puzzle.title}: passed. {result.text}.")
    _draw(result.picture, options.html)
    following = folder.next(options.fast_track, after=book_puzzle.number)
    print(f"why: penstock puzzle {book_puzzle.number} solution" + (f"; next: penstock puzzle {following}" if following else ""))
    return True


def _draw(timeline: Timeline | None, html: Path | None) -> None:
    from penstock.view.files import write
    from penstock.view.record import Record

    if timeline is None:
        return
    print(draw_in_parts(timeline, terminal_width(), colors()))
    for path in write([Record((timeline,))], html) if html is not None else ():
        print(f"wrote {path}")


def _watch(folder: Folder, book_puzzle: Puzzle, options: PuzzleCommand) -> None:
    """Check whenever the file has changed, until it is passed or Ctrl-C."""
    folder.hand_out(book_puzzle)
    path, checked_version = folder.file(book_puzzle), None
    print(f"{path} is watched; Ctrl-C ends it")
    while True:
        try:
            version = path.stat().st_mtime_ns
        except FileNotFoundError:
            version = None
        if version is not None and version != checked_version:
            checked_version = version
            if _check(folder, book_puzzle, options):
                return
        time.sleep(POLL_SECONDS)
