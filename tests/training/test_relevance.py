"""Relevance of channels (LRP, z⁺ rule): against Eq. 11 by hand, and laws that hold for any net."""

from __future__ import annotations

import copy
import itertools
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.models import make_model
from fedquilt.training.gating import find_gateable_groups
from fedquilt.training.relevance import compute_relevance, require_relevance
from fedquilt.training.tracking import without_running_stats


def traced(net, example, exclude=()):
    structure = fq.trace_structure(net, example, exclude=exclude)
    return structure, find_gateable_groups(net, structure, example)


def found(net, x, y):
    structure, groups = traced(net, x)
    return compute_relevance(net, structure, groups, x, y)


def declared(net, *layers):
    """One group for the outputs of each layer but the last, which the next takes in."""
    axes = {}
    for before, after in itertools.pairwise(layers):
        given = axes.get(f"{before}.weight", (None, None))
        axes[f"{before}.weight"] = (before, given[1])
        axes[f"{after}.weight"] = (None, before)
    return fq.declare_structure(net, axes)


@torch.no_grad()
def answers(net, x):
    """The classes that the net itself would say, whose logits are positive here."""
    values, labels = net.eval()(x).max(-1)
    assert (values > 0).all()
    return labels


@torch.no_grad()
def sizes(net, x, y):
    """What goes in at the top: the size of the true class' logit of every example."""
    return net.eval()(x).gather(-1, y.unsqueeze(-1)).squeeze(-1).abs()


def matrix(layer, shape):
    """A layer without bias as a matrix (outputs, inputs), for one example."""
    count = int(np.prod(shape))
    with torch.no_grad():
        rows = layer(torch.eye(count, dtype=torch.float64).view(count, *shape))
    return rows.flatten(1).T.numpy()


def down(relevance, inputs, weights):
    """Eq. 11, one number at a time: R_i = Σ_j (a_i w_ij)⁺ / Σ_i' (a_i' w_i'j)⁺ R_j."""
    result = np.zeros(len(inputs))
    for j, row in enumerate(weights):
        parts = [max(a * w, 0.0) for a, w in zip(inputs, row, strict=True)]
        if sum(parts) > 0:
            for i, part in enumerate(parts):
                result[i] += part / sum(parts) * relevance[j]
    return result


class Deep(nn.Module):
    """Linear layers with biases; ``between`` may leave negative numbers."""

    def __init__(self, sizes, between) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.between = between

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = self.between(layer(x))
        return self.layers[-1](x)


@settings(max_examples=8, deadline=None)
@given(
    widths=st.lists(st.integers(2, 6), min_size=1, max_size=3),
    between=st.sampled_from([torch.relu, torch.tanh, F.gelu]),
    seed=st.integers(0, 2**20),
)
def test_linear_layers_follow_eq_11(widths, between, seed):
    torch.manual_seed(seed)
    net = Deep([5, *widths, 3], between)
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    groups = [f"layers.{i}" for i in range(len(widths))]
    structure = declared(net, *groups, f"layers.{len(widths)}")
    expected = [np.zeros(width) for width in widths]
    for example, label in zip(x, y, strict=True):
        values = [example.detach()]
        with torch.no_grad():
            for layer in net.layers[:-1]:
                values.append(between(layer(values[-1])))
            logit = net.layers[-1](values[-1])[label]
        relevance = np.zeros(3)
        relevance[label] = abs(float(logit))
        for i in reversed(range(len(widths))):
            weights = net.layers[i + 1].weight.detach().double().numpy()
            relevance = down(relevance, values[i + 1].double().numpy(), weights)
            expected[i] += relevance
    result = compute_relevance(net, structure, groups, x, y)
    for group, values in zip(groups, expected, strict=True):
        np.testing.assert_allclose(result[group].numpy(), values, rtol=2e-4, atol=1e-6)


