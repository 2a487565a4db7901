"""Merging: time against reading the same bytes once, and memory against the number of clients.

    python benchmarks/merge.py [--save]

Time: 100 updates of a 10 M-parameter net, against ``torch.clone`` of the same tensors (at most 3 ×
is wanted). Memory: the largest resident set of a process that merges 10 or 1000 updates, each
read from a file as the engine does, above what it held before, in models (less than 3 models and
one update is wanted, however many clients).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from record import Recorder, Table
from resident import from_here, largest
from safetensors.torch import load_file, save_file

import fedquilt as fq
from fedquilt.models import make_model
from fedquilt.structure.tensors import named_tensors


def net() -> tuple[fq.Structure, dict[str, torch.Tensor]]:
    model = make_model("heterofl-resnet18", {})
    structure = fq.trace_structure(model, torch.zeros(1, 3, 32, 32))
    return structure, {n: t.detach().clone() for n, t in named_tensors(model).items()}


def time_merging(width: float, updates: int = 100, repeats: int = 5) -> tuple[str, ...]:
    """The name of a row, seconds to clone and to merge, and their ratio."""
    structure, params = net()
    subnet = structure.subnet(width)
    # ten distinct updates, used ten times: together larger than any cache
    some = [
        fq.Update(0, (subnet,), (fq.copy_subnet_tensors(params, structure, subnet),), 1.0, {})
        for _ in range(10)
    ]

    def clone() -> None:
        for number in range(updates):
            for tensor in some[number % 10].params[0].values():
                tensor.clone()

    def merge() -> None:
        fq.average(params, structure, (some[number % 10] for number in range(updates)))

    found: dict[str, list[float]] = {"clone": [], "merge": []}
    for _ in range(repeats + 1):
        for name, function in (("clone", clone), ("merge", merge)):
            started = time.perf_counter()
            function()
            found[name].append(time.perf_counter() - started)
    clone_time, merge_time = (statistics.median(found[n][1:]) for n in ("clone", "merge"))
    ratio = merge_time / clone_time
    return f"width {width:g}", f"{clone_time:.3f}", f"{merge_time:.3f}", f"{ratio:.2f}"


def peak_models(updates: int) -> float:
    """Run in a process of its own: growth of the resident set, in models."""
    structure, params = net()
    size = sum(t.nbytes for t in params.values())
    subnet = structure.subnet(1.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update.safetensors"
        save_file(params, path)

        def arriving() -> Iterator[fq.Update]:
            for client in range(updates):
                yield fq.Update(client, (subnet,), (load_file(path),), 1.0, {})

        before = from_here()
        fq.average(params, structure, arriving())
        peak = largest()
    return (peak - before + size) / size  # the model that was there before counts


def main() -> None:
    """Measures, in this process and in others, and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="store the figures")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak_models(options.peak)))
        return
    recorder = Recorder("merge", options.save)
    times = [time_merging(width) for width in (1.0, 0.5)]
    peaks = []
    for updates in (10, 1000):
        command = [sys.executable, __file__, "--peak", str(updates)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append((f"{updates}", f"{json.loads(done.stdout):.2f}"))
    recorder.finish(
        Table(
            "Merging",
            ("", "clone s", "merge s", "merge / clone"),
            times,
            (
                "100 updates of a ResNet18 with 9.6 M weights, against torch.clone of the same "
                "tensors; medians. Target: at most 3.",
            ),
        ),
        Table(
            "Merging: memory at its peak",
            ("updates", "models"),
            peaks,
            (
                "The process that merges, one update from a file included. Target: below 3 models "
                "and one update, however many clients.",
            ),
        ),
    )


if __name__ == "__main__":
    main()
