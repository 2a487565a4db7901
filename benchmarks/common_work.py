"""The common work against peers: FedAvg, 50 clients a round × 50 images, batch 10, a small CNN.

    python benchmarks/common_work.py FOLDER [--rounds 5] [--sittings 5] [--pfl VENV] [--flower VENV]
        [--widths 1,0.25] [--clients-per-pass auto] [--save]

FOLDER holds ``work.py`` (the net, the data, which images each client has) and the peers' scripts.
Each contestant runs in a process of its own, all of them in turn, several times; printed are
seconds a round (medians) and ratios. The floor is the bare PyTorch loop in two processes side by
side, half of the clients each, which send nothing and merge nothing. The first round is not timed:
there it is tried how many clients go into one pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from record import Recorder, Table

import fedquilt as fq
from fedquilt.runs.events import Event, PassSizeChosen, RoundDone


@dataclass(frozen=True)
class InTurn:
    """FedAvg in which every round has its own clients, as the common work demands."""

    inner: fq.FedAvg
    cohort: int

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def plan(self, setup: fq.Setup, state: fq.State, cohort: list[fq.Client]) -> list[fq.Task]:
        here = [client for client in cohort if client.id // self.cohort == state.round]
        return self.inner.plan(setup, state, here)


def ours(
    work: ModuleType, width: float, rounds: int, workers: int, clients_per_pass: int | str
) -> tuple[float, int]:
    """Seconds a round, and how many clients went into one pass."""
    x, y = work.images()
    count = (rounds + 1) * work.COHORT
    rows = [work.client_rows(c, len(x)) for c in range(count)]
    people = fq.make_clients([torch.utils.data.TensorDataset(x[r], y[r]) for r in rows])
    torch.manual_seed(0)
    settings = fq.LocalTraining(
        lr=work.LR, momentum=0, weight_decay=0, epochs=1, batch_size=work.BATCH, max_grad_norm=None
    )
    times: list[float] = []
    chosen = [1]

    def watch(event: Event) -> None:
        if isinstance(event, RoundDone):
            times.append(event.seconds)
        elif isinstance(event, PassSizeChosen):
            chosen.append(event.clients)

    method = InTurn(fq.FedAvg(settings, fraction=1.0), work.COHORT)
    options = {"workers": workers, "clients_per_pass": clients_per_pass, "callbacks": [watch]}
    fq.train(work.Net(width), x[:1], method, people, rounds + 1, **options)
    return statistics.median(times[1:]), chosen[-1]


def bare(work: ModuleType, width: float, rounds: int) -> float:
    """Half of the clients of each round in the bare loop, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = work.images()
    server, local = work.Net(width), work.Net(width)
    times = []
    for number in range(rounds + 1):
        started = time.perf_counter()
        work.bare_round(
            server,
            local,
            x,
            y,
            range(number * work.COHORT, number * work.COHORT + work.COHORT // 2),
        )
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def side_by_side(command: list[str]) -> float:
    """Two of the same process at once; the slower one's seconds."""
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return max(float(json.loads(one.communicate()[0])["bare"]) for one in both)


def peer(command: list[str], folder: Path) -> float:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    value = next(iter(found.values()))
    return float(value["median"] if isinstance(value, dict) else value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sittings", type=int, default=5, help="turns of every contestant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--widths", default="1,0.25", help="of the net")
    parser.add_argument("--clients-per-pass", default="auto", help="a number, or auto")
    parser.add_argument("--pfl", type=Path, help="a virtual environment with pfl")
    parser.add_argument("--flower", type=Path, help="a virtual environment with flwr[simulation]")
    parser.add_argument("--save", action="store_true", help="store the figures")
    parser.add_argument("--ours", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--bare", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.ours is not None or options.bare is not None:
        sys.path.insert(0, str(folder))
        import work

        if options.ours is not None:
            given = options.clients_per_pass
            count = int(given) if given.isdigit() else given
            seconds, chosen = ours(work, options.ours, options.rounds, options.workers, count)
            print(json.dumps({"ours": seconds, "clients_per_pass": chosen}))
        else:
            print(json.dumps({"bare": bare(work, options.bare, options.rounds)}))
        return
    recorder = Recorder("common-work", options.save)
    rows = [compared(width, options) for width in map(float, options.widths.split(","))]
    names = list(rows[0])
    seconds = [(f"{n}", *(f"{row[n]:.3f}" for row in rows)) for n in names if n != "width"]
    ratios = [
        (n, *(f"{row['fedquilt'] / row[n]:.2f}" for row in rows))
        for n in names
        if n not in ("width", "fedquilt")
    ]
    widths = tuple(f"width {row['width']:g}" for row in rows)
    given = f"{options.workers} workers, clients_per_pass {options.clients_per_pass}"
    notes = (
        f"FedAvg, 50 clients a round with 50 images each, batch 10, {given}; medians of "
        f"{options.sittings} sittings, contestants in turn.",
        "Two bare loops are plain PyTorch in two processes with half of the clients each. They "
        "send and merge nothing.",
    )
    targets = ("Targets: 0.50 of pfl-research at width 1/4, and 0.72 at width 1.",)
    recorder.finish(
        Table("The common work: seconds a round", ("", *widths), seconds, notes),
        Table("The common work: fedquilt against others", ("", *widths), ratios, targets),
    )


def compared(width: float, options: argparse.Namespace) -> dict[str, float]:
    """Medians over several sittings, contestants in turn, so that noise falls on all of them."""
    folder, rounds = options.folder.resolve(), str(options.rounds)
    me = [sys.executable, str(Path(__file__).resolve()), str(folder), "--rounds", rounds]
    me += ["--workers", str(options.workers)]
    commands = {
        "fedquilt": [*me, "--clients-per-pass", options.clients_per_pass, "--ours", str(width)],
        "fedquilt one by one": [*me, "--clients-per-pass", "1", "--ours", str(width)],
    }
    if options.pfl:
        python = str(options.pfl.resolve() / "bin" / "python")
        commands["pfl-research"] = [python, "pfl_peer.py", rounds, str(width)]
    if options.flower:
        script = ["bash", "flower_peer/run.sh", str(options.flower.resolve()), str(width)]
        commands["flower"] = script
    seconds: dict[str, list[float]] = {name: [] for name in (*commands, "two bare loops")}
    for _ in range(options.sittings):
        floor = side_by_side([*me, "--bare", str(width)])
        seconds["two bare loops"].append(round(floor, 3))
        for name, command in commands.items():
            seconds[name].append(round(peer(command, folder), 3))
    return {"width": width, **{name: statistics.median(some) for name, some in seconds.items()}}


if __name__ == "__main__":
    main()
