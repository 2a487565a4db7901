"""Memory of a long simulation on Flower: what its processes hold in round 2 and in the last one.

    python benchmarks/flower_memory.py [--clients 100] [--rounds 20] [--fraction 1] [--json]

HeteroFL with its five sizes on the embedded digits. Clients are simulated by Ray, one core each:
there is a worker (a process of Ray that runs clients' apps) for every core. The server's app and
Flower's grid are in one process beside them. What a round takes is the largest resident set of all
looks in it, two a second. Printed for each process: round 2, the last round, their ratio (flat is
wanted), and all rounds from 2 on. The same again without shared memory, the object store of Ray:
its pages count for every process that has touched them, and Ray uses them in turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

from resident import field

from fedquilt.deploy.federation import Federation
from fedquilt.deploy.launch import RunningFederation, resolve_for_nodes, train_on_flower
from fedquilt.settings.load import load_config, override_settings

PAUSE = 0.5  # seconds between two looks
EARLY = 2  # the round that the last one is compared with
WORKER, ALL_WORKERS = "worker", "all workers"
ROLES = {  # by program
    "flwr-simulation": "server",
    "flower-superlink": "SuperLink",
    "flower-superexec": "SuperExec",
    "raylet": "Ray's raylet",
    "gcs_server": "Ray's control",
}
OTHERS = "Ray's other processes"

Sizes = dict[str, tuple[int, int]]  # bytes that each process holds, and those that no other has


class Watcher:
    """Notes what a federation's processes hold in each round of a run, from the second on."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self._federation, self._folder = federation, folder
        self._is_done = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self.looks: dict[int, list[Sizes]] = defaultdict(list)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        timing = self._folder / "timing.jsonl"  # a line for every round that is done
        while not self._is_done.wait(PAUSE):
            if timing.exists():
                sizes = self._sizes()
                self.looks[1 + len(timing.read_text().splitlines())].append(sizes)

    def _sizes(self) -> Sizes:
        found: dict[str, tuple[int, int]] = {}
        for pid in sorted(self._federation.list_processes()):
            try:
                role, held, shared = role_of(pid), field("VmRSS", pid), field("RssShmem", pid)
            except (OSError, RuntimeError):  # it has ended
                continue
            names = [f"{WORKER} {pid}", ALL_WORKERS] if role == WORKER else [role]
            for name in names:
                before = found.get(name, (0, 0))
                found[name] = before[0] + held, before[1] + held - shared
        return found


def role_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if words[0].startswith("ray::ClientAppActor"):
        return WORKER
    programs = [Path(word).name for word in words[:2]]
    return next((ROLES[program] for program in programs if program in ROLES), OTHERS)


def compared(looks: dict[int, list[Sizes]], last: int) -> Iterator[dict[str, Any]]:
    """Two rows for each process that was there in the last round."""
    for name in sorted({name for sizes in looks[last] for name in sizes}):
        for kind, what in enumerate(("resident", "without the object store")):
            held = [
                max((sizes[name][kind] for sizes in looks[number] if name in sizes), default=0)
                for number in range(EARLY, last + 1)
            ]
            yield {
                "process": name,
                "memory": what,
                f"round {EARLY} (MB)": _megabytes(held[0]),
                f"round {last} (MB)": _megabytes(held[-1]),
                "ratio": round(held[-1] / held[0], 3) if held[0] else None,
                "rounds (MB)": [_megabytes(count) for count in held],
            }


def _megabytes(count: int) -> int:
    return round(count / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = {
        "rounds": options.rounds,
        "data.clients": options.clients,
        "method.fraction": options.fraction,
        "local_training.epochs": 2,
        "run.evaluate_every": 0,
        "run.checkpoint_every": 0,
    }
    with (
        tempfile.TemporaryDirectory() as aside,
        Federation(Path(aside) / "federation", simulation=True) as federation,
    ):
        place, folder = RunningFederation(federation.connection, ()), Path(aside) / "run"
        config = resolve_for_nodes(load_config(override_settings({}, settings)), place)
        with Watcher(federation, folder) as watcher:
            train_on_flower(config, folder, lambda line: None, federation=place, simulation=True)
        timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    rows = list(compared(watcher.looks, options.rounds))
    seconds = [round(record["seconds"], 1) for record in timing if record["event"] == "RoundDone"]
    if options.json:
        print(json.dumps({"processes": rows, "seconds": seconds}))
        return
    for row in rows:
        print("  ".join(f"{name}: {value}" for name, value in row.items()))
    print(f"seconds: {seconds}")


if __name__ == "__main__":
    main()
