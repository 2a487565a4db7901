"""A tiny federation for whole runs, and a process that can be killed again and again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq

SCRIPT = '''
"""Forks a process per line of input, so that only the first has to import and trace."""

import os, resource, signal, sys, traceback
import torch
from torch import nn
import fedquilt as fq
from fedquilt.runs.events import RoundDone

torch.manual_seed(1)
net = nn.Sequential(nn.Conv2d(1, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(),
                    nn.Linear(216, 4))
structure = fq.trace_structure(net, torch.zeros(2, 1, 5, 5))
y = torch.arange(60) % 4
people = fq.make_clients((torch.randn(60, 1, 5, 5) + y.view(-1, 1, 1, 1), y), count=6,
                    budgets=[1, 0.5], test=(torch.randn(12, 1, 5, 5), torch.arange(12) % 4))
steps = fq.LocalTraining(lr=0.05, epochs=1, batch_size=5)
METHODS = {
    "heterofl": fq.HeteroFL(steps, fraction=0.5),
    "standalone": fq.standalone(steps, fraction=0.5),
    "lg-fedavg": fq.lg_fedavg(steps, fraction=0.5, shared=("4.*",)),
    "stc": fq.STC(steps, fraction=0.5),
    "splitmix": fq.SplitMix(steps, fraction=0.5, base=0.5),
}

def train(name, out, resume, rounds, limit):
    def watch(event):
        if int(limit) and isinstance(event, RoundDone) and event.round == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    fq.train(net, torch.zeros(2, 1, 5, 5), METHODS[name], people, int(rounds), structure=structure,
             workers=0 if int(limit) else 2, out=out, resume=resume == "resume", seed=5,
             cadence=fq.Cadence(evaluate_every=3, checkpoint_every=2), callbacks=[watch])

print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            train(*line.split())
        except fq.FedquiltError as problem:
            print("refused:", problem, file=sys.stderr, flush=True)
            os._exit(3)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(4)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''


class Trainer:
    """Runs of training, one process each, that can be killed."""

    def __init__(self, folder: Path) -> None:
        script = folder / "train.py"
        script.write_text(SCRIPT)
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", str(script), str(self.errors)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        assert self._line() == "ready", self.errors.read_text()

    def _line(self) -> str:
        return self._process.stdout.readline().strip()

    def start(
        self, method: str, out: Path, *, resume: bool = False, rounds: int = 8, limit: int = 0
    ) -> int:
        """The process's id."""
        word = "resume" if resume else "new"
        self._process.stdin.write(f"{method} {out} {word} {rounds} {limit}\n")
        self._process.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        """Its exit code."""
        return int(self._line())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    found = Trainer(tmp_path_factory.mktemp("trainer"))
    yield found
    found.close()


@pytest.fixture
def tree() -> Callable[[Path], dict[str, bytes]]:
    """All files below a folder, but for the times that things took."""

    def read(folder: Path) -> dict[str, bytes]:
        return {
            str(p.relative_to(folder)): p.read_bytes()
            for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name not in ("timing.jsonl", "status.json")
        }

    return read


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.deeper = nn.Linear(8, 6)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.hidden(x)))
        return self.classifier(torch.relu(self.deeper(x)))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Nets this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def traced() -> tuple[nn.Module, fq.Structure]:
    torch.manual_seed(0)
    net = Net()
    return net, fq.trace_structure(net, torch.zeros(2, 5))


@pytest.fixture
def people() -> fq.Population:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(32) % 3
    x = torch.randn(32, 5, generator=generator) + y.view(-1, 1)
    return fq.make_clients((x, y), test=(x[:10], y[:10]), count=4, budgets=[1, 0.5])


@pytest.fixture
def train(traced: Any, people: fq.Population) -> Callable[..., fq.Run]:
    """A quick run in this process."""
    net, structure = traced

    def run(out: Path | None = None, **changes: Any) -> fq.Run:
        settings: dict[str, Any] = {
            "method": fq.HeteroFL(fq.LocalTraining(lr=0.05, epochs=1, batch_size=4), fraction=0.5),
            "clients": people,
            "rounds": 5,
            "seed": 2,
            "workers": 0,
            "structure": structure,
            "cadence": fq.Cadence(evaluate_every=2, checkpoint_every=2),
        }
        model = changes.pop("model", net)
        return fq.train(model, torch.zeros(2, 5), out=out, **{**settings, **changes})

    return run


@pytest.fixture
def interrupting() -> Callable[..., Callable[[Any], None]]:
    """Watches that raise when an event of some kind comes for the n-th time."""

    def make(kind: type, count: int, problem: type[BaseException] = KeyboardInterrupt) -> Any:
        left = count

        def watch(event: Any) -> None:
            nonlocal left
            left -= isinstance(event, kind)
            if not left:
                raise problem

        return watch

    return make


@pytest.fixture
def kill() -> Callable[[int], None]:
    def now(pid: int, sign: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)

    return now
