"""Pyodide, Python for the browser: taken from its npm package when the site is built, and never committed.

Pyodide is licensed under MPL-2.0. The package is what `npm pack` brings, and its digest is compared with the one written here.
"""

import base64
import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

VERSION = "314.0.7"  # runs Python 3.14
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FETCHED = ("pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")  # by the program in the first two of these:
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "package.json", *FETCHED)  # the third says whose it is, and its licence
PATIENCE = 120.0  # seconds


class Missing(Exception):
    """Why there is no Pyodide, as the end of a sentence."""


def unpacked(folder: Path, kept: Path) -> None:
    """Pyodide's files in `folder`; the package is kept in the folder `kept` for the next time. Raises Missing."""
    package = kept / f"pyodide-{VERSION}.tgz"
    if not package.exists():
        _fetch(kept)
    if base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode() != SHA512:
        package.unlink()
        raise Missing(f"what npm brought as pyodide {VERSION} is another package than this page was written for")
    with tarfile.open(package) as files:
        for name in FILES:
            files.extract(files.getmember(f"package/{name}").replace(name=name), folder, filter="data")


def _fetch(kept: Path) -> None:
    if not (npm := shutil.which("npm")):
        raise Missing("npm is not installed")
    kept.mkdir(parents=True, exist_ok=True)
    command = [npm, "pack", f"pyodide@{VERSION}", "--silent", "--fetch-retries=1", "--pack-destination", str(kept)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError) as error:
        raise Missing(f"npm could not bring pyodide {VERSION}: {error}") from error
