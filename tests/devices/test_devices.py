"""Devices on a machine that has only a CPU: what is not there is said at the door."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.devices import CPU, find_devices, reproducible_kernels
from fedquilt.errors import ConfigError
from fedquilt.structure.tensors import copy_to_device, map_tensors, named_tensors

ABSENT = ["cuda:63", "xpu:63", "meta:3", "sim", "gpu", "", "cpu,cuda:63"]


@pytest.mark.parametrize("device", ABSENT)
def test_a_device_that_is_not_there_is_one_sentence_and_nothing_is_written(device, tmp_path):
    data = (torch.rand(12, 4), torch.arange(12) % 3)
    clients, net = fq.make_clients(data, count=2), nn.Linear(4, 3)
    with pytest.raises(ConfigError) as problem:
        fq.train(net, data[0][:1], "fedavg", clients, 1, device=device, out=tmp_path / "run")
    assert "\n" not in str(problem.value)
    assert not list(tmp_path.iterdir())


def test_the_command_line_refuses_a_device_that_is_not_there(tmp_path, capsys):
    out = tmp_path / "run"
    for given in (["--device", "cuda:63"], ["--set", "run.device='cuda:63'"]):
        with pytest.raises(SystemExit) as ending:
            main(["train", "--model", "mlp", "--clients", "2", "--out", str(out), *given])
        printed = capsys.readouterr()
        assert ending.value.code == 2
        assert "device 'cuda:63' is not there" in printed.err
        assert printed.err.count("\n") == 1
        assert not out.exists()


def test_an_engine_of_ones_own_takes_no_device():
    data = (torch.rand(12, 4), torch.arange(12) % 3)
    clients = fq.make_clients(data, count=2)
    with pytest.raises(ConfigError, match="an engine of your own chooses its devices"):
        fq.train(
            nn.Linear(4, 3),
            data[0][:1],
            "fedavg",
            clients,
            1,
            device="auto",
            engine=lambda *_: None,
        )


def test_without_an_accelerator_auto_is_the_cpu():
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert find_devices("auto") == find_devices("cpu") == (CPU,)


def test_kernels_are_made_reproducible_and_put_back():
    for is_strict in (False, True):
        torch.use_deterministic_algorithms(is_strict)
        before = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
        with reproducible_kernels(torch.device("cuda", 0)):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled() is not is_strict
            assert not torch.backends.cudnn.allow_tf32
        assert torch.are_deterministic_algorithms_enabled() is is_strict
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32) == before
    torch.use_deterministic_algorithms(False)


def test_tensors_are_replaced_wherever_a_batch_has_them():
    batch = ({"image": torch.ones(2), "names": ["a", "b"]}, [torch.ones(1), (3, torch.ones(()))])
    moved = map_tensors(lambda t: t.to("meta"), batch)
    assert moved[0]["names"] == ["a", "b"]
    assert moved[1][1][0] == 3
    for tensor in (moved[0]["image"], moved[1][0], moved[1][1][1]):
        assert tensor.device.type == "meta"
    point = torch.return_types.max((torch.ones(2), torch.zeros(2)))
    assert map_tensors(torch.neg, tuple(point))[0].tolist() == [-1, -1]


def test_tied_tensors_stay_tied_on_a_device():
    net = nn.ModuleDict({"embed": nn.Embedding(5, 4), "out": nn.Linear(4, 5, bias=False)})
    net["out"].weight = net["embed"].weight
    net["embed"].weight.requires_grad_(False)
    there = copy_to_device(net, torch.device("meta"))
    assert there["out"].weight is there["embed"].weight
    assert not there["out"].weight.requires_grad
    assert {t.device.type for t in named_tensors(there).values()} == {"meta"}
    assert {t.device.type for t in named_tensors(net).values()} == {"cpu"}


def test_memory_counts_what_an_optimizer_keeps_of_each_weight():
    net, example = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), torch.zeros(1, 4)
    structure = fq.trace_structure(net, example)
    whole = structure.subnet()
    one, two = (
        fq.compute_cost(net, structure, whole, example, optimizer_tensors=count) for count in (1, 2)
    )
    assert two.memory - one.memory == one.bytes == 4 * one.params
    budget = fq.Budget(memory=one.memory)
    assert fq.fit_budget(net, structure, budget, example)[0] == 1.0
    assert fq.fit_budget(net, structure, budget, example, optimizer_tensors=2)[0] < 1.0
