"""Server optimizers against the papers' formulas, written out cell by cell in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import SERVER_OPTIMIZERS, AggregationPipeline, chain
from fedquilt.federation.state import Setup, State

LR, BETA1, BETA2, TAU = 0.3, 0.8, 0.9, 0.05
OPTIMIZERS = {
    "sgd": fq.ServerSGD(lr=LR),
    "fedavgm": fq.FedAvgM(lr=LR, momentum=BETA1),
    "fedadagrad": fq.FedAdagrad(lr=LR, beta1=BETA1, tau=TAU),
    "fedadam": fq.FedAdam(lr=LR, beta1=BETA1, beta2=BETA2, tau=TAU),
    "fedyogi": fq.FedYogi(lr=LR, beta1=BETA1, beta2=BETA2, tau=TAU),
}


@dataclass
class Cell:
    """One number of the model and its moments."""

    x: float
    m: float = 0.0
    v: float = field(default=TAU**2)

    def step(self, name: str, change: float) -> None:
        square = change * change
        if name == "sgd":
            self.x += LR * change
        elif name == "fedavgm":
            self.m = BETA1 * self.m + change
            self.x += LR * self.m
        else:
            self.m = BETA1 * self.m + (1 - BETA1) * change
            if name == "fedadagrad":
                self.v += square
            elif name == "fedadam":
                self.v = BETA2 * self.v + (1 - BETA2) * square
            else:
                self.v -= (1 - BETA2) * square * np.sign(self.v - square)
            self.x += LR * self.m / (np.sqrt(self.v) + TAU)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 6), nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))) * self.scale


WEIGHTS = {name for name, _ in Net().named_parameters()}


@pytest.fixture(scope="module")
def setup() -> Setup:
    torch.manual_seed(0)
    model, example = Net(), torch.zeros(2, 3)
    return Setup(model, fq.trace_structure(model, example), example, (), rounds=3, seed=0)


@pytest.fixture(scope="module")
def start(setup: Setup) -> State:
    return State(0, "train", {n: t.clone() for n, t in setup.model.state_dict().items()})


def make_rounds(setup: Setup) -> list[list[fq.Update]]:
    """Clients of mixed widths; in the second round narrow ones, and one of weight 0."""
    structure, draw = setup.structure, torch.Generator().manual_seed(1)
    scattered = fq.Subnet.from_channels({"first": [0, 3]})
    wide, half, third = (structure.subnet(width) for width in (1.0, 0.5, 1 / 3))

    def update(client: int, subnet: fq.Subnet, weight: float) -> fq.Update:
        tensors = fq.copy_subnet_tensors(setup.model.state_dict(), structure, subnet)
        new = {
            n: t + torch.randn(t.shape, generator=draw) if t.is_floating_point() else t + 1
            for n, t in tensors.items()
        }
        return fq.Update(client, (subnet,), (new,), weight, {})

    plan = (
        ((wide, 1.0), (half, 2.0), (third, 0.5)),
        ((half, 1.0), (third, 3.0), (wide, 0.0)),
        ((scattered, 1.0),),
        ((wide, 0.25), (scattered, 2.0), (half, 1.0)),
    )
    return [[update(i, *asked) for i, asked in enumerate(clients)] for clients in plan]


def cell_numbers(setup: Setup, subnet: fq.Subnet) -> dict[str, list[int]]:
    """Which cells of each flattened tensor a subnet holds, in the order of its own."""
    numbered = {
        name: torch.arange(max(t.numel(), 1)).reshape(t.shape)
        for name, t in setup.model.state_dict().items()
    }
    held = fq.copy_subnet_tensors(numbered, setup.structure, subnet)
    return {name: tensor.flatten().tolist() for name, tensor in held.items()}


def oracle(
    setup: Setup, state: State, rounds: list[list[fq.Update]], name: str
) -> list[dict[str, list[Cell]]]:
    """The cells of all tensors after each round."""
    cells = {
        tensor: [Cell(float(x)) for x in values.flatten()]
        for tensor, values in state.params.items()
        if values.is_floating_point()
    }
    history = []
    for updates in rounds:
        sums: dict[tuple[str, int], tuple[float, float]] = {}
        for update in updates:
            held = cell_numbers(setup, update.subnets[0])
            for tensor, values in update.params[0].items():
                if tensor not in cells:
                    continue
                for number, value in zip(held[tensor], values.flatten().tolist(), strict=True):
                    total, weight = sums.get((tensor, number), (0.0, 0.0))
                    sums[tensor, number] = (total + update.weight * value, weight + update.weight)
        for (tensor, number), (total, weight) in sums.items():
            cell = cells[tensor][number]
            if weight and tensor in WEIGHTS:
                cell.step(name, total / weight - cell.x)
            elif weight:
                cell.x = total / weight
        history.append({t: [Cell(c.x, c.m, c.v) for c in row] for t, row in cells.items()})
    return history


def numbers(cells: list[Cell], what: str) -> npt.NDArray[np.float64]:
    return np.array([getattr(cell, what) for cell in cells])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_cell_goes_as_the_paper_says(setup, start, name):
    state, rounds = start, make_rounds(setup)
    for updates, expected in zip(rounds, oracle(setup, start, rounds, name), strict=True):
        state = chain(OPTIMIZERS[name]).merge(setup, state, iter(updates))
        for tensor, cells in expected.items():
            found = state.params[tensor].flatten().numpy()
            np.testing.assert_allclose(found, numbers(cells, "x"), rtol=2e-5, atol=2e-6)
        for key, moment in state.server_tensors.items():
            _, what, tensor = key.split("/")
            symbol = {"momentum": "m", "variance": "v"}[what]
            want = numbers(expected[tensor], symbol)
            np.testing.assert_allclose(moment.flatten().numpy(), want, rtol=2e-5, atol=2e-6)
    counters = state.params["norm.num_batches_tracked"]
    assert counters.equal(start.params["norm.num_batches_tracked"])


def test_the_optimizers_keep_the_moments_that_they_need_of_weights_alone(setup, start):
    kept = {}
    for name, optimizer in OPTIMIZERS.items():
        after = chain(optimizer).merge(setup, start, make_rounds(setup)[0])
        kept[name] = {key.split("/")[1] for key in after.server_tensors}
        assert {key.split("/")[2] for key in after.server_tensors} in (set(), WEIGHTS)
    both = {"momentum", "variance"}
    momentum = {"sgd": set(), "fedavgm": {"momentum"}}
    assert kept == {**dict.fromkeys(OPTIMIZERS, both), **momentum}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cell_that_no_client_trained_keeps_its_value_and_its_moments(setup, start, name):
    wide, narrow, *_ = make_rounds(setup)
    pipeline = chain(OPTIMIZERS[name])
    before = pipeline.merge(setup, start, wide)
    after = pipeline.merge(setup, before, narrow)
    for tensor in WEIGHTS:
        trained = torch.zeros(before.params[tensor].shape, dtype=torch.bool)
        for update in narrow:
            if update.weight:
                held = cell_numbers(setup, update.subnets[0])[tensor]
                trained.view(-1)[held] = True
        pairs = [(before.params[tensor], after.params[tensor])]
        keys = [key for key in before.server_tensors if key.endswith(f"/{tensor}")]
        pairs += [(before.server_tensors[key], after.server_tensors[key]) for key in keys]
        for old, new in pairs:
            assert new[~trained].equal(old[~trained])
            assert not (new[trained] == old[trained]).any()
        assert (~trained).any() or tensor == "second.bias"


def test_a_learning_rate_of_one_is_the_mean_itself_to_the_last_bit(setup, start):
    for updates in make_rounds(setup):
        mean = fq.average(start.params, setup.structure, updates)
        for pipeline in (AggregationPipeline(), chain(fq.ServerSGD(lr=1.0))):
            after = pipeline.merge(setup, start, updates)
            assert after.params.keys() == mean.keys()
            assert all(after.params[n].equal(t) for n, t in mean.items())
            assert after.server_tensors == {}


def test_momentum_of_zero_is_the_mean_but_for_rounding(setup, start):
    for updates in make_rounds(setup):
        mean = fq.average(start.params, setup.structure, updates)
        after = chain(fq.FedAvgM(momentum=0.0)).merge(setup, start, updates)
        for name, tensor in mean.items():
            torch.testing.assert_close(after.params[name], tensor)


def test_cells_that_are_not_finite_stay_and_have_sound_moments(setup, start):
    params = dict(start.params)
    params["first.bias"] = params["first.bias"].clone()
    params["first.bias"][0] = -torch.inf
    masked = State(0, "train", params)
    sent = {**{n: t.clone() for n, t in params.items()}}
    sent["first.bias"][1:] += 1
    update = fq.Update(0, (fq.Subnet(),), (sent,), 1.0, {})
    for optimizer in OPTIMIZERS.values():
        after = chain(optimizer).merge(setup, masked, [update])
        bias = after.params["first.bias"]
        assert bias[0] == -torch.inf
        assert (bias[1:] > params["first.bias"][1:]).all()
        assert all(tensor.isfinite().all() for tensor in after.server_tensors.values())


def test_moments_of_half_precision_are_of_single(setup, start):
    def halves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}

    updates = [
        fq.Update(u.client, u.subnets, (halves(u.params[0]),), u.weight, {})
        for u in make_rounds(setup)[0]
    ]
    after = chain(fq.FedYogi()).merge(setup, State(0, "train", halves(start.params)), updates)
    assert after.params["first.weight"].dtype == torch.float16
    assert {tensor.dtype for tensor in after.server_tensors.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fq.FedAdam(lr=0.0), "'lr' of FedAdam.*greater than 0"),
        (lambda: fq.FedAdam(beta1=1.0), "'beta1' of FedAdam.*less than 1"),
        (lambda: fq.FedYogi(tau=0.0), "'tau' of FedYogi.*greater than 0"),
        (lambda: fq.FedAvgM(momentum=-0.1), "'momentum' of FedAvgM"),
        (lambda: fq.FedAvg(server_optimizer=0.1), "server_optimizer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_every_optimizer_is_tried_here():
    assert OPTIMIZERS.keys() == SERVER_OPTIMIZERS.keys()
    assert [type(value) for value in OPTIMIZERS.values()] == list(SERVER_OPTIMIZERS.values())
