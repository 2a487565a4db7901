"""The page of benchmarks: every results file of docs/results. Nothing on it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from write_comparison import describe_origin

from docsite.links import ROOT, Page, list_titles
from fedquilt.comparison.comparison import Comparison
from fedquilt.comparison.render import make_sections, to_markdown

RESULTS = ROOT / "docs" / "results"
INTRODUCTION = """\
# Benchmarks

For everyone who wants measured figures and nothing typed by hand. This page is made from the files
in `docs/results/` whenever the site is built. Other measurements, with their commands, are in
[Results](../results.md).
"""


def make_benchmark_page() -> Page:
    """One section for each results file."""
    sections = [describe_results(path) for path in sorted(RESULTS.glob("*.json"))]
    papers = list_titles(RESULTS)
    if papers:
        sections.insert(0, f"## Tables of papers, measured again\n\n{papers}\n")
    return Page("results/index.md", "\n".join([INTRODUCTION, *sections]), "docs/results/index.md")


def describe_results(path: Path) -> str:
    """A results file as a section: its tables, its picture, and how it was measured."""
    document = json.loads(path.read_text())
    if "advice" in document:
        return describe_comparison(path, Comparison.from_document(document))
    return describe_measurement(path, document)


def describe_comparison(path: Path, comparison: Comparison) -> str:
    """A stored comparison of methods."""
    parts = [f"## {path.stem}", describe_experiment(comparison.about["file"])]
    parts.append(to_markdown(make_sections(comparison.analysis, comparison.metric)).strip())
    picture = path.with_suffix(".svg")
    if picture.exists():
        parts.append(f"![Mean {comparison.metric.name} against cost]({picture.name})")
    parts.append(comparison.advice)
    parts.append("\n".join(f"- {note}" for note in comparison.notes))
    if comparison.left_out:
        left = "\n".join(f"- {name}: {why}" for name, why in comparison.left_out.items())
        parts.append(f"Left out, in the words of the methods:\n\n{left}")
    parts.append(describe_origin(comparison))
    return "\n\n".join(parts) + "\n"


def describe_experiment(path: str) -> str:
    """What the first lines of a file of settings say, without the command."""
    comments = []
    for line in (ROOT / path).read_text().splitlines():
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("# "))
    told = " ".join(line for line in comments if not line.startswith("fedquilt "))
    return f"{told} Settings: [{path}](../../{path})."


def describe_measurement(path: Path, document: dict[str, Any]) -> str:
    """Any other results file: its plain values as a list, its lists of records as tables."""
    facts = [
        f"- {k}: {format_value(v)}" for k, v in document.items() if is_plain(v) and k != "title"
    ]
    parts = [f"## {document.get('title', path.stem)}", "\n".join(facts)]
    for key, value in document.items():
        records = list_records(value)
        if records:
            parts += [f"{key}:", make_table(records)]
    return "\n\n".join(part for part in parts if part) + "\n"


def list_records(value: Any) -> list[dict[str, Any]]:
    """Records of plain values, as a list of rows; keys of a dict are the first column."""
    if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
        value = [{"": key, **record} for key, record in value.items()]
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        return value
    return []


def make_table(records: list[dict[str, Any]]) -> str:
    """Records as a table of Markdown."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[format_value(record.get(column, "")) for column in columns] for record in records]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def is_plain(value: Any) -> bool:
    """Whether a value fits on a line."""
    return isinstance(value, str | int | float | bool) or (
        isinstance(value, list) and all(isinstance(v, str | int | float) for v in value)
    )


def format_value(value: Any) -> str:
    """A value as a cell or in a line."""
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
