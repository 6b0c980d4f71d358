"""The playground: the studio's page without its server. Pyodide runs Penstock's own Python in the reader's browser.

The page, `playground/index.html` of the site, is the studio's own but for the files in tools/site/playground: one way to ask,
a place to write a schedule, and a worker. It serves from any folder, and asks nothing of anybody else.
"""

import html
import shutil
import zipfile
from pathlib import Path
from urllib.parse import urlencode

import pyodide

from penstock.view.studio.server import DRAWING_SCRIPTS, STUDIO_SCRIPTS, STYLES, page, read_page_file

HERE, HOUSE = Path(__file__).parent / "playground", Path(__file__).parents[2] / "penstock"
OTHERS = ("asking.js", "written.js", "worker.mjs", "playground.css")
# What the worker imports: plain Python, without torch.
PYTHON = (
    *("__init__.py", "errors.py", "lazy.py", "schedule/**/*.py", "plan/*.py", "view/**/*.py"),
    *("learn/__init__.py", "learn/python_schedule.py"),
)
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def build(folder: Path, kept: Path) -> None:
    """The playground in `folder`; Pyodide's package is kept in the folder `kept`. Raises pyodide.Missing if there is none."""
    pyodide.unpacked(folder / "pyodide", kept)
    for name in (*DRAWING_SCRIPTS, *STUDIO_SCRIPTS, *STYLES):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(read_page_file(name), encoding="utf-8")
    for name in OTHERS:
        shutil.copy(HERE / name, folder)
    pack(folder / "penstock.zip")
    fetched = [folder / "penstock.zip", *(folder / "pyodide" / name for name in pyodide.FETCHED)]
    (folder / "index.html").write_text(_page(sum(path.stat().st_size for path in fetched)), encoding="utf-8")


def pack(file: Path) -> None:
    """The Python files that the worker needs, as a zip."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.write(HERE / "answering.py", "answering.py")
        for path in sorted(path for pattern in PYTHON for path in HOUSE.glob(pattern)):
            packed.write(path, path.relative_to(HOUSE.parent))


def link(folder: str, text: str, **state: object) -> str:
    """A link, as HTML, from a page in that folder of the site; `state` is what the playground's address says, if anything."""
    address = "../" * folder.count("/") + "playground/index.html" + (f"?{urlencode(state)}" if state else "")
    return f'<a class="reference external" href="{html.escape(address)}">{text}</a>'


def opened_from(page: str) -> str:
    """The page about the playground, with a link that opens it below the title."""
    title, rest = page.split("\n", 1)
    return f"{title}\n\n{link('', 'Open the playground')}\n{rest}"


def _page(size: int) -> str:
    """The studio's page with what is the playground's own; `size` is how many bytes its worker fetches."""
    own = {
        "<title>Penstock studio</title>": f"""<title>Penstock playground</title>
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="stylesheet" href="playground.css">""",
        "<h1>Penstock studio</h1>": '<h1>Penstock playground</h1>\n    <a href="../index.html">Documentation</a>',
        "<body>": f'<body data-bytes="{size}">',
        '<script src="studio.js"></script>': '<script src="studio.js"></script>\n<script src="written.js"></script>',
    }
    text = page()
    for theirs, ours in own.items():
        if text.count(theirs) != 1:
            raise ValueError(f"the studio's page has {theirs} {text.count(theirs)} times: see tools/site/playground.py")
        text = text.replace(theirs, ours)
    return text
