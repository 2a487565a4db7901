"""In-situ customization: what it takes to switch a model's point, and to take a model from disk.

    python benchmarks/customize.py [--switches 10000] [--repeat 5] [--save]

The model is Split-Mix's for Digits: eight bases of an eighth of the width, each with two kinds of
normalisation. Times are compared with one answer to one image within the same run, so that they can
be read on any machine. Wanted: a switch in less than a millisecond, nothing allocated that grows
with the model, and a model of one base that reads an eighth of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import Recorder, Table
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.customize.ensemble import Ensemble
from fedquilt.models.splitmix import DigitsCNN

EXAMPLE = torch.zeros(1, 3, 28, 28)
METHOD = fq.SplitMix(fq.LocalTraining(epochs=1), base=0.125, robust=True, steps=1)
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


def train_something(folder: Path) -> tuple[nn.Module, float]:
    """A run of one round on noise, on disk; and the seconds that tracing its model takes."""
    model = DigitsCNN()
    start = time.perf_counter()
    structure = fq.trace_structure(model, EXAMPLE)
    traced = time.perf_counter() - start
    clients = fq.make_clients((torch.rand(20, *EXAMPLE.shape[1:]), torch.arange(20) % 10), count=1)
    fq.train(model, EXAMPLE, METHOD, clients, 1, workers=0, out=folder, structure=structure)
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
    """The time to take a model again, and what it reads."""
    run.customize(width)
    counted = Counted(run.state.params)
    replace(run, state=replace(run.state, params=counted)).customize(width)
    times = seconds(lambda: run.customize(width), repeat)
    return {
        "median": statistics.median(times),
        "bytes_read": counted.num_bytes,
    }


def measured(switches: int, repeat: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        net, traced = train_something(folder)
        stack.enter_context(torch.no_grad())
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
            "file_bytes": file.stat().st_size,
            "take": {
                label: {"first": first(width), **taking(run, width, repeat)}
                for label, width in (("width 1", 1.0), ("width 1/8", 0.125))
            },
        }


def list_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of what was done, its milliseconds, and the same in answers."""
    forward, switch = found["answer"]["width 1"], found["switch"]
    times = {
        "a prediction for one image, width 1": forward,
        "a change of size and robustness": switch["median"],
        "the longest change": switch["longest"],
        "the longest change, on the processor": switch["longest_on_processor"],
        "opening a run": found["open"],
        "tracing its model, which opening spares": found["trace"],
    }
    for label, take in found["take"].items():
        times[f"{label} from disk"] = take["first"]
        times[f"{label} again"] = take["median"]
    return [(name, f"{1e3 * s:.3g}", f"{s / forward:.3g}") for name, s in times.items()]


def list_notes(found: dict[str, Any], switches: int) -> list[str]:
    """What the rows do not say."""
    taken = (
        f"{label} {take['bytes_read'] / found['file_bytes']:.3f}"
        for label, take in found["take"].items()
    )
    return [
        "A Split-Mix model, eight bases for Digits with two kinds of normalization; medians, one "
        f"thread. There were {switches} changes; one allocates {found['switch']['bytes']} bytes.",
        f"Of the file is read: {', '.join(taken)}.",
    ]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--switches", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="store the figures")
    options = parser.parse_args()
    recorder = Recorder("customize", options.save)
    torch.set_num_threads(1)
    found = measured(options.switches, options.repeat)
    header = "", "ms", "predictions"
    notes = list_notes(found, options.switches)
    recorder.finish(Table("Changing size and robustness", header, list_rows(found), notes))


if __name__ == "__main__":
    main()
