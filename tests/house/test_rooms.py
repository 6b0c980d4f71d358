"""The house stands: one direction between rooms, and no cycle between modules."""

from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import pytest
from rooms import HOUSE, MODULES, ORDER, imports, room


@cache
def edges() -> list[tuple[str, str]]:
    return [(module, other) for module in MODULES for other in sorted(imports(module))]


def test_every_room_has_its_floor():
    assert sorted(ORDER) == sorted({room(module) for module in MODULES})


@pytest.mark.costly
def test_a_room_imports_only_from_the_rooms_below_it():
    upward = [f"{module} imports {other}" for module, other in edges() if ORDER.index(room(other)) > ORDER.index(room(module))]
    assert not upward, "\n".join(upward)


class Wall(NamedTuple):
    """What a module may import, with all that its imports import: rooms, single modules of other rooms, and how much in all."""

    rooms: set[str]
    modules: set[str]
    max_modules: int
    max_lines: int


# A stage runs what a model was cut into: it knows no traces and no cuts. A step knows no times, no plans, no guards.
STAGE_ROOMS = {"errors", "lazy", "schedule", "torch_private", "trees", "python_objects", "randomness", "stage"}
GRAPH_STAGE = {"penstock.partition.graph_stage", "penstock.partition.graph_inputs"}
WALLS = {
    "penstock.stage.stage": Wall(STAGE_ROOMS, GRAPH_STAGE, max_modules=28, max_lines=4_500),
    "penstock.engine.step": Wall(
        STAGE_ROOMS | {"recent", "rows", "digest", "comms", "mesh", "batch", "engine"},
        GRAPH_STAGE,
        max_modules=80,
        max_lines=14_000,
    ),
}


@pytest.mark.parametrize("module", WALLS)
def test_a_step_and_a_stage_import_only_what_they_need(module):
    imported, queue = set(), [module]
    while queue:
        importer = queue.pop()
        imported.add(importer)
        queue += [other for other in imports(importer) if other not in imported]

    wall = WALLS[module]
    assert {other for other in imported if room(other) not in wall.rooms} <= wall.modules
    assert len(imported) <= wall.max_modules
    assert sum(len(MODULES[other].read_text(encoding="utf-8").splitlines()) for other in imported) <= wall.max_lines


@pytest.mark.costly
def test_no_modules_import_each_other_in_a_cycle():
    try:
        TopologicalSorter({module: imports(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


ONE_WAY = ("comms", "engine", "checkpoint")  # rooms whose own modules, too, are on one side of each of their folders


@pytest.mark.costly
def test_no_two_folders_of_a_room_import_each_other():
    pairs = {(MODULES[module].parent, MODULES[other].parent) for module, other in edges()}
    both_ways = {frozenset(pair) for pair in pairs if pair[::-1] in pairs and len({*pair}) == 2}
    found = []
    for pair in both_ways:
        outer, inner = sorted((folder.relative_to(HOUSE) for folder in pair), key=lambda folder: len(folder.parts))
        if outer not in inner.parents or outer.name in ONE_WAY:
            found.append({outer.as_posix(), inner.as_posix()})
    assert found == []


def test_files_of_tests_have_names_of_their_own():
    """Ranks of a launch import them by their bare names."""
    names = [path.name for path in (HOUSE.parent / "tests").rglob("*.py")]
    assert not {name for name in names if names.count(name) > 1}
