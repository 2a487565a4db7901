"""Writes docs/results/PAPER.md from the stored values of experiments; nothing in it is typed.

Run ``python tools/write_results.py`` after values in docs/results/ or an experiment have changed. A
test compares the two. ``fedquilt reproduce NAME --save docs/results/values`` stores values.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from fedquilt.comparison.render import to_markdown
from fedquilt.reproduction.experiment import Experiment, find_experiments, load_experiment
from fedquilt.reproduction.store import list_pictures, load
from fedquilt.reproduction.table import describe, list_departures, make_section

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "docs/results/values"
PAPERS = {
    "adds": "ADDS",
    "apfl": "APFL",
    "heterofl": "HeteroFL",
    "nefl": "NeFL",
    "splitmix": "Split-Mix",
}


def write_pages() -> dict[Path, str]:
    """The text of each page."""
    known = find_experiments(ROOT / "experiments")
    pages: dict[str, list[str]] = {}
    for name, folder in known.items():
        paper = name.partition("/")[0]
        pages.setdefault(paper, []).append(write_experiment(name, load_experiment(folder)))
    return {ROOT / f"docs/results/{p}.md": write_page(p, parts) for p, parts in pages.items()}


def write_page(paper: str, parts: list[str]) -> str:
    """A page: what it is, and its experiments."""
    opening = (
        f"# {PAPERS[paper]}: tables and figures, measured again\n\n"
        "This page is written by `tools/write_results.py` from stored values. Each experiment\n"
        "is a folder of settings, and one command runs or resumes it.\n"
    )
    return "\n".join([opening, *parts])


def write_experiment(name: str, experiment: Experiment) -> str:
    """The section of an experiment; one that was never run says so."""
    lines = [f"## {experiment.title}", "", "<!-- docs-test: parse: hours -->", "```sh"]
    lines += [f"fedquilt reproduce {name}", "```", ""]
    done = load(VALUES, name)
    if done is None:
        lines += [f"Not run yet; it takes about {experiment.hours:g} core-hours.", ""]
        return "\n".join([*lines, *_list(experiment.differences)])
    table = to_markdown([make_section(experiment, done)]).partition("\n\n")[2]
    pictures = zip(experiment.curves, list_pictures(experiment, name), strict=True)
    lines += [table, *(f"![{curve.name}](values/{file})\n" for curve, file in pictures)]
    lines += [*_list(describe(experiment, done)), *_list(list_departures(experiment, done))]
    return "\n".join(lines)


def _list(sentences: list[str] | tuple[str, ...]) -> list[str]:
    wrapped = [textwrap.fill(f"- {s}", 100, subsequent_indent="  ") for s in sentences]
    return [*wrapped, ""] if wrapped else []


if __name__ == "__main__":
    for page, text in write_pages().items():
        page.write_text(text)
