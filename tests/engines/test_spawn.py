"""Workers that are started anew, as on macOS and Windows: they get all that a forked one has."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedquilt.data import to_examples
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.processes import ProcessInput, encode_message
from fedquilt.errors import ConfigError
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.learning.task import CLASSIFICATION, make_task
from fedquilt.structure.create import trace_structure
from fedquilt.user_code import load_function

SCRIPT = '''
import os
from dataclasses import dataclass
import torch
from torch import nn
from fedquilt.federation.client import ClientResult, Update

SLOPE = 0.25
if os.getpid() != {pid}:
    raise RuntimeError("a worker has run the script")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.bend = lambda x: x.relu() + SLOPE * x

    def forward(self, x):
        return self.last(self.bend(self.first(x)))

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, number):
        return torch.full((3,), float(number)), number % 2

@dataclass(frozen=True)
class Step:
    """Sends the loss of the subnet, and its gradient as tensors."""

    def run(self, task, context):
        module = context.module(task.subnets[0], task.params)
        x, y = context.examples("train", task.client).batch(torch.arange(5))
        loss = context.task.loss.of_output(module(x), y)
        loss.backward()
        tensors = {{n: p.grad.clone() for n, p in module.named_parameters()}}
        metrics = {{"loss": loss.item(), "pid": os.getpid(), "dtype": torch.ones(1).element_size()}}
        return ClientResult(Update(task.client, task.subnets, (tensors,), 1.0, metrics))
'''


@pytest.fixture
def spawn() -> Iterator[None]:
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(None, force=True)


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program without a guard, whose classes are in ``__main__``."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(pid=os.getpid()))
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(path.read_text(), str(path), "exec"), vars(main))
    return main


def hash_tensors(tensors: Any) -> list[object]:
    return [(name, tensor.numpy().tobytes()) for name, tensor in sorted(tensors.items())]


def list_bits(results: list[Update | Failure]) -> list[object]:
    assert all(isinstance(result, Update) for result in results), results
    return [
        (u.client, u.metrics["loss"], u.metrics["dtype"], hash_tensors(u.params[0]))
        for u in results
    ]


def test_a_script_without_a_guard_gives_the_bits_of_one_process(script, spawn, double, places):
    """Its classes, a lambda, a closure and its settings of PyTorch reach workers by value."""
    torch.manual_seed(0)
    net, scale = script.Net(), torch.tensor(3.0)
    example, params = torch.zeros(2, 3), {n: t.clone() for n, t in net.state_dict().items()}
    structure = trace_structure(net, example)
    task = make_task(lambda output, target: scale * nn.functional.cross_entropy(output, target))
    data = {"train": {client: to_examples(script.Numbers()) for client in range(3)}}
    tasks = [
        Task(client, (structure.subnet(width),), params, script.Step(), client)
        for client, width in enumerate([1.0, 0.5, 0.5])
    ]

    def run(workers: int) -> list[Update | Failure]:
        with LocalEngine(net, structure, data, workers=workers, task=task) as engine:
            return list(engine.run(tasks))

    here, there = run(0), run(1)
    assert list_bits(here) == list_bits(there)
    assert os.getpid() not in {int(u.metrics["pid"]) for u in there}
    assert not any(any(place.iterdir()) for place in places)


class FailsElsewhere:
    """Cannot be loaded by another process."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __reduce__(self):
        return _load_here, (self.pid,)


def _load_here(pid):
    if pid != os.getpid():
        raise ImportError("a module is not there")


def test_what_a_worker_cannot_load_is_said_in_a_sentence(spawn, engine, structure):
    given = LocalEngine(nn.Linear(3, 4), structure, {"train": FailsElsewhere()}, workers=1)
    with given, pytest.raises(ConfigError, match=r"a module is not there.*workers = 0"):
        list(given.run([Task(0, (), {}, None, 0)]))


def test_what_cannot_be_copied_is_said_before_a_process_starts(spawn, structure, tmp_path, places):
    net = nn.Linear(3, 4)
    net.log = (tmp_path / "log").open("w")
    with net.log, pytest.raises(ConfigError, match=r"the model and the data.*workers = 0"):
        LocalEngine(net, structure, {}, workers=1)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_recipe_that_cannot_be_sent_is_said_in_a_sentence(method, tmp_path):
    said = pytest.raises(ConfigError, match="plain values, or use workers = 0")
    with (tmp_path / "log").open("w") as log, said:
        encode_message(lambda: log, method)


def test_a_file_that_was_loaded_by_its_path_is_loaded_from_there(tmp_path, monkeypatch):
    """Its module cannot be imported by name, so the file is run again by the other process."""
    path = tmp_path / "apart.py"
    path.write_text("class Net:\n    kind = 'apart'\n")
    make = load_function(f"{path}:Net", "model")
    stored = ProcessInput([make(), make()], tmp_path / "input", "a net").for_method("spawn")
    sent = pickle.loads(pickle.dumps(stored))
    for name in sent.user_files:
        monkeypatch.delitem(sys.modules, name)
    first, second = sent.load()
    assert first.kind == "apart"
    assert type(first) is type(second)
    assert type(first) is not make


def test_tensors_that_share_memory_share_it_in_a_new_process(tmp_path):
    whole = torch.arange(6.0)
    given = ProcessInput([whole[:3], whole[3:], CLASSIFICATION], tmp_path / "input", "tensors")
    one, other, task = given.for_method("spawn").load()
    assert torch.equal(torch.cat([one, other]), whole)
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    one.add_(1)  # which is copied: the file is as it was
    assert torch.equal(given.for_method("spawn").load()[0], whole[:3])
    assert task is CLASSIFICATION