class Branches(nn.Module):
    """Sums and means of numbers of both signs, over positions; a value that two layers take in."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(3, 4), nn.Linear(4, 5)
        self.left, self.right = nn.Linear(5, 6), nn.Linear(5, 6)
        self.classifier = nn.Linear(6, 3)

    def parts(self, x):
        below = self.below(x).relu()
        above = self.above(below).tanh()
        sides = self.left(above).tanh(), self.right(above).tanh()
        total = sides[0] + sides[1]
        return below, above, sides, total, total.mean(1)

    def forward(self, x):
        return self.classifier(self.parts(x)[-1])


@pytest.mark.parametrize("seed", range(3))
def test_sums_and_means_follow_eq_11(seed):
    torch.manual_seed(seed)
    net = Branches()
    x, y = torch.randn(4, 7, 3), torch.randint(3, (4,))
    axes = {"below.weight": ("below", None), "above.weight": ("above", "below")}
    axes |= {f"{side}.weight": (None, "above") for side in ("left", "right")}
    result = compute_relevance(net, fq.declare_structure(net, axes), ["below", "above"], x, y)
    with torch.no_grad():
        below, above, sides, total, means = net.parts(x)
        logits = net.classifier(means)
    weights = {name: layer.weight.detach().numpy() for name, layer in net.named_children()}
    expected = {"below": np.zeros(4), "above": np.zeros(5)}
    for n in range(4):
        relevance = np.zeros(3)
        relevance[y[n]] = abs(float(logits[n, y[n]]))
        relevance = down(relevance, means[n].numpy(), weights["classifier"])
        relevance = down(relevance, total[n].flatten().numpy(), np.tile(np.eye(6), 7) / 7)
        both = np.concatenate([side[n].flatten().numpy() for side in sides])
        shares = down(relevance, both, np.tile(np.eye(42), 2)).reshape(2, 7, 6)
        for position in range(7):
            relevance = sum(
                down(share[position], above[n, position].numpy(), weights[side])
                for share, side in zip(shares, ("left", "right"), strict=True)
            )
            expected["above"] += relevance
            expected["below"] += down(relevance, below[n, position].numpy(), weights["above"])
    for group, values in expected.items():
        np.testing.assert_allclose(result[group].numpy(), values, rtol=1e-4, atol=1e-7)


class Convolutions(nn.Module):
    """No biases: convolutions, normalisation, both poolings, a depthwise layer, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 1, bias=False)
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)
        self.pool = nn.MaxPool2d(2)
        self.deep = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.across = nn.Conv2d(4, 5, 1, bias=False)
        self.average = nn.AvgPool2d(2, stride=1)
        self.classifier = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        x = F.relu(self.pool(self.norm(self.first(self.stem(x).relu()))))
        x = self.average(self.across(self.deep(x)).relu())
        return self.classifier(x.mean((2, 3)))


def test_convolutions_and_pooling_follow_eq_11_as_matrices():
    torch.manual_seed(0)
    net = Convolutions().double()
    scales = torch.tensor([1.0, 0.5, -2.0, 1.5], dtype=torch.float64)
    with torch.no_grad():
        net.norm.weight.copy_(scales)
    x, y = torch.rand(3, 2, 6, 6, dtype=torch.float64), torch.tensor([0, 2, 1])
    whole = (None, None)
    axes = {"stem.weight": ("stem", None, *whole), "first.weight": ("first", "stem", *whole)}
    axes |= {"across.weight": ("across", "first", *whole), "classifier.weight": (None, "across")}
    groups = ["stem", "first", "across"]
    result = compute_relevance(net, fq.declare_structure(net, axes), groups, x, y)
    with torch.no_grad():
        lowest = F.relu(net.stem(x))
        normal = net.norm(net.first(lowest))
        pooled, largest = F.max_pool2d(normal, 2, return_indices=True)
        deep = net.deep(F.relu(pooled))
        rectified = F.relu(net.across(deep))
        averaged = net.average(rectified)
        means = averaged.mean((2, 3))
        logits = net.classifier(means)
    expected = {"stem": np.zeros(3), "first": np.zeros(4), "across": np.zeros(5)}
    for n in range(3):
        relevance = np.zeros(3)
        relevance[y[n]] = abs(float(logits[n, y[n]]))

        def through(layer, values, relevance, n=n):
            return down(relevance, values[n].flatten().numpy(), matrix(layer, values.shape[1:]))

        relevance = through(net.classifier, means, relevance)
        expected["across"] += relevance
        relevance = through(lambda t: t.mean((2, 3)), averaged, relevance)
        relevance = through(net.across, deep, through(net.average, rectified, relevance))
        expected["first"] += relevance.reshape(4, -1).sum(1)
        relevance = through(net.deep, F.relu(pooled), relevance).reshape(4, -1)
        spread = np.zeros((4, 36))
        for channel in range(4):
            np.add.at(spread[channel], largest[n, channel].flatten().numpy(), relevance[channel])
        turned = lambda t: net.first(t) * scales.sign().view(-1, 1, 1)  # noqa: E731
        relevance = through(turned, lowest, spread.flatten())
        expected["stem"] += relevance.reshape(3, -1).sum(1)
    for group, values in expected.items():
        np.testing.assert_allclose(result[group].numpy(), values, rtol=1e-5)


