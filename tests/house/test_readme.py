"""What the README and the documentation say is so."""

import re
from pathlib import Path

import pytest
from prompt import python
from rooms import PAGE, with_table

from penstock.schedule import Costs, build, names, simulate

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCHEDULES = (ROOT / "docs" / "schedules" / "index.md").read_text(encoding="utf-8")


@pytest.mark.ranks
def test_its_example_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    ended = python(tmp_path / "example.py")
    first, last = map(float, re.findall(r"[\d.]+", ended.stdout))
    assert last < first / 2, ended.stderr


def test_its_picture_is_what_the_command_draws() -> None:
    from penstock.view.figure.svg import svg
    from penstock.view.figure.timeline_figure import figure
    from penstock.view.record import Record

    drawn = svg(figure(Record((simulate(build("zb-v", 4, 8), Costs(1, 1, 1)),))))
    assert drawn == (ROOT / "docs" / "images" / "zb-v.svg").read_text(encoding="utf-8")


def test_links_lead_to_files_that_are_there() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_table_of_schedules_is_what_the_simulator_says() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (\d)[^|]*\| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \|", SCHEDULES, re.MULTILINE)
    assert [name for name, *_ in rows] == names()
    for name, stages_per_rank, makespan, bubble, in_flight in rows:
        schedule = build(name, ranks=4, microbatches=8)
        share = 4 / schedule.stages  # of a rank's time, for each of its stages
        timeline = simulate(schedule, Costs(share, share, share))
        assert schedule.stages == 4 * int(stages_per_rank)
        assert f"{timeline.makespan:g}" == makespan, name
        assert f"{100 * timeline.bubble:.1f}" == bubble, name
        assert f"{max(timeline.peak_in_flight) * share:g}" == in_flight, name


def test_the_rooms_are_those_of_the_package_with_their_own_words() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "make rooms"


def test_the_drawn_schedule_is_what_the_command_prints() -> None:
    from penstock.view.terminal import draw

    picture = draw(simulate(build("1f1b", 4, 8), Costs(1, 1, 1)), 100)
    assert picture in SCHEDULES


def test_the_documentations_list_has_every_page_once() -> None:
    docs = ROOT / "docs"
    listed = re.findall(r"^\| \[[^]]+\]\(([\w./-]+)\)", (docs / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(listed) == sorted(page for page in pages if page != "index.md")


def test_tests_that_pages_name_are_there() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for path, name in re.findall(r"`(tests/[\w/]+\.py)`(?:: `(test_\w+)`)?", page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
            assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{page.name}: {path}: {name}"
