"""Checks of devices that need an accelerator; test_simulated.py runs them where one is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.data.pipeline import make_pipeline
from fedquilt.data.transformed import transform_examples
from fedquilt.devices import CPU, find_devices, fork_generators, seed_generators
from fedquilt.engines.client_work import run_task
from fedquilt.engines.local import LocalEngine
from fedquilt.engines.processes import choose_start_method
from fedquilt.federation.client import Failure, Task, Update
from fedquilt.models.heterofl import CNN
from fedquilt.runs.from_config import plan_run
from fedquilt.runs.plan import start_run
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import load_source, resolve_config
from fedquilt.structure.cut import build_module
from fedquilt.training.context import ClientContext
from fedquilt.training.device_data import ResidentData
from fedquilt.training.dpsgd import DPSGD
from fedquilt.training.poisoning import Poisoned
from fedquilt.training.private import PrivateReply

SIM, OTHER = torch.device("sim", 0), torch.device("sim", 1)
SETTINGS = fq.LocalTraining(lr=0.05, epochs=2, batch_size=4)


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    yield
    for device in (SIM, OTHER):
        torch.ops.sim.set_limit(device.index, 0)


def make_net(dropout: float | None, *, norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Identity() if dropout is None else nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
    )


def make_data(count: int = 12, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 1, 6, 6), generator=generator, dtype=torch.uint8)
    return to_examples((images, torch.arange(count) % 4))


class Federation:
    """A net, four clients, and a task for each of them."""

    def __init__(self, *, dropout: float | None = 0.0, norm: bool = True) -> None:
        self.net = make_net(dropout, norm=norm)
        structure = fq.trace_structure(self.net, torch.zeros(2, 1, 6, 6))
        self.structure = replace(structure, channels_last=False)
        self.data = {"train": {client: make_data(seed=client) for client in range(4)}}
        self.params = dict(self.net.state_dict())

    def tasks(self, widths=(1.0, 0.5)) -> list[Task]:
        recipe = fq.LocalSGD(SETTINGS, lr=0.05)
        subnets = [(self.structure.subnet(width),) for width in widths]
        return [Task(c, subnets[c % len(widths)], self.params, recipe, seed=c) for c in range(4)]

    def engine(self, workers: int = 0, devices=(SIM,), **more) -> LocalEngine:
        return LocalEngine(
            self.net, self.structure, self.data, workers=workers, devices=devices, **more
        )

    def run(self, workers=0, devices=(SIM,), widths=(1.0, 0.5)) -> list[Update | Failure]:
        with self.engine(workers, devices) as engine:
            return list(engine.run(self.tasks(widths)))


def bits(updates: list[Update | Failure]) -> list[object]:
    assert all(isinstance(update, Update) for update in updates), updates
    return [
        {name: t.contiguous().numpy().tobytes() for name, t in part.items()}
        for update in updates
        for part in update.params
    ]


def memory(device: torch.device = SIM) -> tuple[int, int]:
    """The bytes in use, without what is garbage, and the most of this process."""
    gc.collect()
    used, peak, _ = torch.ops.sim.memory(device.index)
    return used, peak


# The simulated accelerator refuses what a real one refuses.


def test_tensors_of_two_devices_do_not_mix():
    x = torch.ones(2, 3, device=SIM)
    for other in (torch.ones(2, 3), torch.ones(2, 3, device=OTHER)):
        for mix in (torch.add, torch.mul, lambda a, b: torch.cat([a, b]), lambda a, b: a @ b.t()):
            with pytest.raises(RuntimeError, match="same device"):
                mix(x, other)
    with pytest.raises(RuntimeError, match="same device"):
        x[torch.tensor([0, 1])]
    assert torch.equal((x + torch.tensor(1.0)).cpu(), torch.full((2, 3), 2.0))  # a number is none


def test_a_generator_of_the_host_draws_nothing_on_a_device():
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=SIM, generator=torch.Generator())


def test_more_memory_than_there_is_raises():
    torch.ops.sim.set_limit(0, memory()[0] + 1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1000, device=SIM)
    torch.zeros(1000, device=OTHER)


# What this library does with it.


def test_devices_are_found_by_name():
    assert find_devices("auto") == find_devices("sim") == (SIM, OTHER)
    assert find_devices("sim:1") == (OTHER,)
    with pytest.raises(fq.errors.ConfigError, match=r"'sim:2' is not there.*sim:0, sim:1"):
        find_devices("sim:2")
    for wrong in ("sim:0,sim:0", "sim,cpu"):
        with pytest.raises(fq.errors.ConfigError, match="one kind, each named once"):
            find_devices(wrong)


def test_random_numbers_of_a_device_follow_the_seed_and_are_put_back():
    seed_generators(3, OTHER)
    expected = torch.rand(4, device=OTHER).cpu()
    seed_generators(3, OTHER)
    with fork_generators(OTHER):
        torch.rand(9, device=OTHER)
    assert torch.equal(torch.rand(4, device=OTHER).cpu(), expected)


def test_dropout_draws_the_same_whatever_was_drawn_before():
    federation = Federation(dropout=0.5)
    found = []
    for drawn in (1, 5):
        torch.rand(drawn, device=SIM)
        found.append(bits(federation.run()))
    assert found[0] == found[1] == bits(federation.run(devices=(CPU,)))
    assert found[0] != bits(Federation(dropout=0.4).run())


@pytest.mark.parametrize("transforms", [[], ["RandomCrop(6, padding=2)", "HorizontalFlip"]])
def test_every_device_sees_the_same_batches_whether_data_are_kept_on_it_or_copied(transforms):
    data, rows = make_data(), torch.tensor([3, 1, 1, 7])
    data = transform_examples(data, make_pipeline(transforms)) if transforms else data
    expected = data.batch(rows, torch.Generator().manual_seed(1))
    for max_bytes in (None, 0):
        there = ResidentData(SIM, max_bytes).wrap(data, "client")
        batch = there.batch(rows, torch.Generator().manual_seed(1))
        for one, other in zip(expected, batch, strict=True):
            assert other.device == SIM
            assert torch.equal(one, other.cpu())


def test_data_are_kept_on_the_device_within_its_limit():
    data, one = [make_data(seed=n) for n in range(3)], 12 * (36 * 4 + 8)
    resident, before = ResidentData(SIM, max_bytes=2 * one), memory()[0]
    for number in (0, 1, 0, 2):
        resident.wrap(data[number], number).batch(torch.tensor([0]))
        assert memory()[0] - before <= 2 * one
    kernels = torch.ops.sim.kernels()
    assert memory()[0] - before == 2 * one
    resident.wrap(data[0], 0).batch(torch.tensor([0]))  # used last but one, so it is still there
    assert torch.ops.sim.kernels() - kernels == 2  # two tensors, from which a row is taken
    resident.release()
    assert memory()[0] == before


def test_copies_to_the_device_start_from_pinned_memory(monkeypatch):
    pinned, to = [], Tensor.to
    monkeypatch.setattr(
        Tensor, "to", lambda x, *a, **k: (pinned.append((x.is_pinned(), k)), to(x, *a, **k))[1]
    )
    ResidentData(SIM, max_bytes=0).wrap(make_data(), 0).batch(torch.tensor([0, 1]))
    assert pinned[-2:] == [(True, {"non_blocking": True})] * 2


def test_merging_works_wherever_the_global_tensors_are():
    federation = Federation()
    setup = fq.Setup(
        federation.net,
        federation.structure,
        torch.zeros(2, 1, 6, 6),
        tuple(fq.Client(n, num_examples=12) for n in range(4)),
        rounds=1,
        seed=0,
    )
    method, updates = fq.HeteroFL(SETTINGS), federation.run()
    state = replace(method.start(setup), phase="train")
    expected = method.merge(setup, state, iter(updates)).params
    there = replace(state, params={n: t.to(OTHER) for n, t in state.params.items()})
    moved = [
        replace(u, params=tuple({n: t.to(OTHER) for n, t in part.items()} for part in u.params))
        for u in updates
    ]
    merged = method.merge(setup, there, iter(moved)).params
    for name, tensor in expected.items():
        assert merged[name].device == OTHER
        assert torch.equal(merged[name].cpu(), tensor)


def test_one_process_each_on_two_devices_gives_the_bits_of_one_device():
    federation = Federation()
    expected = bits(federation.run())
    assert bits(federation.run(workers=1, devices=(SIM, OTHER))) == expected


def test_processes_of_the_cpu_work_in_a_process_with_an_accelerator():
    federation = Federation()
    expected = bits(federation.run(devices=(CPU,)))  # which has computed gradients
    assert choose_start_method(CPU) == "spawn"  # since a forked process could not any more
    assert bits(federation.run(workers=1, devices=(CPU,))) == expected


AROUND = {
    "private steps": DPSGD(fq.LocalSGD(SETTINGS, lr=0.05), 0.5, 1.0, 4, "ab", round=0),
    "optimizer": fq.LocalSGD(
        fq.LocalTraining(optimizer="adamw", lr=0.01, epochs=1, keep_optimizer=True), lr=0.01
    ),
    "privacy": PrivateReply(fq.LocalSGD(SETTINGS, lr=0.05), clip=0.1, noise=0.01, secret="ab"),
    "flipped labels": Poisoned(fq.LocalSGD(SETTINGS, lr=0.05), fq.LabelFlip()),
    "backdoor": Poisoned(fq.LocalSGD(SETTINGS, lr=0.05), fq.Backdoor(target=1)),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_put_around_or_into_training_works_on_a_device(name):
    federation, found = Federation(norm=name != "private steps"), []
    tasks = [replace(task, recipe=AROUND[name]) for task in federation.tasks()]
    for device in (CPU, SIM):
        with federation.engine(devices=(device,)) as engine:
            found += [bits(list(engine.run(tasks))) for _ in range(2)]  # the second goes on
    assert (found[0] != found[1]) == (name == "optimizer")
    assert found[:2] == found[2:]


@pytest.mark.parametrize("device", ["sim:1", "cpu"])
def test_other_tasks_are_learned_and_measured_on_a_device(device):
    torch.ops.sim.set_double(False)  # which sums of metrics need
    x = torch.linspace(-1, 1, 96).view(24, 4)
    data = (x, x.sum(1, keepdim=True).square())
    clients = fq.make_clients(data, test=data, count=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    method = fq.HeteroFL(fq.LocalTraining(lr=0.05, epochs=1, batch_size=6))
    run = fq.train(
        net, x[:1], method, clients, 2, loss="mse", metrics=["mae", "r2"], workers=0, device=device
    )
    torch.ops.sim.set_double(True)
    EXPECTED.append(dict(run.scores[0].metrics))
    assert EXPECTED[0] == pytest.approx(EXPECTED[-1], rel=1e-5)


EXPECTED: list[dict[str, float]] = []  # of the first device


# Too little memory.


def measure(federation: Federation) -> tuple[int, int]:
    """The bytes that one client of the whole net needs, beyond what is used now: peak and rest."""
    context = ClientContext(federation.net, federation.structure, federation.data, SIM)
    context._place(federation.data["train"][0], "key")  # makes the resident data
    context._shared.resident.release()  # none of which a device in need keeps
    before = memory()[0]
    torch.ops.sim.reset_peak(0)
    run_task(federation.tasks()[0], context, None)
    return memory()[1] - before, memory()[0] - before


def test_what_was_kept_makes_room_for_a_task_and_one_that_does_not_fit_alone_fails():
    federation, expected = Federation(), bits(Federation().run())
    need, _ = measure(federation)
    used = memory()[0]
    torch.ops.sim.set_limit(0, used + need + 64)
    assert bits(federation.run()) == expected
    torch.ops.sim.set_limit(0, used + need // 2)
    first, *_ = federation.run()
    assert isinstance(first, Failure)
    assert first.reason == (
        "its work does not fit into the memory of device sim:0, even with one client at a time; "
        "use a smaller batch_size, or give it a smaller budget"
    )


def test_clients_of_one_pass_that_is_too_large_work_alone():
    federation = Federation(dropout=None)  # nets that draw nothing can go into one pass
    expected = bits(federation.run(widths=(1.0,)))
    need, _ = measure(federation)
    room = memory()[0] + need + 64
    with federation.engine(clients_per_pass=4) as engine:
        list(engine.run(federation.tasks(widths=(1.0,))))  # tries whether passes can be
        assert [size.clients for size in engine.pass_sizes.chosen.values()] == [4]
        torch.ops.sim.set_limit(0, room)
        assert bits(list(engine.run(federation.tasks(widths=(1.0,))))) == expected


def test_fewer_clients_work_at_a_time_on_a_device_that_is_too_small_for_all():
    federation, expected = Federation(), bits(Federation().run(widths=(1.0,)))
    need, rest = measure(federation)
    assert rest > 64
    torch.ops.sim.set_limit(0, memory()[0] + need + 64)  # two cannot be there at a time
    with federation.engine(workers=2) as engine:
        assert bits(list(engine.run(federation.tasks(widths=(1.0,))))) == expected
        assert len(engine._workers) == 1


def test_the_cost_of_a_subnet_predicts_the_memory_of_its_training():
    net, batch = CNN(width=0.25), 16
    example = torch.zeros(1, 1, 28, 28)
    structure = fq.trace_structure(net, example)
    for width in (1.0, 0.5):
        subnet = structure.subnet(width)
        predicted = fq.compute_cost(net, structure, subnet, example, batch_size=batch).memory
        small = build_module(net, structure, subnet).train()
        before = memory()[0]
        small.to(SIM)
        x, y = torch.rand(batch, 1, 28, 28).to(SIM), torch.zeros(batch, dtype=torch.int64).to(SIM)
        optimizer = torch.optim.SGD(small.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            torch.ops.sim.reset_peak(0)
            nn.functional.cross_entropy(small(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        measured = memory()[1] - before
        del small, optimizer, x, y
        assert predicted == pytest.approx(measured, rel=0.1), width


# Whole runs.


def test_a_run_names_its_device_and_says_so_when_it_resumes_on_another(tmp_path):
    data = (torch.rand(24, 4), torch.arange(24) % 3)
    clients = fq.make_clients(data, test=data, count=2)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for device in ("sim:1", "sim:0", "cpu"):  # of the same kind, and of another
        events = []
        run = fq.train(
            net.to(device if device == "sim:1" else "cpu"),  # on a device or not
            data[0][:1],
            "heterofl",
            clients,
            rounds={"sim:1": 1, "sim:0": 2, "cpu": 3}[device],
            workers=0,
            device=device,
            out=tmp_path / "run",
            resume=device != "sim:1",
            callbacks=[events.append],
        )
        changes = [e.change for e in events if type(e).__name__ == "EnvironmentChanged"]
        assert changes == (["device sim Simulated -> cpu"] if device == "cpu" else [])
    assert [e.get("device") for e in run.info.environments] == ["sim Simulated", None]
    scores = run.evaluate(device="sim:1", workers=0)
    assert [s.accuracy for s in scores] == [s.accuracy for s in run.scores]


def test_what_was_trained_on_a_device_is_stored_and_handed_out_on_the_host(tmp_path):
    data = (torch.rand(24, 4), torch.arange(24) % 3)
    clients = fq.make_clients(data, test=data, count=2, budgets=(1.0, 0.5))
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    run = fq.train(
        net, data[0][:1], "heterofl", clients, 1, workers=0, device="sim:1", out=tmp_path / "run"
    )
    model = fq.open_run(tmp_path / "run", net.to("sim"), "heterofl").customize(width=0.5)
    assert {t.device for t in (*model.state_dict().values(), *run.state.params.values())} == {CPU}
    for name, tensor in run.customize(width=0.5).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_file_of_settings_names_the_device(tmp_path):
    given = {
        "rounds": 1,
        "data": {"clients": 2, "fraction": 0.05},
        "model": {"name": "mlp", "hidden": [8]},
        "run": {"device": "sim:1", "workers": 0},
    }
    config = load_config(given)
    source = load_source(config)
    kernels = torch.ops.sim.kernels()
    run = start_run(plan_run(resolve_config(config, source), source, tmp_path / "run")).train()
    assert torch.ops.sim.kernels() > kernels
    assert run.info.environments[0]["device"] == "sim Simulated"
