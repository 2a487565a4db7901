"""The search for channels, against one that builds and asks every candidate anew."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt.data import to_examples
from fedquilt.errors import BudgetError
from fedquilt.federation.client import Task, Update
from fedquilt.federation.update import validate_update
from fedquilt.structure.budget import Budget
from fedquilt.structure.cost import Cost, compute_cost
from fedquilt.structure.create import declare_structure, trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.structure.structure import STATISTICS, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.context import ClientContext
from fedquilt.training.output_cache import find_cacheable_modules
from fedquilt.training.search import Search, shrink_group

CLASSES, COUNT = 4, 40  # examples of the client
HOME = (STATISTICS, "*num_batches_tracked")
SENT = (Subnet().excluding(*HOME),)
at_once = [Phase.explicit, Phase.reuse, Phase.generate]  # searches are too slow for shrinking


@dataclass(frozen=True, eq=False)
class Place:
    """A net, its structure, the tensors that a server would send, and a client with data."""

    model: nn.Module
    structure: Structure
    params: Mapping[str, Tensor]
    data: Any

    @property
    def context(self) -> ClientContext:
        return ClientContext(self.model, self.structure, {"train": {0: self.data}})

    @property
    def example(self) -> Tensor:
        return self.data.inputs[:1]

    def found(
        self, search: Search, seed: int = 0, on_progress: Callable[[float], None] | None = None
    ):
        context = self.context.for_client(on_progress=on_progress)
        return search.run(Task(0, SENT, self.params, search, seed), context).update

    def cost(self, subnet: Subnet) -> Cost:
        return compute_cost(self.model, self.structure, subnet.excluding(*HOME), self.example)


@torch.no_grad()
def answered(model: nn.Module, x: Tensor) -> Tensor:
    """Answers of a net that normalises every batch by itself."""
    model.eval()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
    answers: Tensor = model(x.clone())
    return answers


def centre(model: nn.Module, x: Tensor) -> None:
    """So that no class is answered more often than others."""
    *_, last = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    with torch.no_grad():
        last.bias -= answered(model, x).mean(0)


def images(shape: tuple[int, ...], seed: int, count: int = COUNT) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def traced(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Structure:
    return trace_structure(make(), torch.zeros(2, *shape))


def placed(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    seed: int,
    structure: Structure | None = None,
) -> Place:
    """A net that is mostly right on data like the client's, so that every channel counts."""
    structure = structure or traced(make, shape)
    torch.manual_seed(seed)
    model = make()
    x = images(shape, seed)
    centre(model, x)
    y = answered(model, x).argmax(-1)
    params = {n: t.detach().clone() for n, t in named_tensors(model).items()}
    with torch.no_grad():  # the model's own values do not matter
        for tensor in model.parameters():
            tensor.add_(1)
    return Place(model, structure, params, to_examples((x + 0.2 * images(shape, seed + 1), y)))


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU()),
        *(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.ReLU()),
        *(nn.Linear(10, 9), nn.ReLU(), nn.Linear(9, CLASSES)),
    )


