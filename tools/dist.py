"""Build what is published, build/dist/*: check its contents, and that it works where nothing else is installed.

make dist
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "dist"
UNWANTED = ("tests/", "benchmarks/", "docs/", "node_modules/", "__pycache__/", ".venv/")


def main() -> None:
    """Build the source distribution and from it the wheel. Exit code 1 with what is wrong."""
    for path in OUT.glob("*"):
        path.unlink()
    run("build", "--no-isolation", "--outdir", str(OUT), str(ROOT))
    run("twine", "check", "--strict", *map(str, OUT.iterdir()))

    names = {path.name: file_names(path) for path in OUT.iterdir()}
    if wrong := [
        f"{name} has {file}" for name, files in names.items() for file in files if any(part in file for part in UNWANTED)
    ]:
        sys.exit("\n".join(wrong[:10]))
    run(
        "pytest",
        "-q",
        "-m",
        "",
        str(ROOT / "tests/house/test_clean_machine.py"),
        str(ROOT / "tests/house/test_distribution.py"),
    )
    print("\n".join(f"{name}: {len(files)} files" for name, files in names.items()))


def run(module: str, *words: str) -> None:
    """Run a module of this environment. Exit with its code if it fails."""
    code = subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, check=False).returncode
    if code:
        sys.exit(f"{module} {' '.join(words[:2])} failed: see above")


def file_names(path: Path) -> list[str]:
    """The files in a wheel or in a source distribution."""
    if path.suffix == ".whl":
        return zipfile.ZipFile(path).namelist()
    with tarfile.open(path) as archive:
        return archive.getnames()


if __name__ == "__main__":
    main()
