"""The documentation site: every page can be reached, every link leads somewhere."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import nbclient
import nbformat
import pytest

import fedquilt as fq

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import draw_methods  # noqa: E402
from docsite import api, check_html, links  # noqa: E402
from docsite.assemble import collect_pages, prepare  # noqa: E402

TREE = re.compile(r"^:::\{toctree\}\n(.*?)^:::", re.MULTILINE | re.DOTALL)
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@cache
def site():
    """The text of every page as Sphinx gets it, by its path."""
    pages = {page.path: prepare(page).text for page in collect_pages({})}
    return pages | {path.relative_to(ROOT / "docs").as_posix(): "" for path in NOTEBOOKS}


def children(path):
    """The pages that the tables of contents of a page list."""
    folder = Path(path).parent
    entries = [
        line
        for tree in TREE.findall(site()[path])
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]
    names = [os.path.normpath(folder / entry) for entry in entries]
    return {
        f"{n}{end}" for n in names for end in (".md", ".rst", ".ipynb") if f"{n}{end}" in site()
    }


def test_every_page_is_in_a_table_of_contents():
    reached, open_pages = set(), {"index.md"}
    while open_pages:
        reached |= open_pages
        open_pages = {child for page in open_pages for child in children(page)} - reached
    missing = {page for page in site() if not page.startswith("files/")} - reached
    assert not missing, "list it in docs/index.md, or in the index of its folder"


def headings(text):
    """The anchors of a page, as GitHub and MyST make them."""
    shown = links.INLINE_LINK.sub(r"\2", links.FENCE.sub("", text))
    titles = re.findall(r"^#+ (.+)$", shown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_links_between_pages_of_the_site_lead_somewhere():
    broken = []
    for path, text in site().items():
        if path.endswith((".py.md", ".toml.md")):
            continue  # they are code
        plain = links.FENCE.sub("", text)
        for target in [m[3] for m in links.INLINE_LINK.finditer(plain)]:
            if links.resolve_link(target, path) is None:
                continue
            page, anchor = links.resolve_link(target, path)
            exists = (
                page in site() or (ROOT / "docs" / page).is_file() or page == "images/layers.svg"
            )
            if not exists or (anchor and anchor not in headings(site()[page])):
                broken.append(f"{path}: {target}")
    assert not broken


def test_the_reference_has_every_public_name_once():
    names = [name for group in api.group_names().values() for name in group]
    assert sorted(names) == sorted(fq.__all__)
    for title, group in api.group_names().items():
        page = site()[f"api/{api.find_slug(title)}.rst"]
        for name in group:
            assert re.search(rf":: (fedquilt\.)?{name}$", page, re.MULTILINE), name


def test_the_gallery_has_every_example():
    for example in (ROOT / "examples").glob("*.py"):
        page = site()[f"gallery/{example.stem}.md"]
        assert example.read_text().rpartition('"""')[2].strip()[:200] in page


def test_what_leads_nowhere_is_found_in_built_pages(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x"></a><a href="c.html"></a><img src="d.png">'
    )
    (tmp_path / "b.html").write_text(
        '<p id="y"></p><a href="https://example.org"></a><a href="a.html">'
    )
    broken = check_html.find_broken_links(tmp_path)
    assert [line.split(": ")[1] for line in broken] == ["b.html#x", "c.html", "d.png"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.docs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    book = nbformat.read(path, as_version=4)
    paths = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources=paths).execute()
    assert any(cell.get("outputs") for cell in book.cells)


@pytest.mark.parametrize("name", fq.METHODS)
def test_a_method_has_a_page_with_all_that_readers_look_for(name):
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    assert f"](../images/methods/{name}.svg)" in page  # the idea in a picture
    assert "**When to use it.**" in page
    assert re.search(r"^\| .*\n\| --- \|", page, re.MULTILINE)  # equations and functions
    assert re.search(r"^(## |\*\*).*(Choices|choices|leaves? open|contradict)", page, re.MULTILINE)
    assert f"<!-- comparison: digits-of {name} -->\n\n" in page  # measured results


@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "splitmix"])  # no rounding decides them
def test_the_picture_of_a_method_is_what_its_run_gives(name):
    stored = (draw_methods.IMAGES / f"{name}.svg").read_text()
    assert draw_methods.draw_method(name) == stored, "run python tools/draw_methods.py"


@pytest.mark.docs
@pytest.mark.parametrize("name", fq.METHODS)
def test_the_pictures_of_all_methods_are_what_their_runs_give(name):
    test_the_picture_of_a_method_is_what_its_run_gives(name)


@pytest.mark.docs
@pytest.mark.timeout(3600)
def test_the_site_is_built_without_warnings():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "build_docs.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lead somewhere" in done.stdout