class Mobile(nn.Module):
    """An inverted residual between a stem and a head, with normalisation everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6)
        self.branch = nn.Sequential(
            *(nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6()),
            *(nn.Conv2d(12, 12, 3, 1, 1, groups=12, bias=False), nn.BatchNorm2d(12), nn.ReLU6()),
            *(nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6)),
        )
        self.head, self.classifier = nn.Conv2d(6, 9, 1), nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        x = x + self.branch(x)
        return self.classifier(self.head(x).relu().mean((2, 3)))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6,)),
    "mobile": (Mobile, (1, 6, 6)),
}


@functools.cache
def place(name: str, seed: int = 0) -> Place:
    return placed(*NETS[name], seed)


# The search as the paper writes it: nothing is remembered, nothing is left out.


@dataclass(frozen=True)
class Judged:
    """A net built afresh and run on all examples."""

    hits: int
    params: int
    macs: int
    upload: int


@torch.no_grad()
def judged(place: Place, subnet: Subnet, batches: list[tuple[Tensor, Tensor]]) -> Judged:
    """Every batch normalised by itself; multiply-accumulates are counted where they happen."""
    small = build_module(place.model, place.structure, subnet, place.params)
    params = sum(w.numel() for w in small.parameters())
    travelling = place.structure.tensor_names(subnet.excluding(*HOME))
    upload = sum(t.nbytes for n, t in named_tensors(small).items() if n in travelling)
    hits = sum(int((answered(small, x).argmax(-1) == y).sum()) for x, y in batches)
    macs = 0

    def count(layer: nn.Module, _: Any, output: Tensor) -> None:
        nonlocal macs
        macs += layer.weight.numel() * output[0].numel() // layer.weight.shape[0]

    for layer in small.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.register_forward_hook(count)
    answered(small, batches[0][0])
    return Judged(hits, params, macs, upload)


def naive(place: Place, search: Search, seed: int = 0) -> tuple[dict[str, int], int, int]:
    """Algorithm 1, lines 14-21: the channels of every group, hits, steps."""
    structure, data, budget = place.structure, place.data, search.budget
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    rows = order[: search.examples].sort().values
    parts = -(-len(rows) // search.batch_size)
    batches = [(data.inputs[some], data.labels[some]) for some in rows.tensor_split(parts)]
    sizes = {g: structure.groups[g].size for g in structure.cut_groups()}
    floors = {g: math.ceil(n * search.smallest) for g, n in sizes.items() if g not in search.whole}

    def ask(counts: Mapping[str, int]) -> Judged:
        return judged(
            place, Subnet.from_channels({g: range(k) for g, k in counts.items()}), batches
        )

    if budget.width < 1:
        cut = {g: n if g in search.whole else math.ceil(n * budget.width) for g, n in sizes.items()}
        uniform = ask(cut)
        budget = replace(
            budget,
            params=min(uniform.params, budget.params or uniform.params),
            macs=min(uniform.macs, budget.macs or uniform.macs),
        )
    limits = {n: getattr(budget, n) for n in ("params", "macs", "upload") if getattr(budget, n)}

    def pressure(price: Judged) -> float:
        return sum(max(getattr(price, n) / limit, 1.0) for n, limit in limits.items())

    counts, steps, now = sizes, 0, ask(sizes)
    while any(getattr(now, name) > limit for name, limit in limits.items()):
        options = []
        for group, least in floors.items():
            if counts[group] > least:
                fewer = min(math.ceil(counts[group] * (1 - search.ratio)), counts[group] - 1)
                there = ask({**counts, group: max(fewer, least)})
                loss = now.hits - there.hits
                options.append((loss, pressure(there), group, max(fewer, least), there))
        _, _, group, fewer, now = min(options, key=lambda option: option[:3])
        counts, steps = {**counts, group: fewer}, steps + 1
    return counts, now.hits, steps


def counts_of(place: Place, update: Update) -> dict[str, int]:
    """The channels of every group; they are the leading ones."""
    (subnet,) = update.subnets
    counts = {g: place.structure.kept_count(subnet, g) for g in place.structure.cut_groups()}
    for group, count in counts.items():
        listed = subnet.channels(group)
        assert listed is None or listed.tolist() == list(range(count))
    return counts


def assert_naive(place: Place, search: Search, seed: int = 0) -> None:
    counts, hits, steps = naive(place, search, seed)
    update = place.found(search, seed)
    assert counts_of(place, update) == counts
    assert update.metrics["accuracy"] == pytest.approx(
        hits / min(len(place.data), search.examples or 10**9)
    )
    assert update.metrics["steps"] == steps
    assert steps > 2  # or this test would say nothing


PAPER = Search(Budget(width=0.4), local_params=HOME, smallest=0.1, batch_size=16, lazy=False)


@pytest.mark.parametrize(
    ("name", "seed"), [*(("mlp", seed) for seed in range(4)), ("mobile", 0), ("mobile", 1)]
)
def test_without_shortcuts_it_is_the_search_that_builds_every_candidate(name, seed):
    ratio = 0.1 if name == "mlp" else 0.3
    assert_naive(place(name, seed), replace(PAPER, ratio=ratio), seed)


@pytest.mark.parametrize("kind", ["params", "macs", "upload"])
def test_any_one_limit_is_searched_for(kind):
    spot = place("mobile")
    whole = spot.cost(Subnet())
    limit = {"params": whole.params, "macs": whole.macs, "upload": whole.bytes}[kind] // 2
    assert_naive(spot, replace(PAPER, budget=Budget(**{kind: limit}), ratio=0.3))


@pytest.mark.parametrize(
    "changed",
    [
        {"ratio": 0.35},
        {"smallest": 0.3},
        {"whole": ("0",)},
        {"examples": 12},
        {"examples": None, "batch_size": 7},
        {"budget": Budget(0.6, params=150, upload=700)},
    ],
    ids=str,
)
def test_settings_mean_what_they_say(changed):
    assert_naive(place("mlp"), replace(PAPER, **changed))


def test_what_stays_at_home_costs_no_upload():
    spot = place("mlp")
    whole = spot.cost(Subnet()).bytes  # without what stays at home
    search = replace(PAPER, budget=Budget(upload=whole))
    assert spot.found(search).metrics["steps"] == 0
    assert spot.found(replace(search, local_params=())).metrics["steps"] > 0


# What a client has to be able to rely on, whatever it can afford and whatever its data.


def fewer(count: int, percent: int, least: int) -> int:
    """⌈θ (1 - R)⌉ in whole numbers, at least one less, at least so many."""
    return max(min(-(-count * (100 - percent) // 100), count - 1), least)


def chain(size: int, percent: int, least: int) -> list[int]:
    """Every number of channels that a group of this size can have."""
    found = [size]
    while found[-1] > least:
        found.append(fewer(found[-1], percent, least))
    return found


@given(count=st.integers(2, 2000), percent=st.integers(1, 99), data=st.data())
def test_a_step_takes_a_part_of_the_channels_and_at_least_one(count, percent, data):
    least = data.draw(st.integers(1, count - 1))
    net = nn.Sequential(nn.Linear(1, count), nn.Linear(count, 1))
    axes = {"0.weight": ("h", None), "0.bias": ("h",), "1.weight": (None, "h")}
    structure = declare_structure(net, axes)
    subnet = shrink_group(structure, Subnet(), "h", percent / 100, least)
    assert subnet == Subnet.from_channels({"h": range(fewer(count, percent, least))})


FIELDS = {"params": "params", "macs": "macs", "upload": "bytes", "memory": "memory"}
seeds = st.integers(0, 10**6)


def budget_between(low: Cost, high: Cost, shares: Mapping[str, float], width: float) -> Budget:
    """Limits somewhere between two costs."""
    limits = {
        kind: getattr(low, FIELDS[kind])
        + int(share * (getattr(high, FIELDS[kind]) - getattr(low, FIELDS[kind])))
        for kind, share in shares.items()
    }
    return Budget(width, **limits)


def with_other_data(spot: Place, seed: int, count: int) -> Place:
    x = images(tuple(spot.example.shape[1:]), seed, count)
    return replace(spot, data=to_examples((x, torch.arange(count) % CLASSES)))


@given(
    shares=st.dictionaries(st.sampled_from(["params", "macs", "upload"]), st.floats(0, 1.1)),
    width=st.floats(0.5, 1) | st.just(1.0),
    percent=st.integers(3, 60),
    smallest=st.sampled_from([0.1, 0.25, 0.5]),
    whole=st.sets(st.sampled_from(["0", "3", "6"]), max_size=2),
    lazy=st.booleans(),
    seed=seeds,
    count=st.integers(2, 30),
)
@settings(max_examples=10, deadline=None, phases=at_once)
def test_what_is_found_is_within_the_budget_and_no_narrower_than_it_may_be(
    shares, width, percent, smallest, whole, lazy, seed, count
):
    check_laws(shares, width, percent, smallest, whole, lazy, seed, count)


@given(
    shares=st.dictionaries(st.sampled_from(["params", "macs"]), st.floats(0, 1.1)),
    memory=st.floats(0, 1.1),
    percent=st.integers(20, 60),
    lazy=st.booleans(),
    seed=seeds,
)
@settings(max_examples=4, deadline=None, phases=at_once)
def test_memory_is_a_limit_as_others_are(shares, memory, percent, lazy, seed):
    check_laws({**shares, "memory": memory}, 1.0, percent, 0.25, {"3"}, lazy, seed, 12)


def check_laws(shares, width, percent, smallest, whole, lazy, seed, count) -> None:
    spot = with_other_data(place("mlp"), seed, count)
    structure, groups = spot.structure, spot.structure.cut_groups()
    least = {
        g: structure.groups[g].size
        if g in whole
        else math.ceil(structure.groups[g].size * smallest)
        for g in groups
    }
    low = spot.cost(structure.subnet(channels={g: range(n) for g, n in least.items()}))
    budget = budget_between(low, spot.cost(Subnet()), shares, width)
    search = Search(
        budget, percent / 100, smallest, tuple(whole), HOME, examples=20, batch_size=8, lazy=lazy
    )
    told: list[float] = []
    update = spot.found(search, seed, told.append)
    counts, price = counts_of(spot, update), spot.cost(update.subnets[0].shape)
    assert budget.allows(price)
    if width < 1:
        uniform = spot.cost(structure.subnet({g: width for g in groups if g not in whole}))
        assert price.params <= uniform.params
        assert price.macs <= uniform.macs
    chains = {g: chain(structure.groups[g].size, percent, least[g]) for g in groups}
    assert update.metrics["steps"] == sum(chains[g].index(counts[g]) for g in groups)
    assert len(told) == update.metrics["steps"]
    assert [0.0, *told] == sorted([0.0, *told])
    assert [done for done in told if done >= 1] == told[-1:]  # at the end, and not before


@pytest.mark.parametrize("kind", FIELDS)
def test_the_smallest_net_meets_a_budget_of_its_own_cost_and_nothing_meets_less(kind):
    spot = place("mlp")
    search = Search(Budget(), ratio=0.4, smallest=0.3, whole=("3",), local_params=HOME)
    floor = search.smallest_subnet(spot.structure)
    assert floor == Subnet.from_channels({"0": range(4), "6": range(3)})
    price = spot.cost(floor)
    cheapest = getattr(price, FIELDS[kind])
    found = spot.found(replace(search, budget=Budget(**{kind: cheapest})))
    assert getattr(spot.cost(found.subnets[0].shape), FIELDS[kind]) == cheapest
    with pytest.raises(BudgetError) as problem:
        spot.found(replace(search, budget=Budget(**{kind: cheapest - 1})))
    assert f"no architecture meets Budget(width=1.0, {kind}={cheapest - 1})" in str(problem.value)
    assert str(price) in str(problem.value)


@pytest.mark.parametrize("kind", ["params", "macs"])
def test_the_smallest_net_is_found_where_no_other_is_within_the_budget(kind):
    spot = place("mlp")
    search = replace(PAPER, smallest=0.3)
    floor = search.smallest_subnet(spot.structure)
    limit = getattr(spot.cost(floor), kind)
    found = spot.found(replace(search, budget=Budget(**{kind: limit})))
    assert found.subnets[0].shape == floor
    assert spot.found(replace(search, budget=Budget(width=0.3))).subnets[0].shape == floor


def test_a_width_below_the_smallest_is_refused():
    with pytest.raises(BudgetError, match=r"no architecture meets Budget\(width=0.2\)"):
        place("mlp").found(Search(Budget(width=0.2), smallest=0.3))


@pytest.mark.parametrize("kinds", [(), ("params", "macs", "upload", "memory")])
def test_the_whole_net_needs_no_step_where_it_is_affordable(kinds):
    spot, told = place("mlp"), []
    whole = spot.cost(Subnet())
    budget = Budget(**{kind: getattr(whole, FIELDS[kind]) for kind in kinds})
    update = spot.found(replace(PAPER, budget=budget), on_progress=told.append)
    assert update.subnets[0].shape == Subnet()
    assert (update.metrics["steps"], update.metrics["evaluations"]) == (0, 1)
    assert told == []


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("seed", range(2))
def test_asking_again_only_who_may_be_best_takes_fewer_evaluations(name, seed):
    spot = place(name, seed)
    search = replace(PAPER, ratio=0.15)
    every, few = (spot.found(replace(search, lazy=lazy), seed) for lazy in (False, True))
    assert few.metrics["evaluations"] < every.metrics["evaluations"]
    uniform = spot.cost(spot.structure.subnet(0.4))
    price = spot.cost(few.subnets[0].shape)
    assert price.params <= uniform.params
    assert price.macs <= uniform.macs


@pytest.mark.parametrize("lazy", [True, False])
def test_at_least_every_step_is_evaluated_and_at_most_every_group_at_every_step(lazy):
    spot = place("mlp")
    found = spot.found(replace(PAPER, lazy=lazy)).metrics
    groups = len(spot.structure.cut_groups())
    assert 1 + found["steps"] < found["evaluations"] <= 1 + (groups + 1) * found["steps"]


def test_only_numbers_of_channels_leave_the_client():
    spot = place("mlp")
    update = spot.found(PAPER)
    assert update.params == ({},)
    assert update.weight == 0
    assert (update.client, len(update.subnets)) == (0, 1)
    assert spot.structure.tensor_names(update.subnets[0]) == []
    assert validate_update(update, spot.structure, spot.params) is update


@pytest.mark.parametrize("lazy", [True, False])
def test_the_same_seed_finds_the_same(lazy):
    spot = place("mobile")
    search = replace(PAPER, lazy=lazy, examples=20, ratio=0.3)
    one, same = (spot.found(search, seed=4) for _ in range(2))
    assert (one.subnets, one.metrics) == (same.subnets, same.metrics)


class Watched:
    """A client's data that remembers what it was asked for."""

    def __init__(self, examples: Any) -> None:
        self.examples, self.asked = examples, []

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, rows, generator=None):
        assert generator is None  # no augmentation
        self.asked.append(rows.tolist())
        return self.examples.batch(rows)


