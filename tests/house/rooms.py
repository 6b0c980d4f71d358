"""The rooms of penstock, read from their files: `python tests/house/rooms.py` writes the table of them in docs/."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "penstock"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"

# From the ground up: a room imports from those before it. `penstock` is the package's own face. Parts of `plan` that need
# less, or more, than the rest are rooms of their own.
ORDER = [
    *("errors", "lazy", "recent", "distribution", "schedule", "timing", "python_file", "plan.search"),
    *("plan.dependency_graph", "plan.microbatch_order", "plan.group_search", "explain"),  # no torch until here
    *("torch_private", "trees", "rows", "python_objects", "randomness", "digest", "plan.grouping"),
    *("comms", "partition", "stage", "mesh", "batch", "options", "engine"),  # a step
    *("plan", "rebuild", "guards", "generate", "launcher"),
    *("pipeline_parts", "pipeline_parameters", "pipeline", "model", "checkpoint"),
    *("plan.overheads", "penstock", "view", "integrations", "learn", "commands", "__main__"),
]

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(HOUSE.rglob("*.py"))
}


def room(module: str) -> str:
    """The room that a module is in: `timing` of `penstock.timing.simulate`, `plan.search` of `penstock.plan.search.cp_sat`."""
    _, *parts = [*module.split("."), ""]
    return next((name for name in (".".join(parts[:2]), parts[0]) if name in ORDER), module)


@cache
def imports(module: str) -> set[str]:
    """The modules of penstock that `module` imports, wherever in it. A lazy name of a package counts as its module."""
    found = set()
    for node in _list_imports(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{module} imports by dots: write the module's whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else lazy_names(str(node.module)).get(name, str(node.module)) for name in names}
    return found & MODULES.keys()


@cache
def lazy_names(package: str) -> dict[str, str]:
    """The names that a package finds when they are first used, each with its module: it imports them for type checkers."""
    nodes = _imports_for_type_checkers(package) if package in MODULES else []
    return {f"{package}.{alias.name}": str(node.module) for node in nodes for alias in node.names}


def _list_imports(module: str) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a module, without those by which a package tells type checkers its lazy names."""
    nodes = [node for node in ast.walk(_parse(module)) if isinstance(node, ast.Import | ast.ImportFrom)]
    lazy = _imports_for_type_checkers(module)
    return [node for node in nodes if node not in lazy]


def _imports_for_type_checkers(module: str) -> list[ast.ImportFrom]:
    """The imports of a package, if it is one, under `if TYPE_CHECKING`."""
    if MODULES[module].name != "__init__.py":
        return []
    blocks = [node for node in _parse(module).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]


@cache
def _parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def docstring(module: str) -> str:
    """What a module says of itself; empty if nothing."""
    return ast.get_docstring(_parse(module)) or ""


def idea(module: str) -> str:
    """The first sentence of a module's docstring."""
    return re.split(r"\.(?=\s|$)", " ".join(docstring(module).split()))[0] + "."


def table() -> str:
    """The table: every room, from the ground up, with its idea."""
    rooms = [name for name in ORDER if name not in ("penstock", "__main__")]
    paths = [HOUSE.joinpath(*name.split(".")) for name in rooms]
    places = [f"{path.relative_to(HOUSE)}{'/' if path.is_dir() else '.py'}" for path in paths]
    rows = [f"| `{place}` | {idea(f'penstock.{name}')} |" for place, name in zip(places, rooms, strict=True)]
    return "\n".join(["| room | idea |", "|---|---|", *rows])


BEGIN, END = "<!-- rooms: written by `make rooms` -->", "<!-- end of rooms -->"


def with_table(text: str) -> str:
    """The page's `text` with the table as it is now between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
