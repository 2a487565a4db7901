"""Where a file of the repository is on the site, and links between pages rewritten accordingly."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PROJECT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples": "gallery/index.md",
    "examples/flower_app": "gallery/flower_app.md",
    "docs/results": "results/index.md",
    "docs/decisions": "decisions/index.md",
    "src/fedquilt/__init__.py": "api/index.md",
    "src/fedquilt/cli": "commands.md",
}
INLINE_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"^(\[[\w-]+\]:) (\S+)$", re.MULTILINE)
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A page of the site, in Markdown or reStructuredText.

    Args:
        path: Where it is on the site.
        text: What it says.
        origin: The file that its links start from; None: they are those of the site.
    """

    path: str
    text: str
    origin: str | None = None


def find_site_path(path: str) -> str:
    """The path on the site of a file or folder of the repository.

    >>> find_site_path("docs/methods/stc.md"), find_site_path("examples/own_model.py")
    ('methods/stc.md', 'gallery/own_model.md')
    >>> find_site_path("src/fedquilt/methods/stc.py"), find_site_path("experiments")
    ('files/src/fedquilt/methods/stc.py.md', 'files/experiments/index.md')
    """
    path = path.rstrip("/")
    if path in PROJECT_PAGES:
        return PROJECT_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if re.fullmatch(r"examples/\w+\.py", path):
        return f"gallery/{PurePosixPath(path).stem}.md"
    return f"files/{path}/index.md" if (ROOT / path).is_dir() else f"files/{path}.md"


def resolve_link(target: str, origin: str) -> tuple[str, str] | None:
    """The file of the repository and the anchor that a link leads to; None if it leaves it.

    >>> resolve_link("../settings.md#optimizers", "docs/methods/stc.md")
    ('docs/settings.md', 'optimizers')
    """
    if re.match(r"[a-z]+:|//", target):
        return None
    path, _, anchor = target.partition("#")
    folder = PurePosixPath(origin).parent
    return (os.path.normpath(folder / path) if path else origin), anchor


def list_targets(page: Page) -> list[str]:
    """The files of the repository that a page links to."""
    if page.origin is None:
        return []
    text = FENCE.sub("", page.text)
    targets = [m[3] for m in INLINE_LINK.finditer(text)] + [m[2] for m in REFERENCE.finditer(text)]
    resolved = [resolve_link(target, page.origin) for target in targets]
    return [found[0] for found in resolved if found]


def rewrite_links(page: Page) -> str:
    """The text of a page, with links that lead to the pages of the site."""
    origin = page.origin
    if origin is None:
        return page.text

    def move(target: str) -> str:
        found = resolve_link(target, origin)
        if found is None or target.startswith("#"):
            return target
        path, anchor = found
        start = str(PurePosixPath(page.path).parent)
        moved = os.path.relpath(find_site_path(path), start)
        return f"{moved}#{anchor}" if anchor else moved

    def rewrite(text: str) -> str:
        text = INLINE_LINK.sub(lambda m: f"{m[1]}[{m[2]}]({move(m[3])})", text)
        return REFERENCE.sub(lambda m: f"{m[1]} {move(m[2])}", text)

    return map_prose(page.text, rewrite)


def map_prose(text: str, change: Callable[[str], str]) -> str:
    """A text whose code blocks stay as they are."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def list_titles(folder: Path) -> str:
    """Links to the pages of a folder, by their titles."""
    titles = {
        path.name: path.read_text().partition("\n")[0] for path in sorted(folder.glob("*.md"))
    }
    return "\n".join(f"- [{title.lstrip('# ')}]({name})" for name, title in titles.items())