@given(
    count=st.integers(2, COUNT),
    examples=st.integers(2, 50) | st.none(),
    batch_size=st.integers(3, 50),
    seed=seeds,
)
@settings(max_examples=5, deadline=None, phases=at_once)
def test_as_many_examples_are_drawn_as_are_asked_for_each_once(count, examples, batch_size, seed):
    spot = place("mlp")
    watched = Watched(spot.data.select(torch.arange(count)))
    search = replace(PAPER, budget=Budget(), examples=examples, batch_size=batch_size)
    context = ClientContext(spot.model, spot.structure, {"train": {0: watched}})
    search.run(Task(0, SENT, spot.params, search, seed), context)
    rows = [row for batch in watched.asked for row in batch]
    assert len(set(rows)) == len(rows) == min(count, examples or count)
    lengths = {len(batch) for batch in watched.asked}
    assert max(lengths) <= batch_size
    assert max(lengths) - min(lengths) <= 1


def test_another_seed_draws_other_examples():
    spot = place("mlp")
    asked = []
    for seed in (0, 1):
        watched = Watched(spot.data)
        context = ClientContext(spot.model, spot.structure, {"train": {0: watched}})
        search = replace(PAPER, budget=Budget(), examples=10)
        search.run(Task(0, SENT, spot.params, search, seed), context)
        asked.append(watched.asked)
    assert asked[0] != asked[1]


