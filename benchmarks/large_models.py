"""Large models: seconds of trace, start, merge, checkpoint and customize, and memory in models.

    python benchmarks/large_models.py [--size 10 --size 100 --size 400] [--save]

PyTorch's own transformer encoder, with a given number of million parameters, is trained for three
rounds by HeteroFL, in a fresh process. Two workers train clients that hold half and a quarter of
the channels on one short text each, so nearly all time is that of handling the model.

Memory is the largest resident set of the server in each phase, and of a worker, over what the
process held before the model was made, in models. Everything counts: mapped files, and pages that
processes share. Beside it there is one copy in shared memory, which all workers read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from trace import Encoder
from typing import Any

import torch
from record import Recorder, Table
from resident import field, from_here, largest

import fedquilt as fq
from fedquilt.runs.events import CheckpointSaved, RoundDone, RoundStarted

SHAPES = {10: (256, 8, 14_000, 8), 100: (768, 12, 20_000, 12), 400: (1280, 19, 20_000, 20)}
WORDS, WORDS_EACH, ROUNDS = 50, 8, 3
PHASES = ("trace", "start", "round", "checkpoint", "customize")


def make_net(size: int) -> torch.nn.Module:
    dim, layers, words, heads = SHAPES[size]
    return Encoder(dim, layers, words, heads)


def list_workers() -> list[int]:
    """The processes that this one has started."""
    children = Path(f"/proc/self/task/{field_number('Pid')}/children").read_text()
    return [int(number) for number in children.split()]


def field_number(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"the system does not tell {name}")


class Stopwatch:
    """Seconds and largest resident sets of phases; an event of the run ends each of them."""

    def __init__(self, base: int, model: int) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, float] = {}
        self.worker = self.own_worker = 0.0
        self._base, self._model = base, model
        self.begin()

    def begin(self) -> None:
        from_here()
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def end(self, phase: str, *, processor: bool = False) -> None:
        spent = time.process_time() - self._processor if processor else None
        self.seconds[phase] = time.perf_counter() - self._wall if spent is None else spent
        peak = (largest() - self._base) / self._model
        self.peaks[phase] = max(self.peaks.get(phase, 0.0), peak)
        self.begin()

    def __call__(self, event: object) -> None:
        if isinstance(event, RoundStarted):
            self.end("start") if "start" not in self.seconds else self.begin()
        elif isinstance(event, RoundDone):
            assert not event.failures, event.failures[0]
            self.end("round", processor=True)
            for worker in list_workers():
                held = (field("VmHWM", worker) - self._base) / self._model
                self.worker = max(self.worker, held)
                own = (field("RssAnon", worker) - self._own_base()) / self._model
                self.own_worker = max(self.own_worker, own)
        elif isinstance(event, CheckpointSaved):
            self.end("checkpoint")

    def _own_base(self) -> float:
        return self._base_anonymous

    _base_anonymous = 0.0


def measure(size: int) -> dict[str, Any]:
    """One model, in this process."""
    torch.manual_seed(0)
    texts = torch.arange(4 * WORDS_EACH).view(4, WORDS_EACH) % WORDS
    people = fq.make_clients((texts, torch.arange(4)), count=4, budgets=(0.5, 0.25))
    tiny = Encoder(24, 1, WORDS, 12)
    settings = fq.LocalTraining(epochs=1, batch_size=1, lr=0.01)
    method = fq.HeteroFL(settings, fraction=1.0, own_rows=False)
    fq.train(tiny, texts[:1], method, people, 1, workers=0)  # kernels are loaded
    base, own = from_here(), field("RssAnon")
    net = make_net(size).eval()
    model = sum(t.nbytes for t in [*net.parameters(), *net.buffers()])
    watch = Stopwatch(base, model)
    watch._base_anonymous = own
    structure = fq.trace_structure(net, texts[:1])
    watch.end("trace")
    given = [net]
    del net
    cadence = fq.Cadence(checkpoint_every=1, evaluate_every=0)
    with tempfile.TemporaryDirectory() as folder:
        run = fq.train(
            given.pop(),
            texts[:1],
            method,
            people,
            ROUNDS,
            workers=2,
            out=Path(folder) / "run",
            structure=structure,
            cadence=cadence,
            callbacks=[watch],
        )
        watch.begin()
        run.customize(width=0.25)
        watch.end("customize")
        half = run.customize(width=0.5)
    return {
        "parameters": model / 4e6,
        "half": sum(p.numel() for p in half.parameters()) * 4 / model,
        "seconds": watch.seconds,
        "peaks": watch.peaks,
        "worker": watch.worker,
        "own": watch.own_worker,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", action="append", type=int, choices=SHAPES, help="default: all")
    parser.add_argument("--save", action="store_true", help="store the figures")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.alone)))
        return
    recorder = Recorder("large-models", options.save)
    columns = []
    for size in options.size or SHAPES:
        command = [sys.executable, __file__, "--alone", str(size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        columns.append(json.loads(done.stdout.splitlines()[-1]))
    header = ("", *(f"{got['parameters']:.0f} M" for got in columns))
    seconds = [(phase, *(f"{got['seconds'][phase]:.2f}" for got in columns)) for phase in PHASES]
    peaks = [(phase, *(f"{got['peaks'][phase]:.2f}" for got in columns)) for phase in PHASES]
    peaks.append(("worker", *(f"{got['worker']:.2f}" for got in columns)))
    peaks.append(("worker, its own pages", *(f"{got['own']:.2f}" for got in columns)))
    peaks.append(("weights of the larger subnet", *(f"{got['half']:.2f}" for got in columns)))
    most = max(max(got["peaks"].values()) for got in columns[-2:])
    work = (
        "PyTorch's encoder, HeteroFL, 3 rounds of 4 clients with half or a quarter of the "
        "channels, 2 workers. A round's seconds are the server's processor time, the others are "
        "by the clock.",
    )
    memory = (
        "The largest resident set in each phase, in models, over the process before the model was "
        "made. Mapped files and pages that processes share count. Up to 10 M parameters fixed "
        "costs hide the model.",
        "Target: at most two models in the server. The most of the two largest models is "
        f"{most:.2f}.",
        "Target: a worker holds its subnet, not the whole. It has the subnet's values, gradients, "
        "momentum and reply, and maps the file of the model, of which it reads its part.",
    )
    recorder.finish(
        Table("Large models: seconds", header, seconds, work),
        Table("Large models: memory in models", header, peaks, memory),
    )


if __name__ == "__main__":
    main()
