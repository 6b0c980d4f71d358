"""The house stands: one direction between rooms, no circle between modules, and each says what it is."""

from graphlib import CycleError, TopologicalSorter

import pytest
from rooms import MODULES, ORDER, docstring, imports, room


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


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is(module):
    assert docstring(module).partition("\n")[0].endswith((".", ":", ";")), f"{module} does not say its idea in its first line"