class Written(nn.Module):
    """The same net in several ways of writing it; no biases."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.one = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.two = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.hidden = nn.Linear(6 * 4, 7, bias=False)
        self.classifier = nn.Linear(7, 3, bias=False)
        self.relu = nn.ReLU(inplace=way == "in place")
        self.pool, self.flatten = nn.MaxPool2d(2), nn.Flatten()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        if self.way == "functions":
            x = F.max_pool2d(F.relu(self.one(x)), 2)
            x = torch.relu(F.conv2d(x, self.two.weight, padding=1) + x)
            x = torch.flatten(F.adaptive_avg_pool2d(x, 2), start_dim=1)
            return F.linear(
                F.linear(F.dropout(x, 0.5, self.training), self.hidden.weight).relu(),
                self.classifier.weight,
            )
        x = self.pool(self.relu(self.one(x)))
        if self.way == "in place":
            y = self.two(x)
            y += x
        else:
            y = x + self.two(x)
        x = self.flatten(F.avg_pool2d(self.relu(y), 2))
        return self.classifier(self.relu(self.hidden(self.drop(x))))


@pytest.fixture(scope="module")
def written():
    torch.manual_seed(1)
    nets = {way: Written(way) for way in ("modules", "functions", "in place")}
    with torch.no_grad():
        nets["modules"].classifier.weight[0].abs_()
    for net in nets.values():
        net.load_state_dict(nets["modules"].state_dict())
    x = torch.rand(4, 1, 8, 8)
    structure = fq.trace_structure(nets["modules"], x)
    return nets, structure, x, answers(nets["modules"], x)


def test_how_a_net_is_written_does_not_matter(written):
    nets, structure, x, y = written
    groups = ["one", "hidden"]
    results = [compute_relevance(net.train(), structure, groups, x, y) for net in nets.values()]
    for other in results[1:]:
        for group, values in other.items():
            torch.testing.assert_close(values, results[0][group], rtol=1e-5, atol=1e-7)


def test_a_sum_shares_relevance_out_and_conserves_it(written):
    """Eq. 10: 'one' is taken in by 'two' and, past the sum, by 'hidden'."""
    nets, structure, x, y = written
    net = nets["modules"]
    result = compute_relevance(net, structure, ["one", "hidden"], x, y)
    total = float(sizes(net, x, y).sum())
    assert float(result["hidden"].sum()) == pytest.approx(total, rel=1e-5)
    assert 1.05 * total < float(result["one"].sum()) < 1.95 * total
    silent = copy.deepcopy(net)
    with torch.no_grad():  # a branch that gives nothing gets nothing: all goes past it
        silent.two.weight.copy_(-silent.two.weight.abs())
    y = answers(silent, x)
    only = compute_relevance(silent, structure, ["one"], x, y)["one"]
    assert float(only.sum()) == pytest.approx(float(sizes(silent, x, y).sum()), rel=1e-5)


MODELS = {
    "adds-vgg": (dict(image_size=8, width=0.1, num_classes=5), (1, 8, 8)),
    "heterofl-cnn": (dict(width=0.1, num_classes=5), (1, 8, 8)),
    "mlp": (dict(image_size=4, hidden=(9, 7), num_classes=5), (1, 4, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_relevance_is_the_same_at_every_layer_and_that_of_the_logits(name):
    """Eq. 10, of nets as they are: one layer takes in each group."""
    options, shape = MODELS[name]
    torch.manual_seed(0)
    net = without_running_stats(make_model(name, options))
    with torch.no_grad():
        for tensor_name, tensor in net.named_parameters():
            if tensor_name.endswith("bias"):
                tensor.zero_()
    x = torch.rand(6, *shape)
    y = answers(net, x)
    result = found(net, x, y)
    assert len(result) >= 2
    for group, values in result.items():
        assert float(values.sum()) == pytest.approx(float(sizes(net, x, y).sum()), rel=1e-4), group
        assert (values >= 0).all()


def test_a_separable_net_has_relevance_everywhere():
    """Numbers between the halves are of both signs; those without any positive part lose theirs."""
    torch.manual_seed(0)
    options = dict(image_size=16, width=0.1, num_classes=4)
    net = without_running_stats(make_model("adds-mobilenet", options))
    x, y = torch.rand(4, 3, 16, 16), torch.arange(4)
    result = found(net, x, y)
    total = float(sizes(net, x, y).sum())
    assert len(result) == 7
    for values in result.values():
        assert 0.3 * total < float(values.sum()) <= total * (1 + 1e-4)


@pytest.mark.parametrize("every_position", [False, True])
def test_recurrent_layers_below_need_no_rule(every_position):
    torch.manual_seed(0)
    options = dict(num_classes=6, embedding=3, hidden=4, head=5)
    one_way = dict(bidirectional=False, every_position=True)
    net = make_model("char-lstm", options | (one_way if every_position else {}))
    x = torch.randint(6, (3, 7))
    y = torch.randint(6, (3, 7) if every_position else (3,))
    structure, groups = traced(net, x, exclude=["lstm"])
    assert groups == ("head",)
    result = compute_relevance(net, structure, groups, x, y)["head"].numpy()
    with torch.no_grad():
        outputs, (last, _) = net.lstm(net.embedding(x))
        states = outputs if every_position else torch.cat((last[-2], last[-1]), 1)
        hidden = net.head(states).relu().flatten(0, -2)
        logits = net.classifier(hidden)
    expected = np.zeros(5)
    for values, label, answer in zip(hidden, y.flatten(), logits, strict=True):
        relevance = np.zeros(6)
        relevance[label] = abs(float(answer[label]))
        expected += down(relevance, values.numpy(), net.classifier.weight.detach().numpy())
    np.testing.assert_allclose(result, expected, rtol=1e-4)


def test_nets_that_compute_the_same_have_the_same_relevance():
    """A channel turned by its layer and turned back by a negative scale; and one that is rescaled.

    Scales of normalisation, the other importance, are not the same in these nets.
    """
    torch.manual_seed(0)
    net = Convolutions()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.first.weight[1] *= -1
        other.norm.weight[1] *= -1
        other.norm.weight[2] *= 5
        other.norm.bias[2] *= 5
        other.deep.weight[2] /= 5
    x, y = torch.rand(5, 2, 6, 6), torch.tensor([0, 1, 2, 0, 1])
    torch.testing.assert_close(net(x), other(x), rtol=1e-4, atol=1e-5)
    one, two = found(net, x, y), found(other, x, y)
    for group in one:
        torch.testing.assert_close(one[group], two[group], rtol=1e-3, atol=1e-6)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6, bias=False)
        self.gate = nn.Linear(6, 6, bias=False)
        self.classifier = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        x = self.body(x).relu()
        return self.classifier(x * torch.sigmoid(self.gate(x)))


def test_a_product_gives_half_to_each_side():
    torch.manual_seed(0)
    net = Gate()
    with torch.no_grad():
        net.gate.weight.abs_()
        net.classifier.weight[0].abs_()
    x = torch.rand(5, 4)
    y = answers(net, x)
    result = compute_relevance(
        net, declared(net, "body", "gate", "classifier"), ["body", "gate"], x, y
    )
    total = float(sizes(net, x, y).sum())
    assert float(result["gate"].sum()) == pytest.approx(total, rel=1e-4)  # into the classifier
    assert float(result["body"].sum()) == pytest.approx(total / 2, rel=1e-4)  # into the gate


class Twice(nn.Module):
    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.middle = nn.Linear(6, 6)
        self.again = self.middle if is_shared else nn.Linear(6, 6)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x):
        return self.classifier(self.again(self.middle(self.first(x).relu()).relu()).relu())


def test_a_layer_that_is_used_twice_is_like_two():
    torch.manual_seed(0)
    shared, apart = Twice(is_shared=True), Twice(is_shared=False)
    apart.load_state_dict(shared.state_dict())
    x, y = torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])
    (once,) = compute_relevance(
        shared, declared(shared, "first", "middle"), ["first"], x, y
    ).values()
    structure = declared(apart, "first", "middle", "again")
    parts = compute_relevance(apart, structure, ["first", "middle"], x, y)
    torch.testing.assert_close(once, parts["first"] + parts["middle"], rtol=1e-5, atol=1e-7)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5, bias=False), nn.Linear(4, 7, bias=False)
        self.classifier = nn.Linear(12, 3, bias=False)

    def forward(self, x):
        return self.classifier(torch.cat([self.left(x).relu(), self.right(x).relu()], 1))


def test_channels_that_are_joined_keep_their_own():
    torch.manual_seed(0)
    net = Joined()
    with torch.no_grad():
        net.classifier.weight[:, :5] = 0
        net.classifier.weight[:, 5 + 2] = 0
    x = torch.rand(4, 4)
    y = answers(net, x)
    result = found(net, x, y)
    assert result["left"].tolist() == [0.0] * 5
    assert float(result["right"][2]) == 0
    assert float(result["right"].sum()) == pytest.approx(float(sizes(net, x, y).sum()), rel=1e-5)


def snapshot(net):
    layers = {
        name: (
            layer.training,
            sorted(layer.__dict__),
            len(layer._forward_hooks),
            len(layer._forward_pre_hooks),
            len(layer._backward_hooks),
        )
        for name, layer in net.named_modules()
    }
    tensors = {
        name: (t.data_ptr(), t._version, t.requires_grad, t.detach().clone())
        for name, t in [*net.named_parameters(), *net.named_buffers()]
    }
    return layers, tensors


def test_the_module_and_random_numbers_are_left_as_they_were():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5),
        nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip
    x, y = torch.randn(5, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1])
    net.train()
    net[3].eval()
    nn.functional.cross_entropy(net(x), y).backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    structure, groups = traced(net, x)
    layers, tensors = snapshot(net)
    given, state = x.clone(), torch.get_rng_state()
    compute_relevance(net, structure, groups, x, y)
    after_layers, after_tensors = snapshot(net)
    assert after_layers == layers
    for name, (pointer, version, needs, values) in tensors.items():
        assert after_tensors[name][:3] == (pointer, version, needs), name
        assert after_tensors[name][3].equal(values)
    assert all(p.grad.equal(g) for p, g in zip(net.parameters(), gradients, strict=True))
    assert x.equal(given)
    assert not x.requires_grad
    assert torch.get_rng_state().equal(state)


def test_the_same_bits_each_time(written):
    nets, structure, x, y = written
    net, groups = nets["modules"].train(), ["one", "hidden"]  # dropout is off all the same
    first = compute_relevance(net, structure, groups, x, y)
    for seed in (1, 2):
        torch.manual_seed(seed)
        again = compute_relevance(net, structure, groups, x, y)
        assert all(again[g].equal(values) for g, values in first.items())


class Attention(nn.Module):
    def __init__(self, *, above: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.classifier = nn.Linear(8, 3)
        self.above = above

    def forward(self, x):
        if not self.above:
            x = self.attention(x, x, x)[0]
        x = self.down(self.up(x).relu())
        if self.above:
            x = self.attention(x, x, x)[0]
        return self.classifier(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.body = nn.Sequential(nn.LSTM(8, 5, batch_first=True))
        self.classifier = nn.Linear(5, 3)

    def forward(self, x):
        return self.classifier(self.body(self.down(self.up(x).relu()))[0][:, -1])


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, x):
        x = self.down(self.up(x).relu())
        x[:, 0] = 0
        return self.classifier(x.mean(1))


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Attention(above=True), "'multi_head_attention_forward' of module 'attention': there is"),
        (Recurrent(), r"'lstm' of module 'body\.0': there is no rule"),
        (Overwritten(), "'mean': what it is given is written over"),
    ],
)
def test_what_has_no_rule_is_refused_by_name_if_relevance_must_go_through_it(net, words):
    example = torch.rand(1, 4, 8)
    with pytest.raises(ConfigError, match=words):
        require_relevance(net, declared(net, "up", "down"), ["up"], example)


def test_what_has_no_rule_does_not_matter_below():
    torch.manual_seed(0)
    net, x = Attention(above=False), torch.rand(2, 4, 8)
    structure = declared(net, "up", "down")
    require_relevance(net, structure, ["up"], x[:1])
    assert float(compute_relevance(net, structure, ["up"], x, torch.tensor([0, 2]))["up"].sum()) > 0


class Lost(nn.Module):
    """A layer whose work is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, x):
        self.down(self.up(x).relu())
        return self.classifier(x.mean(1))


def test_channels_that_no_relevance_reaches_are_refused():
    net = Lost()
    with pytest.raises(ConfigError, match="from the model's output to the channels of 'up'"):
        require_relevance(net, declared(net, "up", "down"), ["up"], torch.rand(1, 4, 8))


def test_without_captum_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    net, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.rand(2, 4)
    with pytest.raises(ConfigError, match=r"relevance needs the extra: pip install 'fedquilt\[lrp"):
        require_relevance(net, declared(net, "0", "2"), ["0"], x)
