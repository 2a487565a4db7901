"""The server's own time for each client of a round, and its memory, with workers that do the work.

    python benchmarks/server.py scattered [--clients 40] [--rounds 5] [--save]
    python benchmarks/server.py cohorts [--sizes 10,100,1000,10000] [--save]

``scattered``: HeteroFL, whose clients hold nested subnets, against methods whose clients all hold
other cells, on one net with the same budgets and data (at most 3 × HeteroFL's time is wanted).
``cohorts``: clients that have next to nothing to do, ever more of them in a round. Printed are the
server's milliseconds for each client, the slope from the smallest round to the largest, and how far
the resident set grew over that of the smallest round (wanted: at most 0.5 ms, and flat memory).

Time is the processor time of the server process: planning, requests, checks, merging and records.
Each case runs in a fresh process, methods in turn; the first round is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from record import Recorder, Table
from resident import field, from_here, largest

import fedquilt as fq
from fedquilt.models import make_model
from fedquilt.runs.events import RoundDone, RoundStarted

LOCAL = fq.LocalTraining(epochs=1, batch_size=2, max_grad_norm=None)
SCATTERED: dict[str, Any] = {
    "heterofl": lambda: fq.HeteroFL(LOCAL, fraction=1.0, query_statistics=False),
    "feddrop": lambda: fq.FedDrop(
        LOCAL, fraction=1.0, per_client=True, width=0.5, query_statistics=False
    ),
    "adds": lambda: fq.ADDS(LOCAL, fraction=1.0, keep_fraction=0.5, query_statistics=False),
}
QUIET = fq.Cadence(evaluate_every=0)


class ServerClock:
    """Notes the processor time that the server spends between the start and the end of rounds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, event: object) -> None:
        if isinstance(event, RoundStarted):
            self._started = time.process_time()
        elif isinstance(event, RoundDone):
            assert not event.failures, event.failures[0]
            self.seconds.append(time.process_time() - self._started)


def run_scattered(name: str, clients: int, rounds: int) -> float:
    """Milliseconds of the server for each client, with HeteroFL's CNN."""
    torch.manual_seed(0)
    data = torch.rand(clients * 4, 1, 28, 28), torch.arange(clients * 4) % 10
    people = fq.make_clients(data, count=clients, budgets=(0.5, 0.25))
    clock, model = ServerClock(), make_model("heterofl-cnn", {})
    method = SCATTERED[name]()
    fq.train(
        model, data[0][:1], method, people, rounds + 1, workers=2, cadence=QUIET, callbacks=[clock]
    )
    return 1000 * statistics.median(clock.seconds[1:]) / clients


def run_cohort(clients: int) -> dict[str, float]:
    """Rounds of one size, in a fresh process."""
    torch.manual_seed(0)
    rounds = 4 if clients >= 1000 else 12
    data = torch.rand(clients * 2, 16), torch.arange(clients * 2) % 4
    people = fq.make_clients(data, count=clients, budgets=(1.0, 0.5))
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    clock = ServerClock()
    method = fq.HeteroFL(LOCAL, fraction=1.0)
    before = from_here()
    fq.train(
        model, data[0][:1], method, people, rounds, workers=2, cadence=QUIET, callbacks=[clock]
    )
    return {
        "clients": clients,
        "ms": 1000 * statistics.median(clock.seconds[1:]) / clients,
        "MB": (largest() - before) / 1e6,
        "held": field("VmRSS") / 1e6,
    }


def run_alone(*arguments: object) -> Any:
    """What this script prints for one case in a fresh process."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare_scattered(clients: int, rounds: int, sittings: int) -> Table:
    times: dict[str, list[float]] = {name: [] for name in SCATTERED}
    for _ in range(sittings):
        for name in SCATTERED:
            case = ("--alone", name, "--clients", clients, "--rounds", rounds)
            times[name].append(run_alone("scattered", *case))
    least = {name: min(some) for name, some in times.items()}
    base = least["heterofl"]
    rows = [(name, f"{value:.2f}", f"{value / base:.2f}") for name, value in least.items()]
    title = "Scattered subnets: what a client costs the server"
    notes = (
        f"Processor time, {clients} clients, HeteroFL's CNN, budgets 1/2 and 1/4, {rounds} rounds, "
        f"the least of {sittings} sittings; target: at most 3 times HeteroFL's.",
    )
    return Table(title, ("method", "ms a client", "times HeteroFL's"), rows, notes)


def compare_cohorts(sizes: list[int]) -> Table:
    rows = [run_alone("cohorts", "--alone", "cohort", "--clients", size) for size in sizes]
    first, last = rows[0], rows[-1]
    spent = [row["ms"] * row["clients"] for row in (first, last)]
    slope = (spent[1] - spent[0]) / max(last["clients"] - first["clients"], 1)
    cells = [(f"{r['clients']:.0f}", f"{r['ms']:.3f}", f"{r['MB']:+.1f} MB") for r in rows]
    notes = (
        f"A net of two layers, two examples a client. One more client costs {slope:.3f} ms of the "
        "server; target: at most 0.5 ms, and memory that does not grow.",
    )
    title = "Rounds of more clients"
    return Table(title, ("clients a round", "ms of the server for each", "memory"), cells, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("scattered", "cohorts"))
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sittings", type=int, default=2)
    parser.add_argument("--sizes", default="10,100,1000,10000")
    parser.add_argument("--save", action="store_true", help="store the figures")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone == "cohort":
        print(json.dumps(run_cohort(options.clients)))
    elif options.alone:
        print(json.dumps(run_scattered(options.alone, options.clients, options.rounds)))
    else:
        recorder = Recorder(f"server-{options.what}", options.save)
        if options.what == "scattered":
            table = compare_scattered(options.clients, options.rounds, options.sittings)
        else:
            table = compare_cohorts([int(size) for size in options.sizes.split(",")])
        recorder.finish(table)


if __name__ == "__main__":
    main()
