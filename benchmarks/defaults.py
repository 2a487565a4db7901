"""Every method at all of its defaults on the embedded digits: accuracy at every size, seconds.

    python benchmarks/defaults.py [--out runs/defaults] [--methods heterofl,nefl] [--workers 2]

Each method is `fedquilt train --method NAME` with a directory; what is finished is not done again,
and what was stopped goes on. Prints a Markdown table, and writes the same as `defaults.json` into
the directory. Seconds are those of rounds and evaluations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedquilt.formatting import format_percent
from fedquilt.methods import METHODS
from fedquilt.methods.method import SIZE_NAMES
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.records import read_times
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import build_method
from fedquilt.settings.toml import read_toml

HEAD = ("method", "rounds × epochs", "sizes", "accuracy", "own nets", "seconds", "budgets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    workers = [] if options.workers is None else ["--workers", str(options.workers)]
    found = []
    for name in options.methods.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        found.append(result(name, options.out / name, workers))
        (options.out / "defaults.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def result(name: str, folder: Path, workers: Sequence[str]) -> dict[str, Any]:
    """What a method gets, and what it took."""
    is_begun = (folder / "initial.safetensors").exists()
    where = ["--resume", str(folder)] if is_begun else ["--method", name, "--out", str(folder)]
    command = [sys.executable, "-m", "fedquilt", "train", *where, *workers, "--json"]
    scores = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    local_training = build_method(load_config(read_toml(folder / "config.toml"))).local_training  # type: ignore[attr-defined]
    return {
        "method": name,
        "epochs": local_training.epochs,
        "seconds": sum(record["seconds"] for record in read_times(RunDirectory(folder))),
        **{key: value for key, value in scores.items() if key != "run"},
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """The results in Markdown, sizes and accuracies largest first."""
    return "\n".join(_line(cells) for cells in (HEAD, ["---"] * len(HEAD), *map(_cells, found)))


def _cells(result: dict[str, Any]) -> list[str]:
    sizes, exceeding = result["sizes"], result["exceeds_budgets"]
    own = [size["personal_accuracy"] for size in sizes if size["personal_accuracy"] is not None]
    return [
        result["method"],
        f"{result['rounds']} × {result['epochs']}",
        SIZE_NAMES[sizes[0]["kind"]] + " " + ", ".join(f"{size['width']:g}" for size in sizes),
        ", ".join(format_percent(size[result["score"]]).rstrip("%") for size in sizes),
        format_percent(own[0]).rstrip("%") if own else "",
        f"{result['seconds']:.0f}",
        "kept" if exceeding is None else exceeding.partition(":")[0],
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
