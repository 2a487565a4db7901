"""NeFL: who trains which submodel, what submodels share, and the steps of their blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.data.population import Population
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.federation.client import SERVER, Client, Update
from fedquilt.federation.state import Setup
from fedquilt.methods.nefl import enlarge_steps
from fedquilt.models import MODELS
from fedquilt.models.nefl import ViT
from fedquilt.structure.blocks.find import find_residual_blocks
from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.structure.structure import NORMS, STEPS
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace.readings import trace_once

SIZES = (0.2, 0.4, 0.6, 0.8, 1.0)
EXAMPLE = torch.zeros(2, 1, 5, 5)
PLAIN = fq.LocalTraining(
    lr=0.05, momentum=0.9, weight_decay=1e-2, epochs=1, batch_size=4, max_grad_norm=None
)
REST, BLOCK = 12 * 10 + 24 + 4 * 13, 9 * 12 * 8 + 9 * 8 * 12 + 24  # parameters of the net below


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12)

    def branch(self, x: Tensor) -> Tensor:
        return self.norm(self.conv2(self.conv1(x).relu()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv2(self.conv1(x).relu()))


class Net(nn.Module):
    """A stage of five blocks, so that k of them have about k fifths of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.blocks = nn.Sequential(*(Residual() for _ in range(5)))
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))