def test_nothing_given_is_changed_and_statistics_are_not_needed():
    spot = place("mobile")
    before = {n: t.clone() for n, t in spot.params.items()}
    own = {n: t.clone() for n, t in spot.model.state_dict().items()}
    forwards = {m: m.forward.__func__ for m in spot.model.modules()}
    search = replace(PAPER, ratio=0.3)
    found = spot.found(search)
    assert all(t.equal(before[n]) for n, t in spot.params.items())
    assert all(t.equal(own[n]) for n, t in spot.model.state_dict().items())
    assert {m: m.forward.__func__ for m in spot.model.modules()} == forwards
    sent = {n: t for n, t in spot.params.items() if n in spot.structure.tensor_names(SENT[0])}
    assert len(sent) < len(spot.params)
    assert replace(spot, params=sent).found(search).subnets == found.subnets


class Watching(nn.Module):
    """Remembers whether gradients were wanted where real numbers came by."""

    seen: list[bool] = []  # noqa: RUF012  # of the class, so that copies share it

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            self.seen.append(torch.is_grad_enabled() or x.requires_grad)
        return x


def test_no_gradient_is_computed():
    spot = placed(lambda: mlp().append(Watching()), (6,), 0)
    Watching.seen.clear()
    spot.found(PAPER)
    assert len(Watching.seen) > 5
    assert not any(Watching.seen)
    assert not any(t.requires_grad for t in spot.params.values())


