"""The Flower engine: a round on nodes, deployed or simulated, against a local one; and bytes sent.

    python benchmarks/flower.py [--rounds 4] [--works tiny,small,large] [--json]

Three clients train the same subnets on the same examples of the embedded digits in every engine:
local with one worker and with two; on three deployed nodes, with TLS and authentication; and on
three simulated ones. Nodes work side by side, and so are compared with two workers (and two cores).
Seconds a round are medians without the first round; to start and to finish is counted apart.

Bytes are those in messages, with the closing phase's, against the sum of the subnets' tensors (at
most 1.02 is wanted). Where nodes are deployed a relay counts as well what goes through the sockets
between them and their SuperLink: all of that in TLS, with Flower's headings, its questions whether
there is something to do, heartbeats, the app itself, and the log that is sent to whoever waits.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from fedquilt.deploy.federation import HOST, Federation
from fedquilt.deploy.launch import (
    RunningFederation,
    resolve_for_nodes,
    train_on_flower,
)
from fedquilt.deploy.node_config import make_node_configs
from fedquilt.runs.from_config import plan_run
from fedquilt.runs.plan import start_run
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import load_source, resolve_config
from fedquilt.settings.schema import Config

CLIENTS = 3
PIECE = 1 << 18  # bytes that a relay takes at once
IDLE = 15.0  # seconds in which nodes have nothing to do, to know what they send then
WORKS: dict[str, dict[str, Any]] = {
    "tiny": {"model.name": "heterofl-cnn", "data.budgets": [0.0625] * CLIENTS},
    "small": {"model.name": "heterofl-cnn", "data.budgets": [1.0, 0.5, 0.25]},
    "large": {"model.name": "heterofl-resnet18", "data.budgets": [0.5, 0.25, 0.125]},
}

Train = Callable[[Config, Path], object]
Row = dict[str, Any]


class Relay:
    """Passes on what comes to a port of its own to another port, and back, and counts it."""

    def __init__(self, port: int) -> None:
        self._port, self._here, self._lock = port, socket.create_server((HOST, 0)), Lock()
        self.address = f"{HOST}:{self._here.getsockname()[1]}"
        self.num_bytes = {"down": 0, "up": 0}
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._here.accept()
            far = socket.create_connection((HOST, self._port))
            for words in ((near, far, "up"), (far, near, "down")):
                Thread(target=self._pass, args=words, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        try:
            while piece := source.recv(PIECE):
                with self._lock:
                    self.num_bytes[way] += len(piece)
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one of the two has gone
            source.close()
            target.close()


class Relayed(Federation):
    """A federation whose SuperLink is reached through a relay."""

    @cached_property
    def relay(self) -> Relay:
        return Relay(int(super().address.rpartition(":")[2]))

    @property
    def address(self) -> str:
        return self.relay.address


def config_of(work: str, rounds: int) -> Config:
    rarely = {"run.evaluate_every": 0, "run.checkpoint_every": 0}
    settings = {"rounds": rounds, "data.clients": CLIENTS, **rarely, **WORKS[work]}
    return load_config(override_settings({}, settings))


def locally(config: Config, folder: Path, *, workers: int) -> None:
    config = load_config(override_settings(config.model_dump(), {"run.workers": workers}))
    source = load_source(config)
    start_run(plan_run(resolve_config(config, source), source, folder)).train()


def on_flower(config: Config, folder: Path, *, place: RunningFederation, simulation: bool) -> None:
    config = resolve_for_nodes(config, place)
    train_on_flower(config, folder, lambda line: None, federation=place, simulation=simulation)


def seconds(train: Train, config: Config, folder: Path) -> tuple[float, float]:
    """Of a round, and of all that is no round."""
    started = time.perf_counter()
    train(config, folder)
    whole = time.perf_counter() - started
    timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    rounds = [record["seconds"] for record in timing if record["event"] == "RoundDone"]
    return statistics.median(rounds[1:] or rounds), whole - sum(rounds)


def idle(relay: Relay) -> Row:
    """What goes over the wire while there is no run."""
    before = dict(relay.num_bytes)
    time.sleep(IDLE)
    rates = {way: (count - before[way]) / IDLE for way, count in relay.num_bytes.items()}
    return {f"idle nodes, bytes a second {way}": round(rate) for way, rate in rates.items()}


def bytes_sent(folder: Path, wire: dict[str, int] | None) -> Iterator[Row]:
    """For each way: bytes in messages, and on the wire, against those of the subnets in them."""
    sent = json.loads((folder / "traffic.json").read_text())
    for way, messages in (("down", "num_messages"), ("up", "num_replies")):
        subnets, inside, count = sent[f"tensors_{way}"], sent[f"bytes_{way}"], sent[messages]
        row: Row = {
            "way": way,
            "messages": count,
            "subnets (MB)": round(subnets / 1e6, 3),
            "messages / subnets": round(inside / subnets, 4),
            "bytes more a message": round((inside - subnets) / count),
        }
        if wire is not None:
            row["wire / subnets"] = round(wire[way] / subnets, 4)
            row["wire beyond messages (MB)"] = round((wire[way] - inside) / 1e6, 3)
        yield row


def on_one_machine(works: Sequence[str], rounds: int, aside: Path) -> Iterator[Row]:
    for work in works:
        for workers in (1, 2):
            train, folder = partial(locally, workers=workers), aside / f"{work}-{workers}"
            a_round, around = seconds(train, config_of(work, rounds), folder)
            yield {
                "work": work,
                "engine": "local",
                "workers": workers,
                "seconds a round": round(a_round, 3),
                "around": round(around, 1),
            }


def on_nodes(
    engine: str,
    place: RunningFederation,
    works: Sequence[str],
    rounds: int,
    aside: Path,
    relay: Relay | None,
) -> Iterator[Row]:
    train = partial(on_flower, place=place, simulation=engine == "flower-simulation")
    for work in works:
        folder, before = aside / f"{work}-{engine}", dict(relay.num_bytes) if relay else {}
        a_round, around = seconds(train, config_of(work, rounds), folder)
        wire = {way: relay.num_bytes[way] - before[way] for way in before} if relay else None
        name: Row = {"work": work, "engine": engine}
        yield {**name, "seconds a round": round(a_round, 3), "around": round(around, 1)}
        yield from ({**name, **row} for row in bytes_sent(folder, wire))


def overheads(rows: Sequence[Row]) -> Iterator[Row]:
    """Of Flower's engines over the local one, from what was measured."""
    taken = {
        (row["work"], row["engine"], row.get("workers")): row["seconds a round"]
        for row in rows
        if "seconds a round" in row
    }
    for (work, engine, workers), a_round in taken.items():
        if workers is None:
            one, two = (taken[work, "local", count] for count in (1, 2))
            yield {
                "work": work,
                "engine": engine,
                "/ one worker": round(a_round / one, 2),
                "/ two workers": round(a_round / two, 2),
                "seconds more a round": round(a_round - two, 2),
                "seconds more a message": round((a_round - two) / CLIENTS, 2),
            }


def measured(works: Sequence[str], rounds: int, aside: Path) -> Iterator[Row]:
    """One engine after the other, so that no idle nodes are beside what is measured."""
    yield from on_one_machine(works, rounds, aside)
    deployed = Relayed(aside / "deployed", make_node_configs(CLIENTS))
    with deployed:
        deployed.wait()
        yield idle(deployed.relay)
        place = RunningFederation(deployed.connection, deployed.nodes)
        yield from on_nodes("flower", place, works, rounds, aside, deployed.relay)
    with Federation(aside / "simulated", simulation=True) as simulated:
        place = RunningFederation(simulated.connection, ())
        yield from on_nodes("flower-simulation", place, works, rounds, aside, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as aside:
        for row in measured(options.works.split(","), options.rounds, Path(aside)):
            rows.append(row)
            tell(row, silent=options.json)
    more = list(overheads(rows))
    for row in more:
        tell(row, silent=options.json)
    if options.json:
        print(json.dumps([*rows, *more]))


def tell(row: Row, *, silent: bool) -> None:
    if not silent:
        print("  ".join(f"{name}: {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
