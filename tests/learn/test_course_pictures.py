"""The course's pictures are as `tools/course_pictures.py` draws them, and fit a phone."""

import re
import runpy
from pathlib import Path

from penstock.view.figure.shapes import Text
from penstock.view.figure.svg import svg

ROOT = Path(__file__).parents[2]
IMAGES, CHAPTERS = ROOT / "docs" / "images" / "learn", ROOT / "docs" / "learn"
PICTURES = runpy.run_path(str(ROOT / "tools" / "course_pictures.py"))["PICTURES"]
LINK = re.compile(r"^!\[([^]]+)\]\(\.\./images/learn/([\w-]+)\.svg\)\n\n\*[^\n]+\*$", re.MULTILINE)


def test_every_picture_is_as_the_code_draws_it() -> None:
    assert sorted(path.stem for path in IMAGES.iterdir()) == sorted(PICTURES)
    for name, draw in PICTURES.items():
        drawn = svg(draw())
        assert drawn == (IMAGES / f"{name}.svg").read_text(encoding="utf-8"), f"{name}: python tools/course_pictures.py"


def test_every_chapter_has_a_picture_with_a_caption_and_every_picture_a_chapter() -> None:
    chapters = re.findall(r"^\| \[\d+\. .*?\]\((.*?)\)", (CHAPTERS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    shown = {chapter: LINK.findall((CHAPTERS / chapter).read_text(encoding="utf-8")) for chapter in chapters}
    assert all(shown.values()), shown
    assert sorted(name for pictures in shown.values() for _, name in pictures) == sorted(PICTURES)


def test_every_picture_has_a_phones_width_and_texts_that_fit_into_it() -> None:
    for name, draw in PICTURES.items():
        figure = draw()
        assert figure.width == 360
        for shape in figure.shapes:
            if isinstance(shape, Text):
                width = 0.52 * shape.size * len(shape.text)
                left = shape.x - {"start": 0, "middle": width / 2, "end": width}[shape.anchor]
                assert shape.size >= 9, (name, shape)
                assert left > -2, (name, shape)
                assert left + width < 362, (name, shape)
                assert 0 < shape.y < figure.height, (name, shape)


def test_a_ring_all_reduce_adds_all_values_in_twice_the_ranks_less_one_steps() -> None:
    ring_states = runpy.run_path(str(ROOT / "tools" / "course_pictures.py"))["ring_states"]
    for ranks in (2, 3, 4, 5):
        states = ring_states(ranks)
        assert len(states) == 2 * (ranks - 1) + 1
        assert states[-1] == [[ranks] * ranks] * ranks
        assert all(ranks in pieces for pieces in states[ranks - 1])
