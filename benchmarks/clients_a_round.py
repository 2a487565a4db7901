"""What a client of a round costs the server, from ten to ten thousand clients in one round.

    python benchmarks/clients_a_round.py [--clients 10,100,1000,10000] [--workers 2] [--json]

HeteroFL with five widths on the CNN of the paper, an eighth as wide (25,000 parameters), the small
budgets first. Clients send back what they got, so that nearly all the time is the server's own.
Printed for each number of clients, per client in milliseconds: the processor time of the server for
planning, for the engine (dispatch, messages, files), for merging and in total, and the real time.
Then the most updates that waited as files and their bytes, counted in a round of its own, and the
growth of the server's memory over what it had before the first round. The slope is the time of one
more client between the first and the last number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import torch
from resident import from_here, largest

import fedquilt as fq
from fedquilt.engines.local import LocalEngine
from fedquilt.federation.state import Setup, State
from fedquilt.models.heterofl import CNN

LEVELS = (0.0625, 0.125, 0.25, 0.5, 1.0)  # small budgets first
PAUSE = 0.02  # seconds between two looks at the waiting files


@dataclass(frozen=True)
class Echo:
    """A recipe that sends back what the client got."""

    def run(self, task: fq.Task, context: fq.ClientContext) -> fq.ClientResult:
        module = context.module(task.subnets[0], task.params)
        tensors = context.tensors(module, task.subnets[0], task.subnets[0])
        return fq.ClientResult(fq.Update(task.client, task.subnets, (tensors,), 1.0, {"loss": 0.0}))


class Work:
    """A federation whose clients all take part in every round."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(0)
        self.model = CNN(width=0.125)
        example = torch.zeros(1, 1, 28, 28)
        self.structure = fq.trace_structure(self.model, example)
        levels = [LEVELS[number * len(LEVELS) // count] for number in range(count)]
        clients = [
            fq.Client(number, 1, budget=fq.Budget(width=width))
            for number, width in enumerate(levels)
        ]
        self.setup = Setup(self.model, self.structure, example, clients, 1, 0)
        self.method = fq.HeteroFL(fraction=1.0)
        self.state = self.method.start(self.setup)

    def plan(self) -> list[fq.Task]:
        tasks = self.method.plan(self.setup, self.state, self.setup.clients)
        return [fq.Task(t.client, t.subnets, t.params, Echo(), t.seed) for t in tasks]

    def merge(self, updates: Iterator[fq.Update]) -> State:
        return self.method.merge(self.setup, self.state, updates)


class EngineTime:
    """The processor time that an engine takes while its results are asked for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def count(self, results: Iterator[fq.Update | object]) -> Iterator[fq.Update]:
        while True:
            started = time.process_time()
            result = next(results, None)
            self.seconds += time.process_time() - started
            if result is None:
                return
            assert isinstance(result, fq.Update), result
            yield result


class WaitingFiles:
    """The most updates that wait as files at a time, and their bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_done = folder, Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self.count = self.size = 0

    def __enter__(self) -> WaitingFiles:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.wait(PAUSE):
            sizes = []
            for path in self._folder.glob("fedquilt-*/update-*"):
                try:
                    sizes.append(path.stat().st_size)
                except OSError:  # it has been merged
                    continue
            self.count, self.size = max(self.count, len(sizes)), max(self.size, sum(sizes))


def measure(count: int, workers: int) -> dict[str, float]:
    work = Work(count)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(make_engine(work, workers, folder)) as engine,
    ):
        work.merge(engine_results(engine, work.plan()[: 10 * workers]))  # kernels are loaded
        before, started, real = from_here(), time.process_time(), time.perf_counter()
        tasks = work.plan()
        planned = time.process_time()
        engine_time = EngineTime()
        work.merge(engine_time.count(engine.run(tasks)))
        ended, real = time.process_time(), time.perf_counter() - real
        grown = largest() - before
        with WaitingFiles(Path(folder)) as waiting:
            work.merge(engine_results(engine, tasks))
    return {
        "clients": count,
        "plan (ms)": per_client(planned - started, count),
        "engine (ms)": per_client(engine_time.seconds, count),
        "merge (ms)": per_client(ended - planned - engine_time.seconds, count),
        "total (ms)": per_client(ended - started, count),
        "real time (ms)": per_client(real, count),
        "waiting files": waiting.count,
        "waiting (MB)": round(waiting.size / 1e6, 1),
        "memory (MB)": round(grown / 1e6, 1),
    }


def measure_apart(count: int, workers: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", str(count), "--workers", str(workers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, float] = json.loads(done.stdout)
    return row


def make_engine(work: Work, workers: int, folder: str) -> LocalEngine:
    tempfile.tempdir = folder  # so that no other process's files are counted
    return LocalEngine(work.model, work.structure, {}, workers=workers)


def engine_results(engine: LocalEngine, tasks: list[fq.Task]) -> Iterator[fq.Update]:
    return EngineTime().count(engine.run(tasks))


def per_client(seconds: float, count: int) -> float:
    return round(1000 * seconds / count, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="10,100,1000,10000")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # in a fresh process
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps(measure(options.only, options.workers)))
        return
    rows = [measure_apart(int(count), options.workers) for count in options.clients.split(",")]
    first, last = rows[0], rows[-1]
    grown = last["total (ms)"] * last["clients"] - first["total (ms)"] * first["clients"]
    slope = round(grown / max(last["clients"] - first["clients"], 1), 3)
    if options.json:
        print(json.dumps({"rows": rows, "slope (ms)": slope}))
        return
    for row in rows:
        print("  ".join(f"{name}: {value}" for name, value in row.items()), flush=True)
    print(f"slope: {slope} ms of the server for one more client")


if __name__ == "__main__":
    main()
