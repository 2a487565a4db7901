"""Laws of devices, for every method. They run where an accelerator is, see tests/devices."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedquilt.engines.client_work import run_task
from fedquilt.engines.local import LocalEngine
from fedquilt.runs.events import RoundDone
from fedquilt.runs.policies import Cadence
from fedquilt.training.context import ClientContext

# not the first device, which code may take by accident
DEVICE = torch.device(os.environ.get("FEDQUILT_DEVICE", "sim:1"))
IS_SIMULATED = DEVICE.type == "sim"
CLOSE = {"rtol": 1e-5, "atol": 1e-5} if IS_SIMULATED else {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(autouse=True)
def without_float64():
    """As on Apple's GPUs, so that nothing needs it."""
    if IS_SIMULATED:
        torch.ops.sim.set_double(False)
    yield
    if IS_SIMULATED:
        torch.ops.sim.set_double(True)


def plain(case):
    """The case with images as they come: only CPUs turn their memory around, which rounds apart."""
    structure = replace(case.setup.structure, channels_last=False)
    return replace(case, setup=replace(case.setup, rounds=2, structure=structure))


def run_on(case, device):
    setup, data = case.setup, case.people.data
    with LocalEngine(setup.model, setup.structure, data, workers=0, devices=[device]) as engine:
        state, scores, events = case.run(engine, cadence=Cadence(evaluate_every=0))
    rounds = [event for event in events if isinstance(event, RoundDone)]
    assert not any(event.failures for event in rounds), rounds
    return state, scores, rounds


def test_a_run_on_another_device_is_the_run_on_the_cpu(case):
    (state, scores, rounds), (other, others, again) = (
        run_on(plain(case), device) for device in (torch.device("cpu"), DEVICE)
    )
    assert state.chosen_subnets == other.chosen_subnets
    assert all(tensor.device.type == "cpu" for tensor in other.params.values())
    for name, tensor in state.params.items():
        torch.testing.assert_close(other.params[name], tensor, **CLOSE, msg=lambda m, n=name: n + m)
    assert [(s.width, s.accuracy) for s in scores] == [(s.width, s.accuracy) for s in others]
    for one, two in zip(rounds, again, strict=True):
        assert one.loss is None is two.loss or one.loss == pytest.approx(two.loss, rel=1e-4)


class HostWork(TorchDispatchMode):
    """Counts kernels that compute on float tensors of the host with more than one cell."""

    DRAWS = ("rand", "uniform_", "randint", "randperm")  # by generators of the host, on purpose
    COPIES = ("_to_copy", "copy_", "_pin_memory", "is_pinned", "detach", "empty", "set_")

    def __init__(self) -> None:
        super().__init__()
        self.kernels = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        on_host = [
            t
            for t in tensors
            if t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() > 1
        ]
        if on_host and not name.startswith(self.DRAWS + self.COPIES) and not func.is_view:
            self.kernels[name] += 1
        return result


def test_no_tensor_of_a_clients_work_stays_on_the_host(case, request):
    case = plain(case)
    start, setup = case.start(), case.setup
    context = ClientContext(setup.model, setup.structure, case.people.data, DEVICE)
    for state in (start, *case.closings(start)):
        task = case.tasks(state)[0]
        run_task(task, context, None)  # now its data are on the device
        with HostWork() as work:
            run_task(task, context, None)
        if "stc" in request.node.callspec.id and state.phase == "train":
            # codes are made on the host, and what they do not say is kept there
            code, check = {"clone", "index", "index_put_", "sub_"}, {"abs", "eq", "ne"}
            assert work.kernels.keys() <= code | check
        else:
            assert not work.kernels