# Outputs of parts of the net are remembered: that must never show, however nets are written.


class Summed(nn.Module):
    """A residual sum that changes its input, or what the branch gave, in place."""

    def __init__(self, size: int, *, into_input: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(size, size // 2), nn.Linear(size // 2, size)
        self.relu, self.into_input = nn.ReLU(inplace=True), into_input

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(self.relu(self.inner(x)))
        if self.into_input:
            x += y
            return x
        y += x
        return F.relu(y, inplace=True)


class Written(nn.Module):
    """Layers between which a function computes whatever it likes."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code
        self.a, self.b, self.c = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 7)
        self.last, self.scale = nn.Linear(7, CLASSES), nn.Parameter(torch.linspace(0.5, 2, 9))
        self.same, self.kept = nn.Identity(), []

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


class Masked(nn.Linear):
    """A layer with more inputs than one."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return super().forward(x if mask is None else x * mask) * scale


class Told(nn.Module):
    """Inputs by keyword, by position, and both for one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Masked(6, 8), Masked(8, 8), Masked(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x=x, mask=x > 0)
        y = self.b(y, None, scale=0.5) + self.b(y, y > 0) + self.b(y)
        return self.c(x=y.relu())


def in_place_between(self: Any, x: Tensor) -> Tensor:
    y = F.relu_(self.a(x))
    z = self.b(y).mul_(2).add_(1)
    return self.last(F.relu(self.c(z), inplace=True))


def in_place_after_use(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    z = self.b(y)
    y.mul_(z.sigmoid())
    return self.last(self.c(y + z))


def in_place_through_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    same = self.same(y)
    same.unsqueeze(0).clamp_(min=0)
    return self.last(self.c(self.b(y)).tanh())


def used_again(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    for _ in range(3):
        y = self.b(y).tanh()
    return self.last(self.c(y) + self.c(self.a(x)))


def weights_outside(self: Any, x: Tensor) -> Tensor:
    y = self.scale * self.a(x)
    return self.last(self.c(F.linear(y.relu(), self.b.weight, self.b.bias).relu()))


def input_used_twice(self: Any, x: Tensor) -> Tensor:
    return self.last(self.c(self.b(self.a(x).relu()).relu() + self.a(-x)))


class Joined(nn.Linear):
    """Reads all that was made before."""

    def forward(self, parts: list[Tensor]) -> Tensor:
        return super().forward(torch.cat(parts, 1).relu())


class Dense(nn.Module):
    """What is made is put into one list, which is filled anew every time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.made = nn.Linear(6, 12), nn.Linear(12, 9), []
        self.joined = Joined(15, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.made.clear()
        self.made.append(x)
        self.made.append(self.b(self.a(x).relu()))
        return self.joined(self.made)


class Tied(nn.Module):
    """One weight in two layers, which see the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12, bias=False), nn.Linear(6, 12, bias=False)
        self.b.weight = self.a.weight
        self.c, self.last = nn.Linear(12, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.c(self.a(x).relu() * self.b(x).tanh()).relu())


class Attention(nn.Module):
    """The image's rows attend to each other; a number of channels is kept beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.size = nn.Linear(6, 8), 8
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2))
        weights = (self.q(x) @ self.k(x).transpose(1, 2) / self.size**0.5).softmax(-1)
        return self.last((x + weights @ self.v(x)).mean(1))


class Gated(nn.Linear):
    """A layer whose answer is no tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.sigmoid()


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = Gated(6, 9), Gated(9, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.a(x)
        y, gate = self.b(y * gate)
        return self.last(y * gate)


def in_place_layers() -> nn.Module:
    return nn.Sequential(
        nn.ReLU(inplace=True),
        *(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True)),
        *(nn.Conv2d(6, 8, 3), nn.Hardswish(inplace=True), nn.Flatten(), nn.ReLU(inplace=True)),
        *(nn.Linear(32, 9), nn.Dropout(0.5, inplace=True), nn.Linear(9, CLASSES)),
    )


def in_place_sums(*, into_input: bool) -> nn.Module:
    blocks = [Summed(8, into_input=into_input) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, CLASSES))


def in_place_blocks(count: int) -> nn.Module:
    blocks = [Summed(6, into_input=i % 3 == 1) for i in range(count)]
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(*blocks), nn.Linear(6, CLASSES))


def many_blocks() -> nn.Module:
    """So that a block is remembered as one."""
    return in_place_blocks(8)


AWKWARD: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers in place": (in_place_layers, (1, 6, 6)),
    "sums into the branch": (functools.partial(in_place_sums, into_input=False), (6,)),
    "sums into the input": (functools.partial(in_place_sums, into_input=True), (6,)),
    "many blocks": (many_blocks, (6,)),
    "keyword inputs": (Told, (6,)),
    "tied weights": (Tied, (6,)),
    "a list that stays": (Dense, (6,)),
    "attention": (Attention, (1, 6, 6)),
    "pairs": (Gates, (6,)),
    **{
        code.__name__.replace("_", " "): (functools.partial(Written, code), (6,))
        for code in (
            in_place_between,
            in_place_after_use,
            in_place_through_a_view,
            used_again,
            weights_outside,
            input_used_twice,
        )
    },
}


@pytest.mark.filterwarnings("ignore::fedquilt.errors.StructureWarning")  # of a scale not used
@pytest.mark.parametrize("name", AWKWARD)
def test_what_is_remembered_never_shows(name):
    spot = placed(*AWKWARD[name], seed=0)
    params = sum(w.numel() for w in spot.model.parameters())
    assert_naive(spot, replace(PAPER, budget=Budget(params=params // 2), ratio=0.3))


class Branches(nn.Module):
    """One layer that is a part of two."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Linear(6, 12)
        self.left = nn.Sequential(stem, nn.ReLU(), nn.Linear(12, 7))
        self.right = nn.Sequential(stem, nn.Tanh(), nn.Linear(12, 7))
        self.last = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.left(x) * self.right(x))


