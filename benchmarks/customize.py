"""In-situ customization: what it takes to switch a model's point, and to take a model from disk.

    python benchmarks/customize.py [--switches 10000] [--repeat 5] [--json]

The model is Split-Mix's for Digits: eight bases of an eighth of the width, each with two kinds of
normalisation. Times are compared with one answer to one image within the same run, so that they can
be read on any machine. Wanted: a switch in less than a millisecond, nothing allocated that grows
with the model, and a model of one base that reads an eighth of the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.customize import bundle
from fedquilt.customize.ensemble import Ensemble
from fedquilt.federation.state import Setup
from fedquilt.files import hash_file
from fedquilt.models.splitmix import DigitsCNN

EXAMPLE = torch.zeros(1, 3, 28, 28)
METHOD = fq.SplitMix(base=0.125, robust=True)
POINTS = [(w / 8, r / 10) for w in (1, 8, 4, 2) for r in (0, 3, 10)]


class Counted(Mapping[str, Tensor]):
    """Tensors, and the bytes of those that were read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.num_bytes = tensors, 0

    def __getitem__(self, name: str) -> Tensor:
        found = self.tensors[name]
        self.num_bytes += found.nbytes
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def seconds(work: Callable[[], object], repeat: int) -> list[float]:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def finished(folder: Path) -> tuple[nn.Module, float]:
    """A run's model on disk, as training would leave it; and the time to trace it, in seconds."""
    model = DigitsCNN()
    start = time.perf_counter()
    structure = fq.trace_structure(model, EXAMPLE)
    traced = time.perf_counter() - start
    people = (fq.Client(0, 1, (), fq.Budget(1.0)),)
    setup = METHOD.prepare_model(Setup(model, structure, EXAMPLE, people, rounds=1, seed=0))
    about = {
        "seed": 0,
        "rounds": 1,
        "sizes": list(METHOD.sizes(setup)),
        "example": [{"shape": list(EXAMPLE.shape), "dtype": "float32"}],
    }
    bundle.save_bundle(folder / "model", METHOD.start(setup).params, structure, about)
    return model, traced


def switching(model: Ensemble, count: int) -> dict[str, float]:
    """Other programs on the machine lengthen a few switches; the time on the processor does not."""
    wall, processor = [], []
    for number in range(count):
        width, robustness = POINTS[number % len(POINTS)]
        begun, start = time.thread_time(), time.perf_counter()
        model.width, model.robustness = width, robustness
        wall.append(time.perf_counter() - start)
        processor.append(time.thread_time() - begun)
    tracemalloc.start()
    for width, robustness in POINTS:
        model.width, model.robustness = width, robustness
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "median": statistics.median(wall),
        "longest": max(wall),
        "longest_on_processor": max(processor),
        "bytes": peak,
    }


def taking(run: fq.Run, width: float, repeat: int) -> dict[str, float]:
    """The time to take a model again, what it reads, and what it holds."""
    model = run.customize(width)
    counted = Counted(run.state.params)
    replace(run, state=replace(run.state, params=counted)).customize(width)
    times = seconds(lambda: run.customize(width), repeat)
    return {
        "median": statistics.median(times),
        "bytes_read": counted.num_bytes,
        "bytes_held": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
    }


def measured(switches: int, repeat: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        net, traced = finished(folder)
        file = folder / "model" / "params.safetensors"
        opening = seconds(lambda: fq.open_run(folder, net, METHOD), repeat)

        def first(width: float) -> float:
            """From the directory, with the check of what is read."""
            runs = [fq.open_run(folder, net, METHOD) for _ in range(repeat)]
            fresh = iter(runs)
            return statistics.median(seconds(lambda: next(fresh).customize(width), repeat))

        run = fq.open_run(folder, net, METHOD)
        whole = run.customize()
        assert isinstance(whole, Ensemble)
        image = torch.rand(1, 3, 28, 28)
        forward = statistics.median(seconds(lambda: whole(image), max(20, repeat)))
        slim = run.customize(0.125)
        slim_forward = statistics.median(seconds(lambda: slim(image), max(20, repeat)))
        return {
            "answer": {"width 1": forward, "width 1/8": slim_forward},
            "switch": switching(whole, switches),
            "open": statistics.median(opening),
            "trace": traced,
            "hash_of_the_file": statistics.median(seconds(lambda: hash_file(file), repeat)),
            "file_bytes": file.stat().st_size,
            "take": {
                label: {"first": first(width), **taking(run, width, repeat)}
                for label, width in (("width 1", 1.0), ("width 1/8", 0.125))
            },
        }


def show(found: dict[str, Any]) -> None:
    forward, switch = found["answer"]["width 1"], found["switch"]
    print(f"one answer to one image: {1e3 * forward:.2f} ms at width 1")
    print(
        f"switch: median {1e6 * switch['median']:.1f} µs ({switch['median'] / forward:.5f} of an "
        f"answer), longest {1e6 * switch['longest']:.0f} µs, of which on the processor at most "
        f"{1e6 * switch['longest_on_processor']:.0f} µs; {switch['bytes']} bytes allocated"
    )
    print(
        f"open a run: {1e3 * found['open']:.1f} ms, "
        f"{found['open'] / found['trace']:.3f} of tracing its model"
    )
    for label, take in found["take"].items():
        print(
            f"take {label}: {1e3 * take['first']:.1f} ms with its check, "
            f"{1e3 * take['median']:.1f} ms again ({take['median'] / forward:.1f} answers); "
            f"reads {take['bytes_read'] / found['file_bytes']:.3f} of the file, "
            f"holds {take['bytes_held'] / found['file_bytes']:.3f}"
        )
    print(f"a hash of the whole file would take {1e3 * found['hash_of_the_file']:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--switches", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(options.switches, options.repeat)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
