"""Writes stored comparisons into README.md and docs/, between markers, and draws their pictures.

Run ``python tools/write_comparison.py`` after a results file has changed. A test compares the two.
To store a comparison, give its folder, the results file, and the settings that it was made with.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from fedquilt.comparison.comparison import Comparison
from fedquilt.comparison.render import make_sections, to_markdown
from fedquilt.formatting import format_count, format_duration

ROOT = Path(__file__).resolve().parent.parent
RESULTS = {
    "digits": "docs/results/compare-digits.json",
    "fashion": "docs/results/compare-fashion.json",
}
BLOCK = re.compile(  # the name of the results, and what of them: all, the first tables, or a method
    r"(<!-- comparison: (\w+)-(full|short|of [\w-]+) -->\n)(.*?)(<!-- end of comparison -->\n)",
    re.DOTALL,
)
ORDINARY = ("heterofl", "fedavg")  # what single methods stand beside
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(path.read_text())
)


def load_comparison(name: str) -> Comparison:
    """A stored comparison."""
    return Comparison.from_document(json.loads((ROOT / RESULTS[name]).read_text()))


def write_block(name: str, kind: str, page: str) -> str:
    """What stands between the markers: the table, the picture, and how it was measured."""
    comparison = load_comparison(name)
    if kind.startswith("of "):
        return write_row(comparison, kind.removeprefix("of "))
    sections = make_sections(comparison.analysis, comparison.metric)
    shown = sections if kind == "full" else sections[:3]
    picture = RESULTS[name].replace(".json", ".svg")
    path = picture if "/" not in page else picture.removeprefix("docs/")
    parts = [to_markdown(shown).strip(), f"![Mean accuracy against bytes and MACs]({path})"]
    parts += [wrap(comparison.advice)]
    if kind == "full":
        parts += ["\n".join(wrap(f"- {note}", "  ") for note in comparison.notes)]
        parts += ["Left out, in the words of the methods:"]
        left = comparison.left_out.items()
        parts += ["\n".join(wrap(f"- {n}: {why}", "  ") for n, why in left)]
    parts += [wrap(describe_origin(comparison))]
    return "\n" + "\n\n".join(parts) + "\n\n"


def write_row(comparison: Comparison, method: str) -> str:
    """The scores and costs of one method, beside the best one and ordinary ones."""
    rows = [
        row for row in comparison.analysis.rows if row.is_best or row.variant in (method, *ORDINARY)
    ]
    rows.sort(key=lambda row: row.variant != method)
    analysis = replace(comparison.analysis, rows=tuple(rows))
    scores, _, _, costs, _ = make_sections(analysis, comparison.metric)
    notes = [note for note in comparison.notes if note.startswith(f"{method} ")]
    parts = [to_markdown([scores, costs]).strip()]
    parts += ["\n".join(wrap(f"- {note}", "  ") for note in notes)] if notes else []
    return "\n" + "\n\n".join([*parts, wrap(describe_origin(comparison))]) + "\n\n"


def describe_origin(comparison: Comparison) -> str:
    """How the numbers were measured."""
    about = comparison.about
    made = about["made_by"]
    seeds = ", ".join(map(str, about["seeds"]))
    return (
        f"Measured with `fedquilt compare {about['file']}`: "
        f"{format_count(about['runs'], 'run')}, seeds {seeds}, commit "
        f"{', '.join(made['commit'])}, torch {made['torch']}, {made['processor']}, "
        f"{format_duration(about['wall_seconds'])} of runs, two at a time, on a machine that was "
        "busy with other work."
    )


def wrap(text: str, indent: str = "", columns: int = 108) -> str:
    """Text in lines of at most so many columns."""
    lines, line = [], ""
    for word in text.split():
        start = indent if lines else ""
        if line and len(start) + len(line) + 1 + len(word) > columns:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    lines.append(line)
    return "\n".join([lines[0], *(indent + rest for rest in lines[1:])])


def update_page(page: str, text: str) -> str:
    """The page with the present tables between its markers."""
    return BLOCK.sub(lambda m: m[1] + write_block(m[2], m[3], page) + m[5], text)


def store(folder: Path, path: Path, file: str) -> None:
    """Copies the table of a comparison into the repository, and draws it."""
    document = json.loads((folder / "comparison.json").read_text())
    document["about"]["file"] = file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    Comparison.from_document(document).draw(path.with_suffix(".svg"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        store(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    for page in PAGES:
        (ROOT / page).write_text(update_page(page, (ROOT / page).read_text()))
