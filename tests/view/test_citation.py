"""Citations: every family has its papers, and no paper is cited that no family has."""

import re
from pathlib import Path

import pytest

import penstock
from penstock.schedule import build, names, simulate
from penstock.schedule.catalog import FAMILIES
from penstock.view.citation import AUTHORS, PAPERS, TITLE, arxiv_numbers, bibtex
from penstock.view.record import save


def test_every_family_but_naive_has_papers_and_every_paper_a_family():
    cited = {name: arxiv_numbers(name) for name in names()}
    assert [name for name, numbers in cited.items() if not numbers] == ["naive"]
    assert {number for numbers in cited.values() for number in numbers} == PAPERS.keys()


@pytest.mark.parametrize("name", names())
def test_the_authors_and_years_are_those_of_the_rule(name):
    rule = FAMILIES[name].rule.__doc__ or ""
    for author, year, number in re.findall(r"\(([A-Z][\w-]+) (?:et al\. )?(\d{4}), (?:\w+, )?arXiv (\S+?)[,)]", rule):
        assert (PAPERS[number].authors.partition(",")[0], f"{PAPERS[number].year}") == (author, year)


def test_bibtex_cites_penstock_and_the_papers():
    assert bibtex("zb-h1").splitlines() == [
        "@software{penstock,",
        f"  author = {{{{{AUTHORS}}}}},",
        f"  title = {{{{{TITLE}}}}},",
        f"  version = {{{penstock.__version__}}},",
        "  year = {2026},",
        "}",
        "",
        "@misc{zero-bubble,",
        "  author = {Qi, Penghui and Wan, Xinyi and Huang, Guangxing and Lin, Min},",
        "  title = {{Zero Bubble Pipeline Parallelism}},",
        "  year = {2023},",
        "  eprint = {2401.10241},",
        "  archivePrefix = {arXiv},",
        "}",
    ]
    assert bibtex("mine.py") == bibtex("naive") == bibtex("zb-h1").partition("\n\n")[0]


def test_the_file_that_sites_read_says_the_same():
    text = (Path(penstock.__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8")
    assert f'title: "{TITLE}"' in text
    assert f'- name: "{AUTHORS}"' in text
    assert f"version: {penstock.__version__}\n" in text


def test_the_page_lists_the_same_papers():
    text = (Path(penstock.__file__).parents[1] / "docs" / "howto" / "paper.md").read_text(encoding="utf-8")
    for line in text.partition("| to cite | papers |")[2].splitlines()[2:]:
        _, families, papers, _ = line.split("|")
        for name in re.findall("`([^`]+)`", families):
            assert re.findall(r"\[(\d{4}\.\d{5})\]", papers) == arxiv_numbers(name), name


def test_show_prints_the_citation_of_a_name_and_of_a_run(tmp_path, monkeypatch, capsys):
    from penstock.commands.show import ShowCommand

    save(simulate(build("gpipe", 2, 2)), None, tmp_path / "timeline.json")
    for source in ("gpipe", str(tmp_path)):
        ShowCommand(schedule=source, bibtex=True).run()
        assert capsys.readouterr().out == bibtex("gpipe") + "\n"