def drawn(count: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 4
    x = torch.randn(count, 1, 5, 5, generator=generator) + y.view(-1, 1, 1, 1)
    return to_examples((x, y))


def population(*budgets: Budget) -> Population:
    clients = tuple(Client(i, 8 + i, (0, 1, 2, 3), b) for i, b in enumerate(budgets))
    train = {c.id: drawn(c.num_examples, c.id) for c in clients}
    return Population(clients, train, {SERVER: drawn(12, 99)})


def untrained(net: nn.Module, example: Tensor, *clients: Client) -> Setup:
    """A setup whose structure is not checked, which takes longest."""
    structure = replace(trace_once(net, example, ())[0], blocks=find_residual_blocks(net))
    return Setup(net, structure, example, clients, rounds=2, seed=3)


@pytest.fixture(scope="module")
def given() -> Setup:
    """Five clients, one of each tier."""
    torch.manual_seed(0)
    return untrained(Net(), EXAMPLE, *population(*map(Budget, SIZES)).clients)


@pytest.fixture(scope="module")
def setup(given) -> Setup:
    """The same with steps."""
    return fq.NeFL().prepare_model(given)


@pytest.fixture
def trained(given):
    """A run of a round on tiny data, never evaluated."""

    def run(method, *budgets: float):
        people = replace(population(*map(Budget, budgets)), test={})
        return fq.train(
            given.model, EXAMPLE, method, people, 1, seed=3, workers=0, structure=given.structure
        )

    return run


def by_depth(**settings) -> fq.NeFL:
    """Submodels of one to five blocks."""
    return fq.NeFL(PLAIN, 1.0, scaling="D", gammas=SIZES, tolerance=0.12, **settings)


def by_both(**settings) -> fq.NeFL:
    return fq.NeFL(PLAIN, 1.0, scaling="WD", gammas=(0.25, 0.5, 1.0), tolerance=0.05, **settings)


# who trains what


B_5 = {  # Appendix B.5
    0.2: {0.2, 0.4, 0.6},
    0.4: {0.2, 0.4, 0.6, 0.8},
    0.6: {0.2, 0.4, 0.6, 0.8, 1.0},
    0.8: {0.4, 0.6, 0.8, 1.0},
    1.0: {0.6, 0.8, 1.0},
}


@pytest.mark.parametrize("tier", SIZES)
def test_clients_draw_from_the_tiers_around_their_own(setup, tier):
    method, rounds = by_depth(), 400
    client = setup.clients[SIZES.index(tier)]
    draws = [method.draw_size(setup, round, client) for round in range(rounds)]
    counts, expected = Counter(draws), rounds / len(B_5[tier])
    assert set(counts) == B_5[tier]
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 20  # χ², at most 4 dof
    assert [method.draw_size(setup, round, client) for round in range(20)] == draws[:20]
    other = replace(client, id=17)
    assert [method.draw_size(setup, round, other) for round in range(20)] != draws[:20]


def test_a_task_is_the_drawn_submodel_with_its_own_tensors(setup):
    method = by_depth()
    for number in range(3):
        state = replace(method.start(setup), round=number)
        tasks = method.plan(setup, state, setup.clients)
        for client, task in zip(setup.clients, tasks, strict=True):
            size = method.draw_size(setup, number, client)
            (subnet,) = task.subnets
            assert subnet.skipped == tuple(f"blocks.{i}" for i in range(round(5 * size), 5))
            assert (subnet.owner, subnet.private) == (f"{size:g}", (NORMS, STEPS))
            assert task.recipe.weight == 1.0  # Algorithm 2 counts clients, not their data


@pytest.mark.parametrize(
    ("settings", "reached"),
    [
        ({"assignment": "fixed"}, [{0.2}, {0.4}, {0.6}, {0.8}, {1.0}]),
        ({"tier_range": 0}, [{0.2}, {0.4}, {0.6}, {0.8}, {1.0}]),
        (
            {"tier_range": 1},
            [{0.2, 0.4}, {0.2, 0.4, 0.6}, {0.4, 0.6, 0.8}, {0.6, 0.8, 1}, {0.8, 1}],
        ),
    ],
)
def test_reach_says_how_far_from_its_tier_a_client_goes(setup, settings, reached):
    method = by_depth(**settings)
    found = [{method.draw_size(setup, r, client) for r in range(40)} for client in setup.clients]
    assert found == reached


@pytest.mark.parametrize("width", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_physical_limits_are_never_exceeded(setup, width, blocks):
    method = by_depth()
    price = REST + blocks * (BLOCK + 1)  # a block has a step
    client = Client(0, 8, (), Budget(width, params=price))
    found = {method.draw_size(setup, round, client) for round in range(60)}
    tier = min(width, blocks / 5)
    assert found == {size for size in B_5[tier] if size <= blocks / 5}


@pytest.mark.parametrize("budget", [Budget(params=REST + BLOCK), Budget(0.1)])
def test_a_budget_that_nothing_meets_is_refused_with_the_smallest_cost(setup, budget):
    method = by_depth()
    said = rf"no size meets .* of client 7; the smallest is 0.2 .* Cost\(params={REST + BLOCK + 1},"
    with pytest.raises(BudgetError, match=said):
        method.draw_size(setup, 0, Client(7, 8, (), budget))


def test_the_sizes_are_the_clients_budgets_unless_they_are_named(setup):
    def among(*budgets: Budget) -> Setup:
        return replace(setup, clients=population(*budgets).clients)

    method, tiers = fq.NeFL(scaling="prefix"), among(Budget(0.4), Budget(0.9), Budget(0.4))
    assert method.sizes(tiers) == (0.9, 0.4)
    assert method.sizes(among(Budget(0.4), Budget(params=9000))) == SIZES[::-1]  # the paper's
    assert by_both().sizes(tiers) == (1.0, 0.5, 0.25)


# what is shared


def answers(setup: Setup, method, state, sizes: tuple[float, ...], seed: int) -> list[Update]:
    """Clients that send random tensors of submodels."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, size in enumerate(sizes):
        (subnet,) = method.ensemble(setup, state, size)
        cells = copy_subnet_tensors(state.params, setup.structure, subnet)
        sent = {
            n: torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
            for n, t in cells.items()
        }
        found.append(Update(number, (subnet,), (sent,), 1.0, {}))
    return found


def expected(old, updates, is_own) -> dict[str, np.ndarray]:
    """Algorithm 2 in words: a cell is the mean over the clients that sent it for this name."""
    sums, counts = {}, {}
    for update in updates:
        (subnet,), (sent,) = update.subnets, update.params
        for name, tensor in sent.items():
            if tensor.is_floating_point():
                target = f"{name}@{subnet.owner}" if is_own(name) else name
                total = sums.setdefault(target, np.zeros(old[name].shape))
                count = counts.setdefault(target, np.zeros(old[name].shape))
                cells = tuple(slice(n) for n in tensor.shape)
                total[cells] += tensor.double().numpy()
                count[cells] += 1
    found = {name: tensor.double().numpy() for name, tensor in old.items()}
    for name, total in sums.items():
        before = found.get(name, found[name.partition("@")[0]])
        found[name] = np.where(counts[name] > 0, total / np.maximum(counts[name], 1), before)
    return found


@pytest.mark.parametrize(
    ("own", "is_own"),
    [
        ((NORMS, STEPS), lambda name: "norm." in name or name.endswith(".step")),
        ((), lambda name: False),
        ((NORMS,), lambda name: "norm." in name),
        (("fc.*", STEPS), lambda name: name.startswith("fc.") or name.endswith(".step")),
    ],
    ids=["default", "nothing", "norms", "fc and steps"],
)
def test_a_round_averages_what_is_shared_and_each_submodels_own(setup, own, is_own):
    method = by_both(private_params=own)
    state = replace(method.start(setup), phase="train")
    for number, sizes in enumerate([(0.25, 0.5, 1.0, 0.5), (1.0, 0.25, 0.25)]):
        updates = answers(setup, method, state, sizes, seed=number)
        after = method.merge(setup, state, updates)
        should = expected(state.params, updates, is_own)
        assert set(after.params) == set(should)
        for name, tensor in after.params.items():
            np.testing.assert_allclose(tensor.double().numpy(), should[name], atol=1e-6)
        mine = {name for name in after.params if name.endswith("@0.5")}
        if number == 1:  # nobody trained it: it keeps every bit
            assert all(after.params[name].equal(state.params[name]) for name in mine)
        kept = {"blocks.0.norm.running_var", "blocks.0.step", "fc.weight", "stem.weight"}
        assert {n for n in kept if f"{n}@0.5" in mine} == {n for n in kept if is_own(n)}
        state = after


def test_submodels_are_cut_in_width_and_in_depth(setup):
    """So that the oracle above sees cells that some clients hold and others do not."""
    method = by_both()
    (subnet,) = method.ensemble(setup, method.start(setup), 0.25)
    small = build_module(setup.model, setup.structure, subnet)
    assert 1 < len(small.norm.weight) < 12
    assert not list(small.blocks[4].parameters())
    assert size_of(small) == pytest.approx(0.25, rel=0.05)


def size_of(net: nn.Module) -> float:
    """The share of the net's parameters, steps apart."""
    counted = sum(p.numel() for name, p in net.named_parameters() if "step" not in name)
    return counted / (REST + 5 * BLOCK)


# steps


TABLE_12 = {  # NeFL-D_O
    0.2: "1 8 0 0 0 0 0 0 0 | 1 8 0 0 0 0 0 0 0 | 1 8 0 0 0 0 0 0 0",
    0.4: "1 1 7 0 0 0 0 0 0 | 1 1 7 0 0 0 0 0 0 | 1 1 1 6 0 0 0 0 0",
    0.6: "1 1 1 6 0 0 0 0 0 | 1 1 1 6 0 0 0 0 0 | 1 1 1 1 1 4 0 0 0",
    0.8: "1 1 1 1 1 1 1 1 1 | 1 1 1 1 1 1 1 2 0 | 1 1 1 1 1 1 3 0 0",
    1.0: "1 1 1 1 1 1 1 1 1 | 1 1 1 1 1 1 1 1 1 | 1 1 1 1 1 1 1 1 1",
}


@pytest.fixture(scope="module")
def resnet56() -> Setup:
    method = fq.NeFL(table="resnet56", scaling="D")
    return method.prepare_model(untrained(MODELS["resnet56"](), torch.zeros(2, 3, 8, 8)))


@pytest.mark.parametrize("start", ["one", "ode"])
def test_steps_start_as_in_table_12(resnet56, start):
    method = fq.NeFL(table="resnet56", scaling="D", step_start=start)
    state = method.start(resnet56)
    for size, line in TABLE_12.items():
        (subnet,) = method.ensemble(resnet56, state, size)
        tensors = copy_subnet_tensors(state.params, resnet56.structure, subnet)
        for stage, steps in enumerate(line.split(" | "), 1):
            found = [tensors.get(f"layer{stage}.{i}.step", torch.zeros(())) for i in range(9)]
            printed = [float(step) for step in steps.split()]
            assert torch.stack(found).tolist() == (
                printed if start == "ode" else [min(step, 1.0) for step in printed]
            )


def test_a_gap_lengthens_the_step_before_it_in_the_same_stage(resnet56):
    gone = ["layer1.0", *(f"layer1.{i}" for i in (3, 4, 5)), "layer2.0", "layer2.1", "layer3.8"]
    steps = enlarge_steps(resnet56.structure, Subnet(skipped=tuple(gone)))
    longer = {name: step for name, step in steps.items() if step != 1}
    assert longer == {"layer1.2.step": 4, "layer3.7.step": 2}
    assert len(steps) == 27 - len(gone)


def test_attention_and_feed_forward_stand_in_for_their_own_kind():
    net = ViT(image_size=8, patch_size=4, dim=8, depth=12, heads=2, mlp_dim=8)
    method = fq.NeFL(table="vit-b16", scaling="D", step_start="ode")
    setup = method.prepare_model(untrained(net, torch.zeros(2, 3, 8, 8)))
    params = method.start(setup).params
    for size, kept in (("0.5", 6), ("0.75", 9), ("1", 12)):
        for part in ("attn", "mlp"):
            names = [f"blocks.{i}.{part}_step@{size}" for i in range(12)]
            assert [n for n in names if n in params] == names[:kept]
            assert [float(params[n]) for n in names[:kept]] == [1.0] * (kept - 1) + [13.0 - kept]
    steps = enlarge_steps(setup.structure, Subnet(skipped=("blocks.3.attn", "blocks.4.attn")))
    longer = {name: step for name, step in steps.items() if step != 1}
    assert longer == {"blocks.2.attn_step": 3}


@pytest.mark.parametrize("steps", ["learned", "constant"])
def test_a_step_of_three_adds_the_branch_three_times(given, steps):
    method = by_depth(steps=steps, step_start="ode")
    setup = method.prepare_model(given)
    (subnet,) = method.ensemble(setup, method.start(setup), 0.6)
    small = build_module(setup.model, setup.structure, subnet, method.start(setup).params).eval()
    net, x = given.model.eval(), torch.randn(3, 1, 5, 5)
    with torch.no_grad():
        h = net.norm(net.stem(x)).relu()
        for block, step in zip(net.blocks[:3], (1, 1, 3), strict=True):
            h = h + step * block.branch(h)
        torch.testing.assert_close(small(x), net.fc(h.mean((2, 3))))


def steps_of(params) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in params.items() if "step" in name}


def test_constant_steps_are_not_trained_and_learned_ones_are(given, trained):
    settings = {"step_start": "ode", "assignment": "fixed"}
    for steps in ("constant", "learned"):
        method = by_depth(steps=steps, **settings)
        before = steps_of(method.start(method.prepare_model(given)).params)
        after = steps_of(trained(method, 0.4, 1.0).state.params)
        assert set(after) == set(before)
        assert len(before) == 5 + (1 + 2 + 3 + 4 + 5)
        for name, step in after.items():
            is_learned = steps == "learned" and name.endswith(("@0.4", "@1"))
            assert step.equal(before[name]) != is_learned


def test_without_steps_there_is_no_tensor_for_them(given, trained):
    run = trained(by_depth(steps="none"), 0.4)
    assert steps_of(run.state.params) == {}
    assert run.setup.model is not given.model
    assert set(run.setup.structure.shapes) == set(given.structure.shapes)
    assert steps_of(dict(run.customize(width=0.4).named_parameters())) == {}


# a finished run


@pytest.fixture(scope="module")
def run(given) -> fq.Run:
    people = population(*map(Budget, (0.25, 0.5, 1.0)))
    method = by_both(assignment="fixed")
    return fq.train(
        given.model, EXAMPLE, method, people, 2, seed=3, workers=0, structure=given.structure
    )


def num_params(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def test_a_customized_model_has_the_normalisation_and_steps_of_its_size(run):
    params = run.state.params
    assert not params["norm.running_mean@1"].equal(params["norm.running_mean@0.5"])
    for size in ("0.25", "0.5", "1"):
        model = run.customize(width=float(size))
        width = len(model.norm.weight)
        for name in ("weight", "bias", "running_mean", "running_var"):
            assert getattr(model.norm, name).equal(params[f"norm.{name}@{size}"][:width])
        assert model.blocks[0].step.equal(params[f"blocks.0.step@{size}"])
        assert model.stem.weight.equal(params["stem.weight"][:width])
        assert size_of(model) == pytest.approx(float(size), rel=0.05)
        assert model(torch.randn(3, 1, 5, 5)).shape == (3, 4)


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(left[n].equal(right[n]) for n in left)


def test_between_two_sizes_the_smaller_one_is_given(run):
    half = run.customize(width=0.5)
    assert same(run.customize(width=0.99), half)
    assert same(run.customize(width=0.51), half)
    assert same(run.customize(width=0.49), run.customize(width=0.25))
    assert same(run.customize(), run.customize(width=1.0))
    with pytest.raises(ConfigError, match=r"smallest submodel has 0\.25 .* asked was 0\.2"):
        run.customize(width=0.2)


def test_all_sizes_are_evaluated(run):
    scores = run.evaluate(workers=0)
    assert [score.width for score in scores] == [1.0, 0.5, 0.25]
    nets = [run.customize(width=score.width) for score in scores]
    assert [score.params for score in scores] == [num_params(net) for net in nets]
    x, y = (torch.as_tensor(part) for part in drawn(12, 99).batch(torch.arange(12), None))
    for score, net in zip(scores, nets, strict=True):
        with torch.no_grad():
            assert score.accuracy == pytest.approx(float((net(x).argmax(1) == y).float().mean()))


def test_a_limit_gives_the_largest_size_within_it(run):
    counts = {size: num_params(run.customize(width=size)) for size in (0.25, 0.5, 1.0)}
    for limit, size in (
        (counts[1.0], 1.0),
        (counts[1.0] - 1, 0.5),
        (counts[0.25], 0.25),
    ):
        assert same(run.customize(params=limit), run.customize(width=size))
    assert same(run.customize(width=0.3, params=counts[1.0]), run.customize(width=0.25))
    with pytest.raises(BudgetError, match=r"no size meets .* costs"):
        run.customize(params=counts[0.25] - 1)
    with pytest.raises(BudgetError, match=r"no size meets .* smallest submodel has 0\.25"):
        run.customize(params=200)


def test_one_whole_net_on_one_client_is_fedavg_bit_for_bit(trained):
    nefl = fq.NeFL(PLAIN, 1.0, scaling="W", gammas=(1.0,), steps="none")
    one, other = (trained(method, 1.0).customize() for method in (nefl, fq.FedAvg(PLAIN, 1.0)))
    assert same(one, other)
    assert not same(one, Net())


def test_untracked_statistics_make_one_whole_net_heterofl_bit_for_bit(trained):
    settings = {"steps": "none", "private_params": (), "tracks_statistics": False}
    nefl = fq.NeFL(PLAIN, 1.0, scaling="W", gammas=(1.0,), **settings)
    hetero = fq.HeteroFL(PLAIN, 1.0, scaler=False, masked=False, own_rows=False)
    one, other = (trained(method, 1.0, 1.0).customize() for method in (nefl, hetero))
    assert same(one, other)
    assert not same(one, trained(replace(nefl, tracks_statistics=True), 1.0, 1.0).customize())


def test_untracked_statistics_are_of_every_submodel_and_never_sent_in_training(setup, trained):
    method = by_depth(tracks_statistics=False, private_params=(STEPS,), assignment="fixed")
    state = replace(method.start(setup), phase="train")
    for task in method.plan(setup, state, setup.clients):
        (subnet,) = task.subnets
        sent = copy_subnet_tensors(state.params, setup.structure, subnet)
        assert {name.rpartition("_")[2] for name in sent} & {"mean", "var", "tracked"} == set()
    run = trained(method, 0.4, 1.0)
    first, second = (run.customize(width=size) for size in (0.4, 1.0))
    assert first.norm.running_mean.equal(second.norm.running_mean)  # of the same weights
    assert first.norm.running_mean.abs().max() > 0
    behind = [net.blocks[1].norm.running_mean for net in (first, second)]
    assert not behind[0].equal(behind[1])  # behind a step that each submodel has for itself


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": "some"}, "steps.*'learned', 'constant' or 'none', got 'some'"),
        ({"step_start": "two"}, "step_start.*'one' or 'ode', got 'two'"),
        ({"assignment": "free"}, "assignment.*'dynamic' or 'fixed', got 'free'"),
        ({"tier_range": -1}, "0 or more, got -1"),
        ({"step_start": "ode", "steps": "none"}, "'ode' needs steps; let them be learned"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        fq.NeFL(**wrong)


@pytest.mark.parametrize("own", [(), (NORMS,), (NORMS, "blocks.0.step")])
def test_longer_steps_need_steps_of_their_own(setup, own):
    method = by_depth(step_start="ode", private_params=own)
    with pytest.raises(ConfigError, match=r"but private_params is .*; add ':steps' to it"):
        method.start(setup)


def test_private_tensors_that_do_not_exist_are_refused(given):
    with pytest.raises(ConfigError, match=r"'steps', which no tensor matches; .* such as .*:steps"):
        by_depth(private_params=(NORMS, "steps")).prepare_model(given)
