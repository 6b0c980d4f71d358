"""The glossary speaks of what is there: every word of ours in it is one that the code uses."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
CODE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "penstock").rglob("*.py")))


def our_words() -> list[str]:
    """The words of the first column of the tables whose first column is `here`."""
    words = []
    for table in re.findall(r"^\| here \|.*\n\|[-|]+\n((?:\|.*\n)+)", GLOSSARY, re.MULTILINE):
        for row in table.splitlines():
            column = row.split("|")[1].strip()
            words += re.findall(r"`([^`]+)`", column) or column.split(", ")
    return words


def test_every_word_of_ours_is_in_the_code():
    assert len(our_words()) > 80
    assert [word for word in our_words() if not re.search(rf"(?<![\w-]){re.escape(word)}s?(?![\w-])", CODE)] == []


def test_every_room_of_the_glossary_is_there():
    table = GLOSSARY.partition("| here | room |")[2].partition("## ")[0]
    rooms = set(re.findall(r"^\| `?[\w-]+`? \| (\w+) \|", table, re.MULTILINE))
    assert len(rooms) > 5
    assert [room for room in rooms if not list((ROOT / "penstock").glob(f"{room}*"))] == []


def test_every_source_that_is_cited_is_listed():
    listed = re.findall(r"^(\d+)\. ", GLOSSARY.partition("## Sources")[2], re.MULTILINE)
    assert set(re.findall(r"\[(\d+)\]", GLOSSARY)) == set(listed)
