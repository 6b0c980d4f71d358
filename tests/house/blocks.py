"""The blocks of code on a page or in a docstring, and how they are run.

Blocks of one page run in their order, in one folder and with one set of names. Comments of HTML, which no reader sees, say
what a page does not:

    <!-- setup              names that its blocks take from the reader's program, made before the first of them;
    model = ..              `setup for 4 ranks`: there and in all blocks the code runs on so many ranks
    -->
    <!-- not run: why -->           the block below needs what is not here: a cluster, minutes, another library
    <!-- not compared: why -->      the output below is an example

A block of `text` below one of code is what that prints.
"""

import ast
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import penstock as ps
from penstock.commands.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

_PARTS = re.compile(
    r"<!-- setup(?: for (?P<ranks>\d+) ranks)?\n(?P<setup>.*?)-->"
    r"|(?:^<!-- (?P<mark>not run|not compared): [^\n]+ -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class CodeBlock(NamedTuple):
    """One block: `python`, `sh`, `setup` or `text`; `printed` is what the page says that it prints."""

    language: str
    code: str
    runs: bool = True
    printed: str | None = None


class Listing(NamedTuple):
    """A page, or a docstring, as something to run."""

    name: str
    ranks: int
    blocks: list[CodeBlock]


def page(path: Path) -> Listing:
    """What is on the page at `path`."""
    text = path.read_text(encoding="utf-8")
    ranks, blocks, end = 1, list[CodeBlock](), 0
    for part in _PARTS.finditer(text):
        if part["setup"] is not None:
            ranks = int(part["ranks"] or 1)
            blocks.append(CodeBlock("setup", part["setup"]))
        elif part["language"] == "text":
            if part["mark"] is None and blocks and not text[end : part.start()].strip():
                blocks[-1] = blocks[-1]._replace(printed=part["code"])
        elif part["language"] in ("python", "sh"):
            blocks.append(CodeBlock(part["language"], part["code"], part["mark"] is None))
        end = part.end()
    return Listing(path.relative_to(ROOT).as_posix(), ranks, blocks)


def docstrings() -> Iterator[tuple[str, str]]:
    """Each docstring of the package that has an example, by the dotted name of what it is of, and the example."""
    for path in sorted((ROOT / "penstock").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in _documented(ast.parse(path.read_text(encoding="utf-8"))):
            if code := "\n\n".join(_examples(ast.get_docstring(node) or "")):
                yield f"{module}.{getattr(node, 'name', '')}".rstrip("."), code


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """A module, its classes and functions, and those inside them."""
    yield node
    for statement in node.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            yield from _documented(statement)


def _examples(text: str) -> Iterator[str]:
    for indented in re.findall(r"(?:^|(?<=\n\n))((?: {4}.*\n?|\n(?= {4}))+)(?=\n|$)", text):
        code = dedent(indented)
        with contextlib.suppress(SyntaxError):
            body = ast.parse(code).body
            if not all(
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name) for statement in body
            ):  # words of a list
                yield code


# ---- running


def run(listing: Listing, mains: bool = True) -> None:
    """Run a listing in the working directory, with the main parts of its programs if `mains`.

    Raises AssertionError if it prints something else than it says.
    """
    if listing.ranks > 1:
        ps.launch(_run_all, listing.ranks, listing, mains)
    else:
        _run_all(listing, mains)


def _run_all(listing: Listing, mains: bool) -> None:
    names: dict[str, Any] = {"__name__": re.sub(r"\W", "_", listing.name)}
    for number, block in enumerate(listing.blocks):
        if not block.runs:
            continue
        where = f"{listing.name}, block {number}"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if block.language == "sh":
                _run_commands(block.code)
            else:
                names = _run_python(block.code, where, names, mains)
        if block.printed is not None:
            assert printed.getvalue().strip("\n") == block.printed.strip("\n"), where


def _run_commands(code: str) -> None:
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "penstock", f"{line}: only penstock's own commands run here; mark the block"
            with mock.patch.object(sys, "argv", words):
                main()


def _run_python(code: str, where: str, names: dict[str, Any], mains: bool) -> dict[str, Any]:
    """Run the code with `names`, and return those there are afterwards.

    A program becomes a module that ranks can import; what stands under `if __name__ == "__main__":` comes last, if `mains`.
    """
    tree = ast.parse(code)
    main_parts = [node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    if not main_parts:
        exec(compile(code, where, "exec"), names)
        return names
    module = sys.modules[names["__name__"]] = ModuleType(names["__name__"])
    Path(f"{module.__name__}.py").write_text(code)
    module.__dict__.update(names)
    parts = [[node for node in tree.body if node not in main_parts], *[node.body for node in main_parts if mains]]
    for part in parts:
        exec(compile(ast.Module(part, []), where, "exec"), module.__dict__)
    return module.__dict__
