"""Writes docs/results/PAPER.md and speed.md from stored values; nothing in them is typed.

Run ``python tools/write_results.py`` after values in docs/results/ or an experiment have changed. A
test compares the two. ``fedquilt reproduce NAME --save docs/results/values`` stores values of
experiments, and scripts in benchmarks/ store theirs with ``--save``.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from fedquilt.comparison.render import Section, to_markdown
from fedquilt.reproduction.contrasts import MEANING, TITLE, list_contrasts
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
    written = {ROOT / f"docs/results/{p}.md": write_page(p, parts) for p, parts in pages.items()}
    return {**written, ROOT / "docs/results/speed.md": write_speed()}


def write_speed() -> str:
    """The page of benchmarks, one after another."""
    parts = [
        "# Speed and memory, measured\n\n"
        "For everyone who wants to know how fast the library is, and to measure it again.\n"
        "`tools/write_results.py` writes this page from what `benchmarks/` stored. Compare\n"
        "figures only within a table. Other measurements are in [results](../results.md#speed).\n"
    ]
    titles: set[str] = set()
    for path in sorted((VALUES / "benchmarks").glob("*.json")):
        record = json.loads(path.read_text())
        title = record["tables"][0]["title"]
        title += f" ({record['environment']['processor']})" if title in titles else ""
        titles.add(title)
        skip = "<!-- docs-test: skip: minutes, on an idle machine -->"
        parts += [
            f"## {title}",
            "",
            skip,
            "```sh",
            record["command"],
            "```",
            "",
        ]
        for number, table in enumerate(record["tables"]):
            section = Section(table["title"], table["header"], table["cells"])
            text = to_markdown([section]).partition("\n\n")[2]
            parts += [f"**{table['title']}**\n"] if number else []
            parts += [text, *_list(table["notes"])]
        machine = record["environment"]
        about = f"Commit {record['commit']}, {machine['processor']}, torch {machine['torch']}"
        parts += _list([f"{about}; load of the machine when it started: {record['load']}."])
    return "\n".join(parts)


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
    contrasts = list_contrasts(experiment, done)
    if contrasts:
        lines += [f"**{TITLE}**", "", *_list(contrasts), MEANING, ""]
    return "\n".join(lines)


def _list(sentences: list[str] | tuple[str, ...]) -> list[str]:
    wrapped = [textwrap.fill(f"- {s}", 100, subsequent_indent="  ") for s in sentences]
    return [*wrapped, ""] if wrapped else []


if __name__ == "__main__":
    for page, text in write_pages().items():
        page.write_text(text)
