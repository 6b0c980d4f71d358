"""Docstrings as Markdown: arguments as a list, what is indented as code."""

import ast
import re
from textwrap import dedent

NAMED = re.compile(r"`[^`]+`(, `[^`]+`)*(:| {2,})")  # `ranks`: how many ..
DEFINED = re.compile(r"[\w, *]+")  # a line of names, their text indented below


def from_docstring(text: str) -> str:
    """`text`, a docstring without its indentation, as Markdown."""
    return "\n\n".join(_code(block) if _is_code(block) else _paragraph(block) for block in _blocks(text))


def _is_code(block: str) -> bool:
    return all(line.startswith("    ") for line in block.splitlines() if line)


def _blocks(text: str) -> list[str]:
    """Paragraphs, and code with the empty lines in it."""
    blocks: list[str] = []
    for part in re.split(r"\n{2,}", text.strip("\n")):
        if blocks and _is_code(part) and _is_code(blocks[-1]):
            blocks[-1] += "\n\n" + part
        else:
            blocks.append(part)
    return blocks


def _code(block: str) -> str:
    code = dedent(block)
    try:
        ast.parse(code)
    except SyntaxError:
        return f"```text\n{code}\n```"
    return f"```python\n{code}\n```"


def _paragraph(block: str) -> str:
    """An argument with its indented text is a definition; a line that begins with a name in code begins an item."""
    lines = block.splitlines()
    made: list[str] = []
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if DEFINED.fullmatch(line) and after.startswith("    "):
            made += ["", f"`{line}`"]
        elif line.startswith("    ") and DEFINED.fullmatch(before):
            made.append(f": {_prose(line.strip())}")
        elif NAMED.match(line):
            made += [f"* {_prose(line)}"] if made and made[-1].startswith(("* ", "  ")) else ["", f"* {_prose(line)}"]
        elif made and made[-1].startswith(("* ", "  ")):
            made.append(f"  {_prose(line)}")
        else:
            made.append(_prose(line))
    return "\n".join(made)


def _prose(line: str) -> str:
    """A line in which only what stands in backticks is markup."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[\]|])", r"\\\1", part) for part in parts)
