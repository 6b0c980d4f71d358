"""Cite Penstock and the papers of a schedule, in BibTeX. Which papers: the arXiv numbers in the docstring of its rule."""

import re
from collections.abc import Iterator
from inspect import getdoc
from typing import NamedTuple

import penstock
from penstock.schedule.catalog import FAMILIES

YEAR = 2026  # of this release
AUTHORS = "The Penstock contributors"
TITLE = "Penstock: pipeline-parallel training for PyTorch that people can read, prove and see"


class Paper(NamedTuple):
    """A paper on arXiv."""

    key: str
    authors: str
    title: str
    year: int


PAPERS = {
    "1811.06965": Paper(
        "gpipe",
        "Huang, Yanping and Cheng, Youlong and Bapna, Ankur and Firat, Orhan and others",
        "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
        2018,
    ),
    "2006.09503": Paper(
        "pipedream-flush",
        "Narayanan, Deepak and Phanishayee, Amar and Shi, Kaiyu and Chen, Xie and Zaharia, Matei",
        "Memory-Efficient Pipeline-Parallel DNN Training",
        2020,
    ),
    "2102.07988": Paper(
        "terapipe",
        "Li, Zhuohan and Zhuang, Siyuan and Guo, Shiyuan and Zhuo, Danyang and others",
        "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models",
        2021,
    ),
    "2104.04473": Paper(
        "megatron-lm-pipelines",
        "Narayanan, Deepak and Shoeybi, Mohammad and Casper, Jared and LeGresley, Patrick and others",
        "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
        2021,
    ),
    "2211.05953": Paper("breadth-first", "Lamy-Poirier, Joel", "Breadth-First Pipeline Parallelism", 2022),
    "2401.10241": Paper(
        "zero-bubble",
        "Qi, Penghui and Wan, Xinyi and Huang, Guangxing and Lin, Min",
        "Zero Bubble Pipeline Parallelism",
        2023,
    ),
    "2405.15362": Paper(
        "controllable-memory",
        "Qi, Penghui and Wan, Xinyi and Amar, Nyamdavaa and Lin, Min",
        "Pipeline Parallelism with Controllable Memory",
        2024,
    ),
    "2406.03488": Paper(
        "seq1f1b",
        "Sun, Ao and Zhao, Weilin and Han, Xu and Yang, Cheng and others",
        "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training",
        2024,
    ),
    "2412.19437": Paper("deepseek-v3", "{DeepSeek-AI}", "DeepSeek-V3 Technical Report", 2024),
}


def arxiv_numbers(name: str) -> list[str]:
    """Return the arXiv numbers of the papers behind a schedule; none for one that is not in the catalog."""
    rule = FAMILIES[name].rule if name in FAMILIES else None
    return list(dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", getdoc(rule) or "")))


def bibtex(name: str) -> str:
    """Return BibTeX for Penstock, and for the papers behind the schedule `name` if it is in the catalog."""
    return "\n\n".join([_penstock_entry(), *_paper_entries(name)])


def _penstock_entry() -> str:
    fields = {"author": f"{{{AUTHORS}}}", "title": f"{{{TITLE}}}", "version": penstock.__version__, "year": f"{YEAR}"}
    return _entry("software", "penstock", fields)


def _paper_entries(name: str) -> Iterator[str]:
    for number in arxiv_numbers(name):
        key, authors, title, year = PAPERS[number]
        fields = {"author": authors, "title": f"{{{title}}}", "year": f"{year}", "eprint": number, "archivePrefix": "arXiv"}
        yield _entry("misc", key, fields)


def _entry(kind: str, key: str, fields: dict[str, str]) -> str:
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"])
