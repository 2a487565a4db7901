"""Pages that show files of the repository which other pages link to."""

from __future__ import annotations

from collections.abc import Iterable

from docsite.links import PROJECT_PAGES, ROOT, Page, find_site_path

LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "sh"}
HEADER = "---\norphan: true\nnosearch: true\n---\n\n"


def make_file_pages(targets: Iterable[str]) -> list[Page]:
    """A page for each file or folder outside docs/ that is linked to."""
    pages: dict[str, Page] = {}
    for target in targets:
        if target.startswith("docs/") or target.rstrip("/") in PROJECT_PAGES:
            continue
        if not find_site_path(target).startswith("files/"):
            continue
        path = ROOT / target
        if path.is_dir():
            page = make_folder_page(target)
            pages |= {inner.path: inner for inner in map(make_file_page, list_files(target))}
        else:
            page = make_file_page(target)
        pages[page.path] = page
    return list(pages.values())


def list_files(folder: str) -> list[str]:
    """The files of a folder that can be shown."""
    paths = sorted(path for path in (ROOT / folder).iterdir() if path.suffix in LANGUAGES)
    return [path.relative_to(ROOT).as_posix() for path in paths]


def make_file_page(path: str) -> Page:
    """A file as it is."""
    text = (ROOT / path).read_text().rstrip()
    language = LANGUAGES.get((ROOT / path).suffix, "text")
    body = f"# {path}\n\n``````{language}\n{text}\n``````\n"
    return Page(find_site_path(path), HEADER + body)


def make_folder_page(path: str) -> Page:
    """The files of a folder."""
    path = path.rstrip("/")
    names = [name.rpartition("/")[2] for name in list_files(path)]
    links = "\n".join(f"- [{name}]({name}.md)" for name in names)
    return Page(find_site_path(path), f"{HEADER}# {path}\n\n{links}\n")
