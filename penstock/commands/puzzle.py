"""The command `penstock puzzle`: hand out, check, watch, hint, reset, and the solution of what has been passed."""

import time
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Literal, Optional  # not `| None`: see show.py

import tyro

from penstock.errors import PenstockError
from penstock.learn.picture import drawn_in_parts
from penstock.learn.puzzles.book import FAST_TRACK, NAMES, Folder, puzzle
from penstock.learn.puzzles.book import Puzzle as Given
from penstock.learn.puzzles.judge import Missed
from penstock.schedule import Timeline
from penstock.view.terminal import colors, terminal_width

Ask = Literal["check", "watch", "hint", "reset", "solution"]
LOOK = 0.2  # seconds between looks at a watched file


@dataclass(frozen=True)
class Puzzle:
    """Learn by writing: twenty small files to complete, each with a target that is checked in numbers."""

    what: tyro.conf.Positional[tuple[str, ...]] = ()
    """A number, or watch, hint, reset or solution, or both: `penstock puzzle 9 hint`. Without a number, the first that is
    not passed. Without anything, the list."""
    folder: Path = Path("puzzles")
    """Where your files are; none is ever overwritten."""
    fast_track: bool = False
    """The heart of it: seven puzzles for those who know the rest."""
    html: Optional[Path] = None
    """Also draw your table as a page for the browser."""

    def run(self) -> None:
        """Do what was asked."""
        folder, number, ask = Folder(self.folder), *_asked(self.what)
        if not self.what:
            return _list(folder, self.fast_track)
        number = folder.next(self.fast_track) if number is None else number
        if number is None:
            return print("All puzzles are passed.")
        each = puzzle(number)
        if ask == "hint":
            print(fill(folder.hint(each), terminal_width()))
        elif ask == "solution":
            print(folder.solution(each))
        elif ask == "reset":
            aside = folder.reset(each)
            print(f"{folder.file(each)} is new{f'; yours is {aside}' if aside else ''}")
        elif ask == "watch":
            _watch(folder, each, self)
        elif not _judged(folder, each, self):
            raise SystemExit(1)


def _asked(words: tuple[str, ...]) -> tuple[int | None, Ask]:
    number, ask = None, "check"
    for word in words:
        if word.isdecimal() and word.isascii():
            number = int(word)
        elif word in ("check", "watch", "hint", "reset", "solution"):
            ask = word
        else:
            raise PenstockError(f"puzzle takes a number from 1 to {len(NAMES)}, watch, hint, reset or solution, not {word!r}")
    return number, ask  # type: ignore[return-value]


def _list(folder: Folder, fast: bool) -> None:
    passed = folder.passed()
    for number in FAST_TRACK if fast else range(1, len(NAMES) + 1):
        print(f"{'x' if number in passed else ' '} {number:2}  {puzzle(number).title}")
    following = folder.next(fast)
    print(f"\nnext: penstock puzzle {following}" if following else "\nAll puzzles are passed.")


def _judged(folder: Folder, each: Given, options: Puzzle) -> bool:
    """Hand the puzzle out, or check what there is; whether it is passed."""
    path = folder.file(each)
    if folder.hand_out(each):
        print(f"{each.number}. {each.story}\n\n{path} is yours to complete. Then: penstock puzzle {each.number}")
        return True
    try:
        passed = folder.check(each)
    except Missed as missed:
        print(f"{each.number}. {each.title}: not yet. {missed}")
        _picture(missed.picture, options.html)
        print(f"a hint: penstock puzzle {each.number} hint")
        return False
    print(f"{each.number}. {each.title}: passed. {passed.text}.")
    _picture(passed.picture, options.html)
    following = folder.next(options.fast_track, after=each.number)
    print(f"why: penstock puzzle {each.number} solution" + (f"; next: penstock puzzle {following}" if following else ""))
    return True


def _picture(timeline: Timeline | None, html: Path | None) -> None:
    from penstock.view.files import write
    from penstock.view.record import Record

    if timeline is None:
        return
    print(drawn_in_parts(timeline, terminal_width(), colors()))
    for path in write([Record((timeline,))], html) if html is not None else ():
        print(f"wrote {path}")


def _watch(folder: Folder, each: Given, options: Puzzle) -> None:
    """Check whenever the file has changed, until it is passed or Ctrl-C."""
    folder.hand_out(each)
    path, seen = folder.file(each), None
    print(f"{path} is watched; Ctrl-C ends it")
    while True:
        try:
            now = path.stat().st_mtime_ns
        except FileNotFoundError:
            now = None
        if now is not None and now != seen:
            seen = now
            if _judged(folder, each, options):
                return
        time.sleep(LOOK)
