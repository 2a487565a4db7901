"""Checks a built site: every link leads to a file that exists, and to an anchor that it has."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _PageReader(HTMLParser):
    """Collects the links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what a tag links to, and what it can be called."""
        values = dict(attrs)
        self.anchors |= {v for k in ("id", "name") if (v := values.get(k))}
        self.links += [v for k in ("href", "src", "data") if (v := values.get(k))]


@cache
def read_page(path: Path) -> _PageReader:
    """The links and anchors of a page."""
    reader = _PageReader()
    reader.feed(path.read_text())
    return reader


def find_broken_links(site: Path) -> list[str]:
    """Links within the site that lead nowhere, each with its page."""
    broken = []
    for page in sorted(site.rglob("*.html")):
        for link in sorted(set(read_page(page).links)):
            why = explain(site, page, link)
            if why:
                broken.append(f"{page.relative_to(site)}: {link}: {why}")
    return broken


def explain(site: Path, page: Path, link: str) -> str | None:
    """Why a link leads nowhere; None if it leads somewhere, or out of the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(site.resolve()) or not target.exists():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if anchor and target.suffix == ".html" and anchor not in read_page(target).anchors:
        return "the page has no such anchor"
    return None
