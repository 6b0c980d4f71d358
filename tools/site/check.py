"""What no page may have: a link within the site that leads nowhere, or anything that a browser would fetch from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}  # without a click
IN_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^\s)'\"]+")


class Page(HTMLParser):
    """A page's links, what it fetches, and the places in it that a link can name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what this tag leads to, fetches or names."""
        for name, value in attrs:
            if value is None:
                continue
            if name == "id":
                self.places.add(value)
            elif (tag, name) in FETCHED:
                self.fetched.add(value)
            elif (tag, name) == ("a", "href"):
                self.links.add(value)


def problems(folder: Path) -> list[str]:
    """A sentence for each link that leads nowhere and each request that would leave the site."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        wrong += [f"{name} fetches {url}" for url in page.fetched if urlsplit(url).netloc]
        for link in page.links | page.fetched:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.exists():
                wrong.append(f"{name} links to {link}, which is not there")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].places:
                wrong.append(f"{name} links to {link}: that page has no such place")
    for path in folder.rglob("*.css"):
        wrong += [f"{path.name} fetches {found}" for found in IN_STYLE.findall(path.read_text(encoding="utf-8"))]
    return sorted(wrong)
