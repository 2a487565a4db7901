"""Models in mapped files compute what they did in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedquilt.structure import memory
from fedquilt.structure.create import trace_structure
from fedquilt.structure.memory import OffloadedModels, is_large, release_freed_memory


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(memory, "MIN_LARGE_BYTES", 0)
    monkeypatch.setattr(memory, "MIN_OFFLOADED_BYTES", 0)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 5), nn.BatchNorm1d(3), nn.Linear(5, 7, bias=False))
    net[2].weight = net[0].weight
    net.register_buffer("flags", torch.tensor([True, False, True]))
    return net


def addresses(net: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in net.state_dict(keep_vars=True).items()}


def test_an_offloaded_model_has_the_same_values_and_ties(everything_is_large, net):
    before, where = copy.deepcopy(net.state_dict()), addresses(net)
    with OffloadedModels(net, net) as offloaded:
        assert all(addresses(net)[name] != where[name] for name in where)
        first = addresses(net)
        offloaded.release()
        assert addresses(net)["0.weight"] != first["0.weight"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net[2].weight is net[0].weight
    assert isinstance(net[0].weight, nn.Parameter)


def test_an_offloaded_model_can_be_trained_and_copied(everything_is_large, net):
    other = copy.deepcopy(net)
    with OffloadedModels(net):
        for some in (net, other):
            some(torch.arange(3)[None]).square().sum().backward()
            with torch.no_grad():
                for weight in some.parameters():
                    weight -= 0.1 * weight.grad
        twin = copy.deepcopy(net)
    for some in (net, twin):
        values = some.state_dict()
        assert all(torch.equal(t, values[name]) for name, t in other.state_dict().items())


def test_small_models_and_a_full_disk_leave_tensors_where_they_are(net, monkeypatch):
    where = addresses(net)
    with OffloadedModels(net):
        assert addresses(net) == where
    monkeypatch.setattr(memory, "MIN_LARGE_BYTES", 0)
    monkeypatch.setattr(memory, "MIN_OFFLOADED_BYTES", 0)

    def refuse() -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(memory.tempfile, "TemporaryFile", refuse)
    with OffloadedModels(net) as offloaded:
        offloaded.release()
        assert addresses(net) == where


def test_freed_memory_is_given_back_after_a_large_trace_and_not_after_a_small_one(monkeypatch):
    trims: list[int] = []
    monkeypatch.setattr(memory, "_find_trim", lambda: trims.append)
    small = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert not is_large(small)
    trace_structure(small, torch.zeros(1, 4))
    assert trims == []
    monkeypatch.setattr(memory, "MIN_LARGE_BYTES", 0)
    trace_structure(small, torch.zeros(1, 4))
    assert set(trims) == {0}


def test_a_c_library_without_trim_is_no_problem(monkeypatch):
    class NoLibrary:
        def __init__(self, name: object) -> None:
            raise OSError("no such library")

    memory._find_trim.cache_clear()
    monkeypatch.setattr(memory.ctypes, "CDLL", NoLibrary)
    release_freed_memory()
    assert memory._find_trim() is None
    memory._find_trim.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_zeros_in_memory_of_their_own_are_like_others(dtype, monkeypatch):
    monkeypatch.setattr(memory, "MIN_OWN_BYTES", 0)
    for shape in ((3, 5), (), (0, 2)):
        like = (
            torch.ones(shape, dtype=dtype).t() if len(shape) == 2 else torch.ones((), dtype=dtype)
        )
        zeros = memory.make_zeros(like)
        assert torch.equal(zeros, torch.zeros_like(like))
        assert zeros.is_contiguous()
        assert torch.equal(zeros.copy_(like), like)
