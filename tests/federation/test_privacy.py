"""Privacy: noise, accounting and clipping, each against something independent."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import Aggregate
from fedquilt.federation.client import Update
from fedquilt.federation.privacy import AdaptClip, PrivateMean, draw_noise, noise
from fedquilt.federation.privacy.mechanism import (
    MEMORY,
    WITHIN,
    find_public_rings,
    share_clip,
    split_noise,
)
from fedquilt.federation.privacy.noise import draw_uniform
from fedquilt.federation.state import Phase, Setup, State, sample_cohort
from fedquilt.structure.subnet import Subnet

SECRET = bytes(range(32))
CASES = [(1.0, 0.01, 1000), (0.8, 0.05, 60), (2.0, 0.2, 200), (1.1, 1.0, 5)]


@pytest.mark.parametrize(("noise", "rate", "rounds"), CASES)
def test_epsilon_is_that_of_opacus_within_a_hundredth(noise, rate, rounds):
    from opacus.accountants import PRVAccountant, RDPAccountant

    for kind, independent in (("rdp", RDPAccountant()), ("pld", PRVAccountant())):
        independent.history = [(noise, rate, rounds)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = independent.get_epsilon(1e-5)
        ours = fq.Accountant(1e-5, rate, kind=kind).compute_epsilon(noise, rounds)
        assert ours == pytest.approx(expected, rel=0.01)


def test_epsilon_is_that_of_dp_accounting_for_the_same_events():
    import dp_accounting as dp
    from dp_accounting import rdp

    ledger = rdp.RdpAccountant()
    for _ in range(7):  # one round after another
        ledger.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.3)))
    ours = fq.Accountant(1e-6, 0.1, kind="rdp").compute_epsilon(1.3, 7)
    assert ours == pytest.approx(ledger.get_epsilon(1e-6), rel=1e-9)


def test_full_participation_is_the_plain_gaussian_mechanism():
    """The analytic curve of Balle and Wang (2018), for σ/√rounds."""
    accountant = fq.Accountant(1e-5, 1.0)
    epsilon, noise = accountant.compute_epsilon(4.0, 9), 4.0 / 3

    def delta(eps: float) -> float:
        one = stats.norm.cdf(0.5 / noise - eps * noise)
        return float(one - math.exp(eps) * stats.norm.cdf(-0.5 / noise - eps * noise))

    assert delta(epsilon) <= 1e-5 * (1 + 1e-6)
    assert delta(epsilon * 0.99) > 1e-5


def test_cohorts_of_a_fixed_size_cost_more_than_poisson_cohorts():
    fixed = fq.Accountant(1e-5, 0.1, "fixed").compute_epsilon(2.0, 50)
    assert fixed > fq.Accountant(1e-5, 0.1, kind="rdp").compute_epsilon(2.0, 50)
    with pytest.raises(ConfigError, match="accounted for by rdp"):
        fq.Accountant(1e-5, 0.1, "fixed", "pld")


@pytest.mark.parametrize("epsilon", [0.5, 4.0, 20.0])
def test_the_noise_that_is_found_is_the_least_within_the_budget(epsilon):
    accountant = fq.Accountant(1e-5, 0.05, kind="rdp")
    noise = accountant.find_noise_multiplier(epsilon, 40)
    assert accountant.compute_epsilon(noise, 40) <= epsilon
    assert accountant.compute_epsilon(0.99 * noise, 40) > epsilon


def test_epsilon_of_no_noise_is_infinite_and_of_no_round_zero():
    accountant = fq.Accountant(1e-5, 0.5)
    assert accountant.compute_epsilon(0.0, 1) == math.inf
    assert accountant.compute_epsilon(0.0, 0) == 0.0


def test_noise_is_gaussian_and_follows_from_the_secret_alone():
    shapes = {"a": (300, 200), "b": (7,)}
    noise = draw_noise(SECRET, 3, 5, shapes, std=2.5)
    values = noise["a"].flatten().numpy()
    assert values.std() == pytest.approx(2.5, rel=0.015)
    assert stats.kstest(values / 2.5, "norm").pvalue > 1e-3
    again = draw_noise(SECRET, 3, 5, shapes, std=2.5)
    assert all(torch.equal(noise[n], again[n]) for n in shapes)
    for other in ((bytes(32), 3, 5), (SECRET, 4, 5), (SECRET, 3, 6)):
        assert abs(np.corrcoef(values, draw_noise(*other, shapes, 1.0)["a"].flatten())[0, 1]) < 0.02


def test_shares_of_noise_add_up_to_the_whole_noise():
    shares = [draw_noise(SECRET, c, 0, {"a": (40_000,)}, 3.0 / math.sqrt(16)) for c in range(16)]
    assert sum(share["a"] for share in shares).std() == pytest.approx(3.0, rel=0.02)


@pytest.fixture(scope="module")
def setup() -> Setup:
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.zeros(1, 6)
    clients = tuple(fq.Client(number, 1) for number in range(10))
    return Setup(model, fq.trace_structure(model, example), example, clients, rounds=1, seed=0)


def make_state(setup: Setup, noise: float = 0.0, clip: float = 1.0) -> State:
    memory = {MEMORY: {"clip": clip, "noise_multiplier": noise}}
    params = {n: t.detach().clone() for n, t in setup.model.state_dict().items()}
    return State(0, "train", params, memory)


def make_update(setup: Setup, state: State, client: int, subnet: Subnet, size: float) -> Update:
    generator = torch.Generator().manual_seed(client)
    old = fq.copy_subnet_tensors(state.params, setup.structure, subnet)
    new = {n: t + size * torch.randn(t.shape, generator=generator) for n, t in old.items()}
    return Update(client, (subnet,), (new,), 1.0, {})


def make_mean(population, rate: float = 0.5, **options) -> PrivateMean:
    return PrivateMean(lambda setup, state: population, rate, SECRET, **options)


WIDTHS = (1.0, 0.75, 0.5, 0.25)
MANY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(
    members=st.lists(
        st.tuples(st.sampled_from(WIDTHS), st.floats(0, 1e4), st.integers(0, 99)), max_size=6
    ),
    newcomer=st.tuples(st.sampled_from(WIDTHS), st.floats(0, 1e4), st.integers(100, 199)),
    clip=st.floats(1e-3, 1e3),
    per_ring=st.booleans(),
)
def test_neighboring_cohorts_have_sums_within_the_clipping_norm(
    setup, members, newcomer, clip, per_ring
):
    state = make_state(setup, clip=clip)
    holdings = {(setup.structure.subnet(width),): 3 for width in WIDTHS}
    rings = find_public_rings(setup, holdings)
    mean = make_mean(holdings, per_ring=per_ring)

    def sum_of(cohort):
        updates = [
            make_update(setup, state, seed, setup.structure.subnet(width), size)
            for width, size, seed in cohort
        ]
        return torch.cat(list(mean.sum_changes(rings, state, updates, clip).values()))

    moved = float((sum_of([*members, newcomer]) - sum_of(members)).norm())
    bound = clip
    if per_ring:
        held = rings.find_holding((setup.structure.subnet(newcomer[0]),))
        shares = share_clip(rings)
        bound *= math.hypot(*(shares[n] for n, ring in enumerate(rings) if held in ring.holders))
    assert moved <= bound * (1 + 1e-6) + 1e-9


def test_the_noise_that_is_added_has_the_stated_deviation_in_every_cell():
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(60, 200), nn.Linear(200, 10)), torch.zeros(1, 60)
    clients = tuple(fq.Client(number, 1) for number in range(10))
    large = Setup(model, fq.trace_structure(model, example), example, clients, rounds=1, seed=0)
    wide, narrow = (large.structure.subnet(1.0),), (large.structure.subnet(0.5),)
    state = make_state(large, noise=1.5, clip=2.0)
    aggregate = make_mean({wide: 4, narrow: 6}, rate=0.25).aggregate(large, state, [])
    noise = (aggregate.params["0.weight"] - state.params["0.weight"]).double()
    assert noise[:100].std() == pytest.approx(1.5 * 2.0 / (0.25 * 10), rel=0.03)
    assert noise[100:].std() == pytest.approx(1.5 * 2.0 / (0.25 * 4), rel=0.03)


def test_the_denominator_does_not_depend_on_who_answered(setup):
    state = make_state(setup, clip=1e9)
    whole, half = setup.structure.subnet(1.0), setup.structure.subnet(0.5)
    mean = make_mean({(whole,): 4, (half,): 2}, rate=0.5)
    update = make_update(setup, state, 0, half, 0.1)
    one = mean.aggregate(setup, state, [update]).params
    two = mean.aggregate(setup, state, [update, replace(update, client=1)]).params
    old = state.params
    for name, change in update.params[0].items():
        cells = tuple(slice(size) for size in change.shape)
        expected = (change - old[name][cells]) / (0.5 * 6)
        torch.testing.assert_close(one[name][cells] - old[name][cells], expected)
        torch.testing.assert_close(two[name][cells] - old[name][cells], 2 * expected)
    assert torch.equal(one["0.weight"][4:], old["0.weight"][4:])
    held = mean.aggregate(setup, state, []).trained("0.weight")
    assert bool(held.all())  # cells that may be held, whoever answered


def test_tensors_that_training_does_not_move_get_no_noise(setup):
    class WithTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.frozen = nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False)
            self.register_buffer("table", torch.ones(3))

        def forward(self, x):
            return self.frozen(self.layer(x * self.table))

    model, example = WithTable(), torch.zeros(1, 3)
    mine = replace(setup, model=model, structure=fq.trace_structure(model, example))
    state = make_state(mine, noise=1.0)
    new = make_mean({(Subnet(),): 5}).aggregate(mine, state, []).params
    assert torch.equal(new["table"], state.params["table"])
    assert torch.equal(new["frozen.weight"], state.params["frozen.weight"])
    assert not torch.equal(new["layer.weight"], state.params["layer.weight"])


def test_the_same_sum_gets_the_same_noise_and_another_sum_other_noise(setup):
    state, whole = make_state(setup, noise=1.0), setup.structure.subnet(1.0)
    mean = make_mean({(whole,): 5}, rate=1.0)
    update = make_update(setup, state, 0, whole, 1e-6)
    first, again, other = (
        mean.aggregate(setup, state, updates).params["0.weight"]
        for updates in ([update], [update], [])
    )
    assert torch.equal(first, again)
    assert (first - other).std() > 0.1 * first.std()  # not the tiny change alone


def test_adaptive_clipping_finds_the_quantile(setup):
    norms = np.linspace(0.1, 2.0, 200)
    state = make_state(setup, clip=10.0)
    adapt = AdaptClip(0.25, lr=0.3, expected=200.0, count_noise=5.0, secret=SECRET)
    for number in range(80):
        clip = state.method_state[MEMORY]["clip"]
        replies = tuple(
            Update(i, (), (), 1.0, {WITHIN: float(norm <= clip)}) for i, norm in enumerate(norms)
        )
        aggregate = Aggregate(state.params, lambda name: torch.ones(()), replies)
        state = replace(adapt.apply(setup, state, aggregate), round=number + 1)
    assert state.method_state[MEMORY]["clip"] == pytest.approx(np.quantile(norms, 0.25), rel=0.15)


def test_the_count_and_the_sum_together_are_one_release_of_the_stated_noise():
    on_sum = split_noise(1.2, count_noise=4.0)
    assert on_sum**-2 + (2 * 4.0) ** -2 == pytest.approx(1.2**-2)  # sensitivities 1 and 1/2
    with pytest.raises(ConfigError, match="cohort is too small"):
        split_noise(3.0, count_noise=1.0)


def test_poisson_cohorts_are_binomial_and_may_be_empty():
    clients = tuple(fq.Client(number, 1) for number in range(50))
    phase = Phase("train", 1, fraction=0.1)
    cohorts = [sample_cohort(clients, phase, seed, sampling="poisson") for seed in range(400)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert sizes.mean() == pytest.approx(5, abs=0.35)
    assert sizes.var() == pytest.approx(4.5, rel=0.25)  # not that of a fixed size, which is 0
    assert min(sizes) < 2
    asked = sample_cohort(clients, phase, 3, available={1, 2}, sampling="poisson")
    assert {client.id for client in asked} <= {1, 2}


def test_uniform_numbers_are_uniform():
    values = draw_uniform(SECRET, ("cohort", 1), 20_000)
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ConfigError, match="for the central mechanism"):
        fq.Privacy(epsilon=1.0, mechanism="local", clipping="rings")
    with pytest.raises(ConfigError, match="greater than 0"):
        fq.Privacy(epsilon=0.0)


@pytest.mark.parametrize("many", [0, 10**6])
def test_a_secret_poisson_draw_takes_every_client_independently_of_the_others(monkeypatch, many):
    """From gaps, as among very many clients, or client by client: the same distribution."""
    monkeypatch.setattr(noise, "MANY_CLIENTS", many)
    count, rate, draws = 7, 0.3, 4000
    taken = np.zeros((draws, count))
    for number in range(draws):
        taken[number, noise.draw_poisson(b"key", ("cohort", number), count, rate)] = 1
    spread = 4 * math.sqrt(rate * (1 - rate) / draws)
    np.testing.assert_allclose(taken.mean(0), rate, atol=spread)
    np.testing.assert_allclose(
        np.cov(taken.T), rate * (1 - rate) * np.eye(count), atol=4 * rate / math.sqrt(draws)
    )
    sizes = np.bincount(taken.sum(1).astype(int), minlength=count + 1) / draws
    expected = [math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(count + 1)]
    np.testing.assert_allclose(sizes, expected, atol=4 / math.sqrt(4 * draws))
    assert len(noise.draw_poisson(b"key", ("all",), count, 1.0)) == count


@pytest.mark.parametrize("many", [0, 10**6])
def test_a_secret_draw_of_some_rows_takes_every_set_as_often(monkeypatch, many):
    monkeypatch.setattr(noise, "MANY_CLIENTS", many)
    draws = 6000
    sets = Counter(
        tuple(noise.draw_rows(b"key", ("cohort", n), 5, 2).tolist()) for n in range(draws)
    )
    assert sorted(sets) == list(itertools.combinations(range(5), 2))
    assert max(abs(sets[one] / draws - 0.1) for one in sets) < 4 * math.sqrt(0.09 / draws)
    assert noise.draw_rows(b"key", (), 3, 9).tolist() == [0, 1, 2]


def test_a_secret_draw_among_very_many_clients_draws_as_many_numbers_as_it_takes(monkeypatch):
    drawn = []
    draw_uniform = noise.draw_uniform

    def count(secret, purpose, number):
        drawn.append(number)
        return draw_uniform(secret, purpose, number)

    monkeypatch.setattr(noise, "draw_uniform", count)
    rows = noise.draw_poisson(b"key", ("cohort", 1), 10**9, 1e-7)
    assert (np.diff(rows) > 0).all()
    assert 50 < len(rows) < 150
    assert len(noise.draw_rows(b"key", ("cohort", 1), 10**9, 100)) == 100
    assert sum(drawn) < 500
