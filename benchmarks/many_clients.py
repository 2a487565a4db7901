"""What a run costs with a thousand to a million registered clients, and over thousands of rounds.

    PYTHONPATH=src python benchmarks/many_clients.py
    PYTHONPATH=src python benchmarks/many_clients.py --data partition
    PYTHONPATH=src python benchmarks/many_clients.py --rounds 2000 --counts 1000

Fifty clients take part in each round. Every number of clients runs in a process of its own, in this
one's turn, and each is measured several times; the median is told, and its ratio to the first.
Times are of the processor. Memory is the peak of the process when training starts, of which Python,
PyTorch and Fedquilt need most before there is a client.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

COHORT, EXAMPLES, CLASSES = 50, 20, 4


def read_peak() -> float:
    """The largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(count: int, rounds: int, data: str) -> dict[str, Any]:
    """Trains and resumes a run with a number of clients, in this process."""
    import torch

    import fedquilt as fq

    gc.collect()
    gc.freeze()  # else one round, whichever, looks through all objects of PyTorch once
    before = read_peak()

    def load(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(client)
        inputs = torch.rand(EXAMPLES, 8, generator=generator)
        return inputs, torch.randint(CLASSES, (EXAMPLES,), generator=generator)

    marks = Marks()
    started = time.process_time()
    budgets = (1.0, 0.5, 0.25)
    if data == "function":
        labels = tuple(range(CLASSES))
        clients = fq.make_clients(
            load, count=count, num_examples=EXAMPLES, labels=labels, budgets=budgets
        )
    else:  # one example each, dealt at random
        labels = torch.arange(max(count, 1000)) % CLASSES
        shared = (labels[:, None].float().expand(-1, 8), labels)
        clients = fq.make_clients(shared, partition="iid", count=count, budgets=budgets)
    method = fq.HeteroFL(fq.LocalTraining(epochs=1, batch_size=10), fraction=COHORT / count)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES)
    )
    every = max(1, rounds // 20)
    with tempfile.TemporaryDirectory() as folder:

        def train(until: int, *, resume: bool) -> None:
            cadence = fq.Cadence(checkpoint_every=every)
            fq.train(
                model,
                torch.zeros(1, 8),
                method,
                clients,
                rounds=until,
                workers=0,
                out=Path(folder) / "run",
                cadence=cadence,
                callbacks=[marks],
                resume=resume,
            )

        train(rounds, resume=False)
        first, marks = marks, Marks()
        resumed = time.process_time()
        train(rounds + 1, resume=True)
        restart = marks.setup - resumed
    return {"set-up s": first.setup - started, "of which before": before} | first.summarize(restart)


class Marks:
    """Times and memory of a run, of which a few numbers a round are kept."""

    def __init__(self) -> None:
        self.setup = self.setup_peak = self._before = self._begun = 0.0
        self._rounds, self._saved, self._peaks = array("d"), array("d"), array("d")

    def __call__(self, event: object) -> None:
        now = time.process_time()
        name = type(event).__name__
        if name == "RoundStarted":
            if not self.setup:
                self.setup, self.setup_peak = now, read_peak()
            self._begun = now
        elif name == "RoundDone":
            self._rounds.append(now - self._begun)
            self._peaks.append(read_peak())
        elif name == "CheckpointSaved":
            self._saved.append(now - self._before)
        self._before = now

    def summarize(self, restart: float) -> dict[str, Any]:
        """What the marks say, beside the seconds of a restart."""
        rounds, peaks = self._rounds[1:], self._peaks
        tenth = max(1, len(rounds) // 10)
        return {
            "set-up MB": self.setup_peak,
            "round ms": 1e3 * statistics.median(rounds),
            "checkpoint ms": 1e3 * statistics.median(self._saved),
            "resume s": restart,
            "first tenth ms": 1e3 * statistics.median(rounds[:tenth]),
            "last tenth ms": 1e3 * statistics.median(rounds[-tenth:]),
            "MB at a tenth": peaks[len(peaks) // 10],
            "MB at the end": peaks[-1],
        }


def run_alone(count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--alone", "--counts", str(count)]
    command += ["--rounds", str(arguments.rounds), "--data", arguments.data]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measures all numbers of clients in turns, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", choices=("function", "partition"), default="function")
    parser.add_argument("--save", action="store_true", help="store the figures")
    parser.add_argument("--alone", action="store_true", help="measure one number, in this process")
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(measure(arguments.counts[0], arguments.rounds, arguments.data)))
        return
    from record import Recorder, Table  # not in the process that is measured

    recorder = Recorder(f"many-clients-{arguments.data}-{arguments.rounds}", arguments.save)
    results: dict[int, list[dict[str, Any]]] = {count: [] for count in arguments.counts}
    for _ in range(arguments.repeats):
        for count in arguments.counts:
            results[count].append(run_alone(count, arguments))
    middle = {
        count: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for count, found in results.items()
    }
    first = middle[arguments.counts[0]]
    cells = [
        (
            name,
            *(f"{found[name]:.4g} ({found[name] / first[name]:.2f})" for found in middle.values()),
        )
        for name in first
    ]
    source = {
        "function": "Data of a client are made when it is asked for.",
        "partition": "One data set is divided among the clients.",
    }
    repeats = arguments.repeats
    runs = f"medians of {repeats} runs in turns" if repeats > 1 else "one run"
    notes = (
        f"50 clients a round, {arguments.rounds} rounds in one process, {runs}; in parentheses "
        f"the ratio to the first number. {source[arguments.data]}",
        "Times are of the processor. Memory is the peak of the process when training starts, of "
        "which about 258 MB are Python, PyTorch and Fedquilt.",
    )
    title = f"Registered clients: {arguments.data}, {arguments.rounds} rounds"
    recorder.finish(Table(title, ("", *(f"{count:,}" for count in middle)), cells, notes))


if __name__ == "__main__":
    main()
