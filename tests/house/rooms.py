"""The rooms of penstock, read from their files: `python tests/house/rooms.py` writes the table of them in docs/."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "penstock"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"

# From the ground up: a room imports from those before it. `penstock` is the package's own face.
ORDER = [
    *("errors", "lazy", "distribution", "schedule"),  # plain Python
    *("torch_private", "trees", "randomness", "attention_hook"),
    *("comms", "partition", "stage", "mesh", "engine", "pipeline", "model", "checkpoint"),
    *("plan", "penstock", "view", "integrations", "learn", "commands", "__main__"),
]

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(HOUSE.rglob("*.py"))
}


def room(module: str) -> str:
    """The room that a module is in: `schedule` for `penstock.schedule.timing.simulate`."""
    return module.split(".")[1] if "." in module else module


@cache
def imports(module: str) -> set[str]:
    """The modules of penstock that `module` imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by dots: write the module's whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found & MODULES.keys()


def docstring(module: str) -> str:
    """What a module says of itself; empty if nothing."""
    return ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8"))) or ""


def idea(module: str) -> str:
    """The first sentence of a module's docstring."""
    return re.split(r"\.(?=\s|$)", " ".join(docstring(module).split()))[0] + "."


def table() -> str:
    """The table: every room, from the ground up, with its idea."""
    places = [name for name in ORDER if name not in ("penstock", "__main__")]
    rows = [f"| `{name}{'/' if (HOUSE / name).is_dir() else '.py'}` | {idea(f'penstock.{name}')} |" for name in places]
    return "\n".join(["| room | idea |", "|---|---|", *rows])


BEGIN, END = "<!-- rooms: written by `make rooms` -->", "<!-- end of rooms -->"


def with_table(text: str) -> str:
    """The page's `text` with the table as it is now between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
