"""Robust rules against the mean: time for each update as a multiple, and memory in models.

    python benchmarks/robust.py [--json]

Updates of an MLP with 1.1 M parameters: half of them of width 1.0, half of width 0.5. The mean and
every rule take turns in one process, so that their ratio does not depend on what else the machine
does. Memory is the largest resident set of a process of its own that merges 10 or 100 updates, as
they come, above what it held before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from resident import from_here, largest

import fedquilt as fq
from fedquilt.federation.aggregation import Aggregator
from fedquilt.structure.tensors import named_tensors

RULES: dict[str, Aggregator] = {
    "mean": fq.Mean(),
    "trimmed mean": fq.TrimmedMean(),
    "median": fq.Median(),
    "geometric median": fq.GeometricMedian(),
    "centered clipping": fq.CenteredClipping(),
    "Multi-Krum": fq.MultiKrum(),
    "trimmed mean, NNM": fq.TrimmedMean(mixing="nnm"),
}


def make_setup() -> tuple[fq.Setup, fq.State]:
    """The model, as it is before the round."""
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 800), torch.nn.ReLU(), torch.nn.Linear(800, 600), torch.nn.ReLU(),
        torch.nn.Linear(600, 10),
    )  # fmt: skip
    example = torch.zeros(1, 784)
    setup = fq.Setup(model, fq.trace_structure(model, example), example, (), rounds=1, seed=0)
    params = {n: t.detach().clone() for n, t in named_tensors(model).items()}
    return setup, fq.State(0, "train", params)


def draw_updates(setup: fq.Setup, state: fq.State, count: int) -> Iterator[fq.Update]:
    """Updates that differ; made as they are asked for."""
    for client in range(count):
        subnet = setup.structure.subnet((1.0, 0.5)[client % 2])
        generator = torch.Generator().manual_seed(client)
        sent = {
            n: t + 0.01 * torch.randn(t.shape, generator=generator)
            for n, t in fq.copy_subnet_tensors(state.params, setup.structure, subnet).items()
        }
        yield fq.Update(client, (subnet,), (sent,), 1.0, {})


def time_rules(count: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds for each update, and the multiple of the mean's: medians of several turns."""
    setup, state = make_setup()
    updates = list(draw_updates(setup, state, count))
    seconds: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(repeats + 1):
        for name, rule in RULES.items():
            started = time.perf_counter()
            rule.aggregate(setup, state, updates)
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return {
        name: {
            "ms for each update": round(1000 * taken / count, 2),
            "times the mean": round(taken / medians["mean"], 1),
        }
        for name, taken in medians.items()
    }


def measure_peak(name: str, count: int) -> float:
    """Run in a process of its own: growth of the resident set, in models."""
    setup, state = make_setup()
    RULES[name].aggregate(setup, state, draw_updates(setup, state, 3))  # caches and libraries
    before = from_here()
    RULES[name].aggregate(setup, state, draw_updates(setup, state, count))
    return (largest() - before) / sum(t.nbytes for t in state.params.values())


def main() -> None:
    """Prints a row for each rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(measure_peak(options.peak[0], int(options.peak[1]))))
        return
    rows = time_rules(20, options.repeats)
    for name, row in rows.items():
        for count in (10, 100):
            command = [sys.executable, __file__, "--peak", name, str(count)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row[f"models of memory, {count} updates"] = round(json.loads(done.stdout), 1)
    if options.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name}:", "  ".join(f"{key}: {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
