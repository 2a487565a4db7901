"""Engine overhead: a round of the local engine against a bare PyTorch loop on the same work.

    python benchmarks/engine.py [--rounds 5] [--widths 1,0.25,0.125,0.0625] [--save]

Each client trains the same subnet on the same number of batches in both. Printed are ratios within
this one run: one worker against the loop with one thread (at most 1.10 is wanted), and two workers
against the loop with PyTorch's own number of threads (at least 1.6 times its throughput, for the
small levels). Medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import closing

import torch
import torch.nn.functional as F
from record import Recorder, Table

import fedquilt as fq
from fedquilt.engines.local import LocalEngine
from fedquilt.federation.state import Setup
from fedquilt.models.heterofl import CNN
from fedquilt.structure.cut import load_tensors
from fedquilt.structure.tensors import named_tensors

CLIENTS, EXAMPLES, BATCH = 10, 300, 10
SETTINGS = fq.LocalTraining(lr=0.01, epochs=1, batch_size=BATCH, max_grad_norm=None)


def work() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = CLIENTS * EXAMPLES
    images = torch.randn(count, 1, 28, 28, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


def bare_round(model: CNN, structure: fq.Structure, width: float) -> Callable[[], object]:
    """The floor: one module, plain SGD, a running sum; nothing else."""
    x, y = work()
    subnet = structure.subnet(width)
    params = {n: t.detach().clone() for n, t in named_tensors(model).items()}
    small = fq.build_module(model, structure, subnet).train()
    start = fq.copy_subnet_tensors(params, structure, subnet)

    def round() -> object:
        total = {n: torch.zeros_like(t) for n, t in start.items()}
        for client in range(CLIENTS):
            load_tensors(small, start)
            sgd = torch.optim.SGD(
                small.parameters(),
                SETTINGS.lr,
                SETTINGS.momentum,
                weight_decay=SETTINGS.weight_decay,
            )
            for rows in torch.arange(client * EXAMPLES, (client + 1) * EXAMPLES).split(BATCH):
                sgd.zero_grad()
                F.cross_entropy(small(x[rows]), y[rows]).backward()
                sgd.step()
            for name, tensor in named_tensors(small).items():
                total[name] += tensor.detach()
        return total

    return round


def our_round(
    model: CNN, structure: fq.Structure, width: float, engine: LocalEngine, setup: Setup
) -> Callable[[], object]:
    method = fq.FedAvg(SETTINGS, fraction=1.0, width=width)
    state = method.start(setup)

    def round() -> object:
        tasks = method.plan(setup, state, setup.clients)
        updates = (u for u in engine.run(tasks) if isinstance(u, fq.Update))
        return method.merge(setup, state, updates)

    return round


def seconds(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, measured in turn so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            threads = torch.get_num_threads()
            torch.set_num_threads(1 if name.endswith("1") else threads)
            started = time.perf_counter()
            function()
            if number:
                times[name].append(time.perf_counter() - started)
            torch.set_num_threads(threads)
    return {name: statistics.median(some) for name, some in times.items()}


def measure(width: float, rounds: int) -> tuple[str, ...]:
    """A row of the table."""
    torch.manual_seed(0)
    model = CNN()
    example = torch.zeros(1, 1, 28, 28)
    structure = fq.trace_structure(model, example)
    people = fq.make_clients(work(), count=CLIENTS)
    setup = Setup(model, structure, example, people.clients, 1, 0)

    def engine(workers: int) -> LocalEngine:
        return LocalEngine(model, structure, people.data, workers=workers)

    with closing(engine(1)) as one, closing(engine(2)) as two:
        found = seconds(
            {
                "bare 1": bare_round(model, structure, width),
                "ours 1": our_round(model, structure, width, one, setup),
                "bare": bare_round(model, structure, width),
                "ours 2 workers": our_round(model, structure, width, two, setup),
            },
            rounds,
        )
    return (
        f"{width:g}",
        f"{found['bare 1']:.3f}",
        f"{found['ours 1'] / found['bare 1']:.2f}",
        f"{found['bare']:.3f}",
        f"{found['bare'] / found['ours 2 workers']:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widths", default="1,0.25,0.125,0.0625")
    parser.add_argument("--save", action="store_true", help="store the figures")
    options = parser.parse_args()
    recorder = Recorder("engine", options.save)
    cells = [measure(float(width), options.rounds) for width in options.widths.split(",")]
    header = (
        "width",
        "bare loop, one thread, s",
        "one worker / that",
        "bare loop, default threads, s",
        "that / two workers",
    )
    notes = (
        f"HeteroFL's CNN, {CLIENTS} clients with {EXAMPLES} images each, batches of {BATCH}, "
        f"medians of {options.rounds} rounds in turn. Targets: at most 1.10, and 1.6 for small "
        "widths.",
    )
    recorder.finish(Table("The engine against a bare PyTorch loop", header, cells, notes))


if __name__ == "__main__":
    main()
