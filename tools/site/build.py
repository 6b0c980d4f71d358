"""The site: pages of docs/ and what is made from the code, built by Sphinx without a warning, and checked.

    make docs                                         # build/site/html/index.html

The pages are laid out in build/site/pages: those of docs/ as they are, README's neighbours, a page for each source file that a
page links to, the gallery of schedules, the API and the commands. The first page is README.md; below it stands docs/index.md,
which lists all pages and whose tables are the menu. The playground is made first: where it cannot be, no page links to it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import playground
import pyodide
from check import problems
from gallery import schedule_pages, with_gallery
from reference import MODULES, api_pages, with_options

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "site"
PAGES, HTML = OUT / "pages", OUT / "html"
ELSEWHERE = {  # pages that stand beside docs/ in the repository
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def place(path: str) -> str:
    """Where a file of the repository is on the site, among the pages."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if (ROOT / path).is_file() else f"source/{path}/__init__.py.md"


def linked(text: str, path: str, sources: set[str]) -> str:
    """The page at `path` with links that lead to places on the site; `sources` gets the files that need a page there."""

    def there(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(path), match[1]))
        if place(target).startswith("source/"):
            sources.add(place(target).removeprefix("source/").removesuffix(".md"))
        link = os.path.relpath(place(target), os.path.dirname(place(path)))
        return f"]({link}{match[2] or ''})"

    return LINK.sub(there, text)


def with_menu(index: str) -> str:
    """The first page with the tables of docs/index.md as the menu: a heading is a caption, a row a page."""
    menu = dict(sections(index))
    menu["Reference"] += [f"reference/api/{name}" for name in ("penstock", *MODULES)]
    menu["More"] = [page.removesuffix(".md") for path, page in ELSEWHERE.items() if path != "README.md"]
    trees = [f"```{{toctree}}\n:hidden:\n:caption: {name}\n\n{chr(10).join(pages)}\n```\n" for name, pages in menu.items()]
    return "\n".join([index, *trees])


def sections(index: str) -> Iterator[tuple[str, list[str]]]:
    """Each heading of docs/index.md with the pages that the table below it lists."""
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        if "\n| page | what it is for |\n" in part:
            yield part.partition("\n")[0], re.findall(r"^\| \[[^]]+\]\(([\w./-]+)\.md\)", part, re.MULTILINE)


def write(page: str, text: str) -> None:
    """A page, or a picture, at `page`."""
    path = PAGES / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def make_playground() -> bool:
    """Whether there is one, in build/site/html/playground."""
    try:
        playground.build(HTML / "playground", OUT.parent)
    except pyodide.Missing as error:
        print(f"the playground is left out: {error}")
        return False
    return True


def lay_out(has_playground: bool) -> None:
    """All pages, in build/site/pages."""
    sources: set[str] = set()
    shutil.copytree(ROOT / "docs", PAGES)
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    for path in [*paths, *(path for path in ELSEWHERE if path != "README.md")]:
        write(place(path), linked((ROOT / path).read_text(encoding="utf-8"), path, sources))
    write("index.md", linked((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", sources) + _list_of_pages(sources))
    for page, text in {**schedule_pages(has_playground), **api_pages()}.items():
        write(page, text)
    completed = {"schedules/index.md": with_gallery, "reference/commands.md": with_options, "index.md": with_menu}
    if has_playground:
        completed["playground.md"] = playground.opened_from
    for page, complete in completed.items():
        write(page, complete((PAGES / page).read_text(encoding="utf-8")))
    for source in sorted(sources):
        language = {".py": "python", ".yaml": "yaml", ".sh": "sh"}.get(Path(source).suffix, "text")
        code = (ROOT / source).read_text(encoding="utf-8")
        write(f"source/{source}.md", f"---\norphan: true\n---\n# {source}\n\n`````{language}\n{code}`````\n")


def _list_of_pages(sources: set[str]) -> str:
    """The sections of docs/index.md, to stand below README."""
    index = linked((ROOT / "docs/index.md").read_text(encoding="utf-8"), "docs/index.md", sources)
    return "\n" + index[index.index("## ") :]


def main() -> None:
    """Lay out, build, check; exit code 1 with what is wrong."""
    shutil.rmtree(OUT, ignore_errors=True)
    lay_out(make_playground())
    here = Path(__file__).parent
    sphinx = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--jobs", "2"]
    built = subprocess.run([*sphinx, "--conf-dir", here, PAGES, HTML], check=False)
    if built.returncode:
        sys.exit("the site was not built: see above")
    if wrong := problems(HTML):
        sys.exit("\n".join(wrong))
    count = len(list(HTML.rglob("*.html")))
    print(f"{count} pages, no warning, every link leads somewhere, nothing is fetched from elsewhere: {HTML / 'index.html'}")


if __name__ == "__main__":
    main()