class Centred(nn.Module):
    """Changes the very data it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 7)
        self.last = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.last(self.b(self.a(x).relu()).relu())


DECLARED = {
    Branches: {
        **{"left.0.weight": ("h", None), "left.0.bias": ("h",), "left.2.weight": ("k", "h")},
        **{"left.2.bias": ("k",), "right.2.weight": ("k", "h"), "right.2.bias": ("k",)},
        "last.weight": (None, "k"),
    },
    Centred: {
        **{"a.weight": ("h", None), "a.bias": ("h",), "b.weight": ("k", "h"), "b.bias": ("k",)},
        "last.weight": (None, "k"),
    },
}


@pytest.mark.parametrize("make", DECLARED)
def test_nor_in_nets_that_cannot_be_traced(make):
    spot = placed(make, (6,), 0, declare_structure(make(), DECLARED[make]))
    params = sum(w.numel() for w in spot.model.parameters())
    before = spot.data.inputs.clone()
    assert_naive(spot, replace(PAPER, budget=Budget(params=params // 2), ratio=0.25))
    assert spot.data.inputs.equal(before)


@pytest.mark.parametrize("make", [mlp, Mobile, many_blocks, in_place_layers, Dense])
def test_units_are_apart_and_small_or_cannot_be_opened(make):
    model = make()
    found = find_cacheable_modules(model)
    total = sum(w.numel() for w in model.parameters())
    assert len(found) > 2
    for (_, one), (_, other) in itertools.permutations(found.items(), 2):
        assert one not in set(other.modules())
    for name, unit in found.items():
        assert model.get_submodule(name) is unit
        size = sum(w.numel() for w in unit.parameters())
        assert size <= total / 8 or not list(unit.children())
    covered = {id(w) for unit in found.values() for w in unit.parameters()}
    assert covered == {id(w) for w in model.parameters()}


def test_a_block_is_a_unit_where_there_are_many():
    assert isinstance(find_cacheable_modules(many_blocks())["1.4"], Summed)
    assert "1.1.inner" in find_cacheable_modules(in_place_blocks(2))
