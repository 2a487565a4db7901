"""What a secure sum costs a client and the server, in seconds and bytes, against a plain sum.

    python benchmarks/secure_aggregation.py [--clients 50] [--cells 1000000] [--dropouts 0.1]
    python benchmarks/secure_aggregation.py --clients 500 --cells 100000 --neighbors 36

One process and one thread do the work of everyone in turn; each step of each side is timed by the
processor. Clients drop out after they have shared their secrets, before they send their vectors,
which costs the server most. *equal*: all clients hold all cells. *mixed*: five tiers of widths 1,
1/2, ... 1/16 with as many clients each, whose cells are the square of the width. A plain client
sends its changes as float32, and a plain server adds them up. Sums are compared with plain ones.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from fedquilt.federation.secure.client import SecureClient
from fedquilt.federation.secure.integers import get_dtype
from fedquilt.federation.secure.quantization import NUM_EXTRA, Quantizer
from fedquilt.federation.secure.server import SecureServer
from fedquilt.federation.secure.session import Session

FLOAT_BYTES = 4


class Costs:
    """Seconds of each step, and bytes that each client sends and receives."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.up: Counter[int] = Counter()
        self.down: Counter[int] = Counter()

    def time(self, step: str, call: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = call()
        self.seconds[step].append(time.process_time() - started)
        return result

    def total(self, side: str) -> float:
        """Seconds of one side: the mean client's, or all of the server's."""
        steps = {step: values for step, values in self.seconds.items() if step.startswith(side)}
        whole = statistics.fmean if side == "client" else sum
        return sum(whole(values) for values in steps.values())


def make_rings(kind: str, clients: int, cells: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """The clients and the cells of each ring."""
    if kind == "equal":
        return [tuple(range(clients))], [cells]
    widths = [2.0**-tier for tier in range(5)]
    sizes = [round(cells * width**2) for width in widths] + [0]
    rings = [tuple(client for client in range(clients) if client % 5 <= tier) for tier in range(5)]
    return rings[::-1], [sizes[tier] - sizes[tier + 1] for tier in range(5)][::-1]


def run_session(session: Session, dropouts: float, costs: Costs, seed: int = 0) -> None:
    """Runs all steps, with everybody's time and bytes; the sums must be right."""
    draw = np.random.default_rng(seed)
    quantizer = Quantizer(8.0, 1.0, len(session.clients), "stochastic", session.bits)
    lost = set(draw.permutation(session.clients)[: round(dropouts * len(session.clients))].tolist())
    server = SecureServer(session)
    clients: dict[int, SecureClient] = {}
    for number in session.clients:
        clients[number] = costs.time("client keys", lambda n=number: start(n, session))
        costs.time("server keys", lambda n=number: server.add_keys(n, clients[n].public_keys))
        costs.up[number] += 64
    keys = costs.time("server keys", lambda: server.roster).keys
    for number in session.clients:
        clients[number], shares = costs.time(
            "client shares", lambda n=number: clients[n].share(keys)
        )
        costs.time("server shares", lambda n=number, s=shares: server.add_shares(n, s))
        costs.down[number] += len(keys) * (64 + 8)
        costs.up[number] += sum(len(share) for share in shares.values())
    totals = [np.zeros(size, get_dtype(session.bits)) for size in session.sizes]
    for number in session.clients:
        if number in lost:
            continue
        changes = {
            ring: draw.normal(0, 0.01, session.sizes[ring] - NUM_EXTRA)
            for ring in session.list_rings(number)
        }
        vectors = costs.time(
            "client vectors",
            lambda c=changes, n=number: {r: quantizer.encode(v, 1.0, n) for r, v in c.items()},
        )
        clients[number], hidden = costs.time(
            "client masks", lambda n=number, v=vectors: clients[n].mask(server.sharers, v)
        )
        costs.time("server vectors", lambda n=number, h=hidden: server.add_vectors(n, h))
        costs.up[number] += sum(vector.nbytes for vector in hidden.values())
        for ring, vector in vectors.items():
            totals[ring] += vector
    for number in server.survivors:
        received = costs.time("server secrets", lambda n=number: server.list_encrypted(n))
        _, revealed = costs.time(
            "client secrets", lambda n=number, r=received: clients[n].reveal(server.survivors, r)
        )
        costs.time("server secrets", lambda n=number, r=revealed: server.add_secrets(n, r))
        costs.down[number] += 8 * len(server.survivors)
        costs.down[number] += sum(len(share) for share in received.values())
        costs.up[number] += sum(len(share) for share in revealed.values())
    opened = costs.time("server sums", server.open_sums)
    assert not opened.closed, opened.closed
    for ring, total in enumerate(totals):
        np.testing.assert_array_equal(opened.sums[ring], total)


def start(number: int, session: Session) -> SecureClient:
    client = SecureClient(number, session)
    _ = client.public_keys
    return client


def time_plain(session: Session) -> float:
    """Seconds in which a server adds up plain changes."""
    sums = [np.zeros(size - NUM_EXTRA, np.float32) for size in session.sizes]
    changes = [np.ones_like(total) for total in sums]
    started = time.process_time()
    for number in session.clients:
        for ring in session.list_rings(number):
            sums[ring] += changes[ring]
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--cells", type=int, default=1_000_000)
    parser.add_argument("--dropouts", type=float, default=0.1)
    parser.add_argument("--threshold", type=int, default=6)
    parser.add_argument("--neighbors", nargs="+", default=["all", "16"])
    parser.add_argument("--rings", nargs="+", default=["equal", "mixed"])
    given = parser.parse_args()
    print(f"{given.clients} clients, {given.cells:,} cells, {given.dropouts:.0%} drop out")
    print("rings  neighbors  client s  server s  plain s  upload of a client, bytes, and overhead")
    for kind in given.rings:
        rings, sizes = make_rings(kind, given.clients, given.cells)
        for word in given.neighbors:
            neighbors = None if word == "all" else int(word)
            session = Session(
                secrets.token_hex(16),
                given.threshold,
                neighbors,
                tuple(rings),
                tuple(size + NUM_EXTRA for size in sizes),
            )
            costs = Costs()
            run_session(session, given.dropouts, costs)
            print(describe(kind, neighbors, session, costs))


def describe(kind: str, neighbors: int | None, session: Session, costs: Costs) -> str:
    plain = {
        number: FLOAT_BYTES * sum(session.sizes[r] - NUM_EXTRA for r in session.list_rings(number))
        for number in session.clients
    }
    sent = [number for number in session.clients if costs.up[number] > plain[number]]
    tiers = sorted({plain[number] for number in sent}, reverse=True)
    overheads = []
    for size in tiers:
        up = [costs.up[number] for number in sent if plain[number] == size]
        overheads.append(f"{size:,} +{statistics.fmean(up) / size - 1:.2%}")
    steps = ", ".join(
        f"{step} {statistics.fmean(v) if step.startswith('client') else sum(v):.3f}"
        for step, v in costs.seconds.items()
    )
    words = "all" if neighbors is None else str(neighbors)
    return (
        f"{kind:5}  {words:>9}  {costs.total('client'):8.3f}  {costs.total('server'):8.3f}  "
        f"{time_plain(session):7.3f}  {'; '.join(overheads)}\n    {steps}\n"
        f"    down, beside the model: {statistics.fmean(costs.down.values()):,.0f} bytes a client"
    )


if __name__ == "__main__":
    main()
