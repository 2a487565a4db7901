"""Costs are computed without training; here they are counted by hand or measured for real."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedquilt.errors import BudgetError
from fedquilt.models import make_model
from fedquilt.models.adds import TextLSTM
from fedquilt.structure import cost
from fedquilt.structure.budget import Budget, fit_budget
from fedquilt.structure.cost import (
    _list_even_groups,
    _measure_cost,
    _Workload,
    compute_cost,
    count_macs_by_layer,
)
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.structure.groups import Group, Span
from fedquilt.structure.measure import _StorageMeter
from fedquilt.structure.structure import STATISTICS, Structure
from fedquilt.structure.tensors import named_tensors

from .nets import ZOO, structured
from .test_law5 import some_channels

IMAGE = torch.zeros(1, 3, 12, 12)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 10),
    )
    return model, trace_structure(model, IMAGE)


def test_parameters_bytes_and_macs_are_those_counted_by_hand(net):
    model, structure = net
    found = compute_cost(model, structure, structure.subnet(0.5), IMAGE)
    conv1, conv2, linear = 3 * 4 * 9, 4 * 8 * 9, 8 * 16 * 10
    params = (conv1 + 4) + (4 + 4) + (conv2 + 8) + (linear + 10)
    assert found.params == params
    assert found.bytes == 4 * (params + 4 + 4) + 8  # statistics, and the int64 counter
    assert found.macs == conv1 * 12 * 12 + conv2 * 4 * 4 + linear


def test_tensors_left_out_are_not_sent(net):
    model, structure = net
    whole, less = structure.subnet(0.5), structure.subnet(0.5).excluding(STATISTICS)
    saved = (
        compute_cost(model, structure, whole, IMAGE).bytes
        - compute_cost(model, structure, less, IMAGE).bytes
    )
    assert saved == 2 * 4 * 4  # mean and variance of four channels


def test_attention_is_counted_as_its_matrix_products():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(5, 16), layer, nn.Linear(16, 3))
    example, length = torch.zeros(1, 7, 5), 7
    structure = trace_structure(model, example)
    linear = length * (5 * 16 + 4 * 16 * 16 + 2 * 16 * 32 + 16 * 3)
    assert (
        compute_cost(model, structure, structure.subnet(), example).macs
        == linear + 2 * length**2 * 16
    )


@pytest.mark.parametrize("width", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("name", ["heterofl-cnn", "heterofl-resnet18", "mlp"])
def test_predicted_memory_is_within_a_quarter_of_a_real_step(name, width):
    example = (
        torch.zeros(1, 1, 28, 28) if name != "heterofl-resnet18" else torch.zeros(1, 3, 32, 32)
    )
    model = make_model(name, {})
    structure = trace_structure(model, example)
    predicted = compute_cost(
        model, structure, structure.subnet(width), example, batch_size=16
    ).memory
    assert predicted == pytest.approx(real_step(model, structure, width, example), rel=0.25)


def real_step(model, structure, width, example):
    """Bytes alive at the worst moment of a second step with momentum, on real tensors."""
    small = build_module(model, structure, structure.subnet(width)).train()
    x = torch.randn(16, *example.shape[1:])
    y = torch.randint(10, (16,))
    ledger = _StorageMeter()
    with ledger:
        sgd = torch.optim.SGD(small.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            sgd.zero_grad()
            F.cross_entropy(small(x), y).backward()
            sgd.step()
    return ledger.peak + x.nbytes + sum(t.nbytes for t in small.state_dict().values())


def test_costing_leaves_the_model_alone(net):
    model, structure = net
    before = copy.deepcopy(model.state_dict())
    compute_cost(model, structure, structure.subnet(0.3), IMAGE)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["params", "macs", "memory", "upload"]), st.floats(0.05, 1.2), st.data())
def test_fit_finds_the_widest_subnet_within_the_limit(net, kind, share, data):
    model, structure = net
    field = {"upload": "bytes"}.get(kind, kind)

    def price(width):
        return getattr(compute_cost(model, structure, structure.subnet(width), IMAGE), field)

    limit = max(int(price(1.0) * share), price(1 / 16))
    width, subnet = fit_budget(model, structure, Budget(**{kind: limit}), IMAGE)
    assert price(width) <= limit
    assert subnet == structure.subnet(width)
    wider = [k / 16 for k in range(1, 17) if k / 16 > width]
    assert not wider or price(wider[0]) > limit


def test_a_budget_that_nothing_meets_names_the_smallest_cost(net):
    model, structure = net
    with pytest.raises(BudgetError, match=r"smallest possible costs Cost\(params="):
        fit_budget(model, structure, Budget(params=5), IMAGE)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"width": -1}, {"width": 2}, {"params": 0}])
def test_budgets_that_make_no_sense_are_refused(wrong):
    with pytest.raises(BudgetError, match="got"):
        Budget(**wrong)


@pytest.mark.parametrize("options", [{}, {"bidirectional": False, "every_position": True}])
def test_macs_of_a_recurrent_net_grow_by_the_same_with_every_token(options):
    model = TextLSTM(5, embedding=3, hidden=4, head=6, **options)
    structure = trace_structure(model, torch.zeros(1, 3, dtype=torch.int64))
    directions, positions = (2, 1) if not options else (1, 21)
    gates = 4 * 4 * (3 + 4) + 4 * 4 * (4 * directions + 4)  # of both layers, at each token
    expected = 21 * directions * gates + positions * (4 * directions * 6 + 6 * 5)
    text = torch.zeros(1, 21, dtype=torch.int64)
    found = compute_cost(model, structure, structure.subnet(1.0), text)
    assert found.macs == expected
    assert compute_cost(model, structure, structure.subnet(1.0), text, memory=False) == replace(
        found, memory=0
    )


def test_a_recurrent_net_of_one_length_is_counted_on_it():
    class FixedLength(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(5, 3), nn.LSTM(3, 4, batch_first=True)
            self.out = nn.Linear(12 * 4, 2)

        def forward(self, tokens):
            return self.out(self.lstm(self.embedding(tokens))[0].flatten(1))

    text = torch.zeros(1, 12, dtype=torch.int64)
    structure = trace_structure(FixedLength(), text)
    found = compute_cost(FixedLength(), structure, structure.subnet(1.0), text, memory=False)
    assert found.macs == 12 * 4 * 4 * (3 + 4) + 12 * 4 * 2


@pytest.mark.parametrize("name", ZOO)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=2, deadline=None)
def test_channels_of_any_kind_cost_what_their_net_does(name, seed):
    model, structure = structured(name)
    subnet, example = some_channels(structure, None, seed), ZOO[name].example
    found = compute_cost(model, structure, subnet, example, memory=False)
    small = build_module(model, structure, subnet)
    assert found.params == sum(p.numel() for p in small.parameters())
    assert found.bytes == sum(t.nbytes for t in named_tensors(small).values())
    workload = _Workload(model, (), example)
    assert found == _measure_cost.__wrapped__(structure, workload, subnet, None)


def test_methods_that_draw_other_channels_in_every_round_ask_for_one_price(net, monkeypatch):
    model, structure = net
    counted = []
    count = cost.count_macs
    monkeypatch.setattr(cost, "count_macs", lambda *a: counted.append(a) or count(*a))
    for seed in range(9):
        drawn = some_channels(structure, 0.5, seed)
        assert compute_cost(model, structure, drawn, IMAGE) == compute_cost(
            model, structure, structure.subnet(0.5), IMAGE
        )
    assert len(counted) <= 1


class Lengths(nn.Module):
    """Reads texts up to where they end, and so needs to know what is in them."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 3)

    def forward(self, texts):
        """Logits."""
        ends = (texts != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(texts), ends, batch_first=True, enforce_sorted=False
        )
        return self.head(self.drop(self.lstm(packed)[1][0][-1]))


