"""Writes stored runs with privacy and with hostile clients into docs/results.md, between markers.

Run ``python tools/write_defences.py`` after a results file has changed. A test compares the two.
To store runs, give what a benchmark wrote, and the commit that it was run at:

    python tools/write_defences.py privacy-mnist privacy.jsonl 64bf18e
    python tools/write_defences.py hostile-fashion hostile.jsonl 4dde8fd
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
BLOCK = re.compile(r"(<!-- defences: ([\w-]+) -->\n)(.*?)(<!-- end of defences -->\n)", re.DOTALL)
FIRST_ATTACKS = 4  # in the first of two tables, so that both fit a terminal
Run = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    """Stored runs, and what they were made with."""
    stored: dict[str, Any] = json.loads(_find_file(name).read_text())
    return stored


def _find_file(name: str) -> Path:
    return ROOT / "docs" / "results" / f"{name}.json"


def store(name: str, lines: Path, commit: str) -> None:
    """Stores what a benchmark wrote, one run a line."""
    runs = [json.loads(line) for line in lines.read_text().splitlines()]
    text = ",\n".join(json.dumps(run) for run in runs)
    _find_file(name).write_text(f'{{"commit": "{commit}", "runs": [\n{text}\n]}}\n')


def write_privacy(runs: Sequence[Run]) -> str:
    """A row for each ε: what the search has chosen, and accuracies of every size."""
    rows = [
        ["ε", "clip", "lr", "HeteroFL, 1", "0.5", "FedAvg, 1", "0.5"],
        ["---"] * 7,
    ]
    searched = [run for run in runs if run["phase"] == "search"]
    for epsilon in dict.fromkeys(run["epsilon"] for run in searched):
        best = max(
            (run for run in searched if run["epsilon"] == epsilon),
            key=lambda run: fmean(run["accuracy"]),
        )
        chosen = {"phase": "test", **{key: best[key] for key in ("epsilon", "clip", "lr")}}
        tested = [run for run in runs if chosen.items() <= run.items()]
        sizes = [("heterofl", 0), ("heterofl", 1), ("fedavg", 0), ("fedavg, width 0.5", 0)]
        values = [
            _format([run["accuracy"][size] for run in tested if run["method"] == method])
            for method, size in sizes
        ]
        names = {None: "∞", "none": "no privacy"}
        name = names.get(epsilon, f"{epsilon:g}" if isinstance(epsilon, float) else "")
        clip = "-" if best["clip"] is None else f"{best['clip']:g}"
        rows.append([name, clip, f"{best['lr']:g}", *values])
    return _join(rows)


def write_hostile(runs: Sequence[Run]) -> str:
    """Two tables for each method: a row for each rule, a column for each attack.

    A column is over the seeds that all of its rules have.
    """
    tables = []
    runs, short = _drop_incomplete(runs)
    notes = [f"{method} under {attack} without seed {seed}" for method, attack, seed in short]
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        attacks = list(dict.fromkeys(run["attack"] for run in own))
        rules = list(dict.fromkeys(run["rule"] for run in own))
        for shown in (attacks[:FIRST_ATTACKS], attacks[FIRST_ATTACKS:]):
            has_success = "backdoor" in shown
            heads = [method, *shown, *["success"] * has_success]
            rows = [heads, ["---"] * len(heads)]
            for rule in rules:
                by_attack = [
                    [fmean(r["accuracy"]) for r in own if (r["rule"], r["attack"]) == (rule, a)]
                    for a in shown
                ]
                success = [fmean(r["success"]) for r in own if r["rule"] == rule and r["success"]]
                extra = [success] if has_success else []
                rows.append([rule, *(_format_mean(values) for values in [*by_attack, *extra])])
            tables.append(_join(rows))
    missing = [f"Not all rules were run: {'; '.join(notes)}."] if notes else []
    return "\n\n".join([*tables, *missing])


def _drop_incomplete(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[str, str, int]]]:
    """The runs whose attack and seed all rules have, and the attacks and seeds that some lack."""
    rules = {run["rule"] for run in runs}
    keys = itertools.product(
        *(dict.fromkeys(run[key] for run in runs) for key in ("method", "attack", "seed"))
    )
    known = {(run["method"], run["attack"], run["seed"], run["rule"]) for run in runs}
    short = [key for key in keys if any((*key, rule) not in known for rule in rules)]
    left = [run for run in runs if (run["method"], run["attack"], run["seed"]) not in short]
    return left, short


def _format(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _format_mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f}" if values else "-"


def _join(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


WRITERS = {"privacy-mnist": write_privacy, "hostile-fashion": write_hostile}


def update_page(text: str) -> str:
    """The page with the present tables between its markers."""

    def write(match: re.Match[str]) -> str:
        stored = load(match[2])
        runs = stored["runs"]
        seeds = sorted({r["seed"] for r in runs if r.get("phase", "test") == "test"})
        origin = f"Seeds {', '.join(map(str, seeds))}, commit {stored['commit']}."
        return f"{match[1]}\n{WRITERS[match[2]](runs)}\n\n{origin}\n\n{match[4]}"

    return BLOCK.sub(write, text)


def main(arguments: Sequence[str]) -> None:
    """Stores runs if they are given, and writes the page."""
    if arguments:
        name, lines, commit = arguments
        store(name, Path(lines), commit)
    PAGE.write_text(update_page(PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
