"""What a run holds of a large model, and that it computes the same with it in a mapped file."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.federation.flat_tensors import MappedTensors
from fedquilt.runs.events import RoundStarted
from fedquilt.structure import memory

WHOLE = (13, 11)  # no subnet has a tensor of this shape


def train(rounds: int, *, workers: int = 0, callbacks=()) -> fq.Run:
    torch.manual_seed(0)
    data = torch.rand(12, 11), torch.arange(12) % 3
    clients = fq.make_clients(data, count=3, budgets=(0.5, 0.25))
    net = nn.Sequential(nn.Linear(11, 13), nn.ReLU(), nn.Linear(13, 3))
    method = fq.HeteroFL(fq.LocalTraining(epochs=1, batch_size=4), fraction=1.0)
    return fq.train(net, data[0][:1], method, clients, rounds, workers=workers, callbacks=callbacks)


def count_whole_tensors() -> int:
    gc.collect()
    alive = (t for t in gc.get_objects() if isinstance(t, torch.Tensor))
    return len({t.data_ptr() for t in alive if tuple(t.shape) == WHOLE})


def test_no_state_but_the_last_is_kept():
    counts = []

    def count(event: object) -> None:
        if isinstance(event, RoundStarted):
            counts.append(count_whole_tensors())

    train(4, callbacks=[count])
    assert counts == counts[:1] * 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_model_in_a_mapped_file_is_trained_to_the_same_bits(workers, monkeypatch):
    expected = train(2, workers=workers).state.params
    monkeypatch.setattr(memory, "MIN_LARGE_BYTES", 0)
    monkeypatch.setattr(memory, "MIN_OFFLOADED_BYTES", 0)
    monkeypatch.setattr(memory, "MIN_OWN_BYTES", 0)
    monkeypatch.setattr("fedquilt.federation.flat_tensors.MIN_MAPPED_BYTES", 0)
    monkeypatch.setattr("fedquilt.federation.aggregation.mean.CACHE_BYTES", 64)
    found = train(2, workers=workers).state.params
    assert isinstance(found, MappedTensors)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