def test_a_net_that_looks_at_its_input_is_counted_on_the_example():
    model, example = Lengths(), torch.tensor([[3, 4, 5, 0], [6, 7, 8, 0]])
    structure = trace_structure(model, example)
    words, state = (
        structure.kept_count(structure.subnet(0.5), g) for g in ("words:2", "lstm.weight_ih_l0")
    )
    before = torch.random.get_rng_state()
    found = compute_cost(model, structure, structure.subnet(0.5), example)
    assert torch.random.get_rng_state().equal(before)  # as if nothing had been run
    assert found.macs == 3 * 4 * state * (words + state) + 3 * state  # three words are read
    assert found.memory > 4 * found.params


def test_channels_that_an_axis_has_more_often_than_others_have_their_own_price():
    uneven = (Span("h", (0, 1, 2)), Span("h", (0,)))
    axes = {"a": ((Span("h", (0, 1, 2)),), (Span("k", (1, 0)),)), "b": (uneven, None)}
    groups = {"h": Group("h", 3), "k": Group("k", 2)}
    structure = Structure(groups, axes, {"a": (3, 2), "b": (4, 5)})
    assert _list_even_groups(structure) == {"k"}


class Latent(nn.Module):
    """Queries that are parameters, laid over the batch on their way into a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, 8))
        self.ask, self.key, self.out = nn.Linear(8, 8), nn.Linear(3, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.ask(self.queries.expand(len(x), -1, -1)), self.key(x)
        return self.out(((query @ key.transpose(1, 2)).softmax(-1) @ key).mean(1))


def test_parameters_that_are_expanded_into_a_layer_are_counted():
    model, example = Latent(), torch.zeros(2, 6, 3)
    structure = trace_structure(model, example)
    found = compute_cost(model, structure, structure.subnet(), example)
    attention = 2 * 4 * 6 * 8
    assert found.macs == 4 * 8 * 8 + 6 * 3 * 8 + attention + 8 * 5
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert count_macs_by_layer(model, structure, example)["ask"] == 4 * 8 * 8
