"""The house stands: one direction between rooms, and no circle between modules."""

from graphlib import CycleError, TopologicalSorter

import pytest
from rooms import HOUSE, MODULES, ORDER, imports, room


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


def test_files_of_tests_have_names_of_their_own():
    """Ranks of a launch import them by their bare names."""
    names = [path.name for path in (HOUSE.parent / "tests").rglob("*.py")]
    assert not {name for name in names if names.count(name) > 1}
