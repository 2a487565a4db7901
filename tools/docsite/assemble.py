"""Puts the sources of the site together: pages of docs/, and pages made from code and results."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from docsite.api import make_reference
from docsite.benchmarks import make_benchmark_page
from docsite.commands import make_command_page
from docsite.files import make_file_pages
from docsite.gallery import make_gallery
from docsite.layers import draw_layers
from docsite.links import (
    INLINE_LINK,
    PROJECT_PAGES,
    ROOT,
    Page,
    list_targets,
    list_titles,
    rewrite_links,
)

DOCS = ROOT / "docs"
ASSETS = ("*.png", "*.svg", "*.ipynb", "conf.py")
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE)
MERMAID = re.compile(r"^```mermaid\n.*?^```\n", re.MULTILINE | re.DOTALL)
SIDES = re.compile(
    r"<!-- side by side: (.+?) \| (.+?) -->\n(.*?)<!-- end of sides -->\n", re.DOTALL
)
FENCED = re.compile(r"^```python\n.*?^```\n", re.MULTILINE | re.DOTALL)


def collect_pages(outputs: Mapping[str, str]) -> list[Page]:
    """All pages of the site, as they are before links are rewritten.

    Args:
        outputs: What examples printed, by name.
    """
    written = [path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md"))]
    pages = [read_page(origin, origin.removeprefix("docs/")) for origin in written]
    pages += [read_page(name, PROJECT_PAGES[name]) for name in ("CONTRIBUTING.md", "CHANGELOG.md")]
    pages += [
        make_decision_index(),
        make_benchmark_page(),
        make_command_page(),
        *make_reference(),
        *make_gallery(outputs),
    ]
    targets = [target for page in pages for target in list_targets(page)]
    return pages + make_file_pages(targets)


def make_decision_index() -> Page:
    """The page that lists decisions by their titles."""
    text = (
        "# Decisions\n\n"
        "For developers who ask why something is so. Each page has the question, the choice,\n"
        f"and what was given up.\n\n{list_titles(DOCS / 'decisions')}\n"
    )
    return Page("decisions/index.md", text)


def read_page(origin: str, path: str) -> Page:
    """A page that is written by hand."""
    return Page(path, (ROOT / origin).read_text(), origin)


def assemble(target: Path, outputs: Mapping[str, str]) -> list[Page]:
    """Writes the sources of the site into an empty folder, and returns its pages."""
    shutil.rmtree(target, ignore_errors=True)
    pages = [prepare(page) for page in collect_pages(outputs)]
    for page in pages:
        path = target / page.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.text)
    for pattern in ASSETS:
        for path in DOCS.rglob(pattern):
            copied = target / path.relative_to(DOCS)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
    (target / "images" / "layers.svg").write_text(draw_layers())
    return pages


def prepare(page: Page) -> Page:
    """A page as Sphinx reads it."""
    if not page.path.endswith(".md"):
        return page
    text = rewrite_links(page)
    text = SIDES.sub(lambda m: put_side_by_side(m[1], m[2], m[3]), text)
    text = COMMENT.sub("", text)
    text = MERMAID.sub("![The layers of the packages](images/layers.svg)\n", text)
    if PurePosixPath(page.path).name == "index.md" and not page.path.startswith("files/"):
        text += "\n" + make_toctrees(text)
    return Page(page.path, text, page.origin)


def put_side_by_side(left: str, right: str, text: str) -> str:
    """Pairs of code blocks in two columns, each with a title."""
    blocks = FENCED.findall(text)
    grid = ["::::{grid} 1 1 2 2", ":gutter: 2", ""]
    for title, block in zip((left, right) * (len(blocks) // 2), blocks, strict=True):
        grid += [f":::{{grid-item-card}} {title}", block.rstrip(), ":::", ""]
    return "\n".join([*grid, "::::", ""])


def make_toctrees(text: str) -> str:
    """The tables of contents of an index page: for each section, the pages that it links to."""
    trees, listed = [], {"index.md"}
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        caption = section.partition("\n")[0]
        pages = [m[3] for m in INLINE_LINK.finditer(section) if is_page(m[3])]
        entries = [page for page in dict.fromkeys(pages) if page not in listed]
        listed.update(entries)
        if entries:
            title = [] if caption.startswith("#") else [f":caption: {caption}"]
            names = [re.sub(r"\.(md|rst|ipynb)$", "", page) for page in entries]
            trees.append("\n".join([":::{toctree}", ":hidden:", *title, "", *names, ":::", ""]))
    return "\n".join(trees)


def is_page(target: str) -> bool:
    """Whether a link leads to a page of the site, in its own folder or below, as a whole."""
    return bool(re.fullmatch(r"(?!\.\.|files/)[\w./-]+\.(md|rst|ipynb)", target))
