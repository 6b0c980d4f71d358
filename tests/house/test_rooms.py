"""The house stands: one direction between rooms, no circle between modules, no folder too full, and a map in each."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from rooms import HOUSE, MODULES, ORDER, docstring, imports, room

ENTRIES = 13
FULLER = {
    "penstock": "the rooms themselves, and what all of them use",
    "penstock/learn/labs": "a file for each lab",
    "penstock/learn/puzzles": "a file for each puzzle",
}
MAPPED = {
    "penstock": "in docs/explanation/architecture.md (test_readme.py)",
    "penstock.learn.labs": "in learn.catalog, for `penstock lab`",
    "penstock.learn.puzzles": "in book.NAMES, for `penstock puzzle`",
}
PACKAGES = [module for module, path in MODULES.items() if path.name == "__init__.py"]


def entries(folder: Path) -> list[str]:
    """The modules and folders that a stranger has to choose from."""
    return sorted(path.stem for path in folder.iterdir() if not path.name.startswith("__") and path.name != "py.typed")


def test_every_room_has_its_floor():
    assert sorted(ORDER) == sorted({room(module) for module in MODULES})


def test_a_room_imports_only_from_the_rooms_below_it():
    upward = [
        f"{module} imports {other}"
        for module in MODULES
        for other in sorted(imports(module))
        if ORDER.index(room(other)) > ORDER.index(room(module))
    ]
    assert not upward, "\n".join(upward)


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter({module: imports(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_a_folder_can_be_taken_in_at_a_glance():
    folders = [folder for folder in HOUSE.rglob("*") if folder.is_dir() and folder.name != "__pycache__"]
    counts = {folder.relative_to(HOUSE.parent).as_posix(): len(entries(folder)) for folder in [HOUSE, *folders]}
    assert {folder: count for folder, count in counts.items() if count > ENTRIES and folder not in FULLER} == {}


@pytest.mark.parametrize("package", [name for name in PACKAGES if name not in MAPPED])
def test_a_packages_docstring_has_its_idea_and_a_map_of_its_files(package):
    first, *_ = docstring(package).splitlines() or [""]
    assert first.endswith("."), f"{package} does not begin with its idea in a sentence"
    mapped = set(re.findall(r"(?:^ *|`)(\w+)", docstring(package), re.MULTILINE))
    missing = [name for name in entries(MODULES[package].parent) if name not in mapped]
    assert not missing, f"the map of {package} lacks {', '.join(missing)}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is(module):
    assert docstring(module).partition("\n")[0].endswith((".", ":", ";")), f"{module} does not say its idea in its first line"


def test_files_of_tests_have_names_of_their_own():
    """Ranks of a launch import them by their bare names."""
    names = [path.name for path in (HOUSE.parent / "tests").rglob("*.py")]
    assert not {name for name in names if names.count(name) > 1}
