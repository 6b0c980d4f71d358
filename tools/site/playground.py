"""The playground: the studio's page without its server. Pyodide runs Penstock's own Python in the reader's browser.

The page, `playground/index.html` of the site, is the studio's, with the files in tools/site/playground: a client, an editor for
schedules, and a worker. It can be served from any folder, and requests nothing from other hosts.
"""

import html
import shutil
import zipfile
from pathlib import Path
from urllib.parse import urlencode

import pyodide

from penstock.view.studio.studio_server import DRAWING_SCRIPTS, STUDIO_SCRIPTS, STYLES, page, read_page_file

HERE, HOUSE = Path(__file__).parent / "playground", Path(__file__).parents[2] / "penstock"
PLAYGROUND_FILES = ("client.js", "source_editor.js", "worker.mjs", "playground.css")
# The modules that the worker imports: plain Python, without torch.
PYTHON = (
    *("__init__.py", "distribution.py", "errors.py", "lazy.py", "schedule/**/*.py", "timing/*.py", "explain/*.py"),
    *("plan/**/*.py", "view/**/*.py", "python_file.py"),
)
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def build(folder: Path, cache: Path) -> None:
    """Write the playground to `folder`; `cache` keeps Pyodide's package. Raises pyodide.Missing if npm cannot provide it."""
    pyodide.unpacked(folder / "pyodide", cache)
    for name in (*DRAWING_SCRIPTS, *STUDIO_SCRIPTS, *STYLES):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(read_page_file(name), encoding="utf-8")
    for name in PLAYGROUND_FILES:
        shutil.copy(HERE / name, folder)
    pack(folder / "penstock.zip")
    fetched = [folder / "penstock.zip", *(folder / "pyodide" / name for name in pyodide.FETCHED)]
    (folder / "index.html").write_text(_page(sum(path.stat().st_size for path in fetched)), encoding="utf-8")


def pack(file: Path) -> None:
    """Write the Python files that the worker needs to a zip."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.write(HERE / "answering.py", "answering.py")
        for path in sorted(path for pattern in PYTHON for path in HOUSE.glob(pattern)):
            packed.write(path, path.relative_to(HOUSE.parent))


def link(folder: str, text: str, **state: object) -> str:
    """Return an HTML link to the playground from a page in `folder` of the site. `state`: the query of the address."""
    address = "../" * folder.count("/") + "playground/index.html" + (f"?{urlencode(state)}" if state else "")
    return f'<a class="reference external" href="{html.escape(address)}">{text}</a>'


def opened_from(page: str) -> str:
    """Return the page about the playground, with a link to it below the title."""
    title, rest = page.split("\n", 1)
    return f"{title}\n\n{link('', 'Open the playground')}\n{rest}"


def _page(size: int) -> str:
    """Return the studio's page, changed for the playground. `size`: bytes that its worker fetches."""
    replacements = {
        "<title>Penstock studio</title>": f"""<title>Penstock playground</title>
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="stylesheet" href="playground.css">""",
        "<h1>Penstock studio</h1>": '<h1>Penstock playground</h1>\n    <a href="../index.html">Documentation</a>',
        "<body>": f'<body data-bytes="{size}">',
        '<script src="studio.js"></script>': '<script src="studio.js"></script>\n<script src="source_editor.js"></script>',
    }
    text = page()
    for old, new in replacements.items():
        if text.count(old) != 1:
            raise ValueError(f"the studio's page has {old} {text.count(old)} times: see tools/site/playground.py")
        text = text.replace(old, new)
    return text
