"""Slimmable training, against autograd on slices of the widest net written by hand."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.data import to_examples
from fedquilt.federation.client import Task
from fedquilt.structure.create import declare_structure, trace_structure
from fedquilt.structure.cut import build_module, copy_subnet_tensors
from fedquilt.structure.derive import restrict_structure
from fedquilt.structure.structure import NORMS, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.settings import LocalTraining
from fedquilt.training.slimmable import Slimmable
from fedquilt.training.tracking import without_running_stats

FIRST, SECOND = 6, 10  # channels of the net
PLAIN = LocalTraining(momentum=0, weight_decay=0, epochs=1, batch_size=14, max_grad_norm=None)
SETTINGS = {
    "one step": PLAIN,
    "many steps": replace(PLAIN, epochs=2, batch_size=5),
    "momentum": replace(PLAIN, momentum=0.9, weight_decay=0.01, epochs=2, batch_size=5),
    "clipped": replace(PLAIN, momentum=0.9, epochs=2, batch_size=5, max_grad_norm=0.05),
}


@pytest.fixture(scope="module")
def bare(net, structure) -> tuple[nn.Module, Structure]:
    """The net whose every batch is normalised by itself."""
    model = without_running_stats(net)
    return model, restrict_structure(structure, model)


Kept = tuple[Tensor, Tensor]  # channels of the two layers


def leading(width: float) -> Kept:
    sizes = (math.ceil(round(width * n, 9)) for n in (FIRST, SECOND))
    first, second = (torch.arange(size) for size in sizes)
    return first, second


def norm(p, name, kept, x, owner) -> Tensor:
    """Batch normalisation by hand; with running statistics if there are any."""
    own = f"@{owner}" if owner else ""
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    statistics = f"{name}.running_mean{own}"
    if statistics in p:
        count = x.numel() / x.shape[1]
        with torch.no_grad():
            p[statistics][kept] += 0.1 * (mean - p[statistics][kept])
            other = p[f"{name}.running_var{own}"]
            other[kept] += 0.1 * (var * count / (count - 1) - other[kept])
    weight, bias = p[f"{name}.weight{own}"][kept], p[f"{name}.bias{own}"][kept]
    shape = (1, -1, 1, 1)
    x = (x - mean.view(shape)) / (var.view(shape) + 1e-5).sqrt()
    return x * weight.view(shape) + bias.view(shape)


def logits(p, kept: Kept, x: Tensor, owner: str = "") -> Tensor:
    """The net with some of its channels, as slices of whole tensors."""
    first, second = kept
    x = F.conv2d(x, p["first.weight"][first], p["first.bias"][first], padding=1)
    x = norm(p, "norm", first, x, owner).relu()
    x = F.conv2d(x, p["second.weight"][second][:, first], padding=1)
    x = norm(p, "norm2", second, x, owner).relu()
    return F.linear(x.mean((2, 3)), p["classifier.weight"][:, second], p["classifier.bias"])


def by_hand(params, nets, data, settings, lr, seed, own=()):
    """All widths on every batch: one step down the sum of their losses, over whole tensors.

    ``nets`` are the kept channels and the owner of each. Cells that the widest lacks do not count.
    """
    p = {n: t.clone().requires_grad_("running" not in n) for n, t in params.items()}
    learned = [n for n, t in p.items() if t.requires_grad]
    speed = {n: torch.zeros_like(p[n]) for n in learned}
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(settings.epochs):
        losses = []
        for rows in torch.randperm(len(data), generator=generator).split(settings.batch_size):
            x, y = data.inputs[rows], data.labels[rows]
            each = []
            for kept, owner in nets:
                found = logits(p, kept, x, owner)
                mask = (
                    torch.ones(4) if not own else torch.tensor([float(i in own) for i in range(4)])
                )
                each.append(F.cross_entropy(found * mask, y))
            total = torch.stack(each).sum()
            found = torch.autograd.grad(total, [p[n] for n in learned], allow_unused=True)
            used = {n: g for n, g in zip(learned, found, strict=True) if g is not None}
            length = torch.cat([g.flatten() for g in used.values()]).norm().item()
            short = (
                1.0 if settings.max_grad_norm is None else min(1.0, settings.max_grad_norm / length)
            )
            with torch.no_grad():
                for n, g in used.items():
                    speed[n] = settings.momentum * speed[n] + short * g
                    speed[n] += settings.weight_decay * p[n]
                    p[n] -= lr * speed[n]
            losses.append(total.item() / len(nets) * len(rows))
    return {n: t.detach() for n, t in p.items()}, sum(losses) / len(data)


def assert_cells(found, expected, kept: Kept, owner: str = "") -> None:
    """A subnet's tensors are the cells of the whole ones."""
    first, second = kept
    where = {
        "first.weight": (first,), "first.bias": (first,), "second.weight": (second, first),
        "classifier.weight": (slice(None), second), "classifier.bias": (),
    }  # fmt: skip
    for name, tensor in found.items():
        if not tensor.is_floating_point():
            continue
        layer = name.partition(".")[0]
        index = where.get(name, (first if layer == "norm" else second,))
        whole = expected.get(f"{name}@{owner}", expected.get(name))
        for axis, some in enumerate(index):
            if isinstance(some, Tensor):
                whole = whole.index_select(axis, some)
        torch.testing.assert_close(tensor, whole, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("widths", [(1.0, 0.5, 0.3), (0.5, 0.3), (1.0,)])
def test_gradients_of_all_widths_are_summed(bare, data, params, kind, widths):
    net, structure = bare
    given = {n: params[n] for n in structure.shapes}
    wide, *narrow = (structure.subnet(w) for w in widths)
    subnets = (wide, *(s.excluding("*") for s in narrow))
    recipe = Slimmable(SETTINGS[kind], lr=0.1, weight=7.0)
    context = ClientContext(net, structure, data)
    update = recipe.run(Task(0, subnets, given, recipe, 11), context).update
    nets = [(leading(w), "") for w in widths]
    examples = data["train"][0]
    expected, loss = by_hand(given, nets, examples, SETTINGS[kind], 0.1, 11)
    assert_cells(update.params[0], expected, leading(widths[0]))
    assert set(update.params[0]) == set(given)
    assert all(part == {} for part in update.params[1:])  # it is all in the widest
    assert update.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert (update.client, update.weight, update.metrics["examples"]) == (0, 7.0, 14)
    assert update.subnets == subnets


def test_every_width_answers_with_the_clients_own_classes(bare, data, params):
    net, structure = bare
    given = {n: params[n] for n in structure.shapes}
    subnets = (structure.subnet(1.0), structure.subnet(0.5).excluding("*"))
    recipe = Slimmable(PLAIN, lr=0.1, labels=(1, 3), masked=True)
    context = ClientContext(net, structure, data)
    update = recipe.run(Task(1, subnets, given, recipe, 4), context).update
    nets = [(leading(1.0), ""), (leading(0.5), "")]
    expected, _ = by_hand(given, nets, data["train"][1], PLAIN, 0.1, 4, own=(1, 3))
    assert_cells(update.params[0], expected, leading(1.0))


def test_every_width_is_scaled_by_its_own_share():
    """On a net without normalisation, which would undo it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    structure = trace_structure(net, torch.zeros(2, 3))
    x, y = torch.randn(6, 3), torch.arange(6) % 4
    data = {"train": {0: to_examples((x, y))}}
    params = {n: t.detach() for n, t in net.named_parameters()}
    wide, *narrow = (structure.subnet(w) for w in (1.0, 0.5, 0.25))
    subnets = (wide, *(s.excluding("*") for s in narrow))
    recipe = Slimmable(replace(PLAIN, batch_size=6), lr=0.5, scale=True)
    context = ClientContext(net, structure, data)
    update = recipe.run(Task(0, subnets, params, recipe, 0), context).update
    p = {n: t.clone().requires_grad_() for n, t in params.items()}
    loss = torch.zeros(())
    for kept in (8, 4, 2):
        hidden = F.linear(x, p["0.weight"][:kept], p["0.bias"][:kept]) / (kept / 8)
        loss = loss + F.cross_entropy(
            F.linear(hidden.relu(), p["2.weight"][:, :kept], p["2.bias"]), y
        )
    gradients = torch.autograd.grad(loss, list(p.values()))
    for (name, w), g in zip(p.items(), gradients, strict=True):
        torch.testing.assert_close(update.params[0][name], (w - 0.5 * g).detach())


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_width_has_normalisation_of_its_own(net, structure, data, params, kind):
    widths = (1.0, 0.5, 0.3)
    names = sorted(structure.match_names((NORMS,)))
    given = dict(params)
    for number, width in enumerate(widths[:2]):  # nobody has trained the narrowest yet
        own = {n: params[n] + number if params[n].is_floating_point() else params[n] for n in names}
        given |= {f"{n}@{width:g}": t for n, t in own.items()}
    wide, *narrow = (structure.subnet(w).with_private(f"{w:g}", NORMS) for w in widths)
    subnets = (wide, *(s.excluding("*", f"!{NORMS}") for s in narrow))
    recipe = Slimmable(SETTINGS[kind], lr=0.1)
    context = ClientContext(net, structure, data)
    update = recipe.run(Task(0, subnets, given, recipe, 5), context).update
    start = given | {f"{n}@0.3": params[n] for n in names}
    start = {n: t for n, t in start.items() if t.is_floating_point()}
    nets = [(leading(w), f"{w:g}") for w in widths]
    expected, _ = by_hand(start, nets, data["train"][0], SETTINGS[kind], 0.1, 5)
    for width, part in zip(widths, update.params, strict=True):
        assert_cells(part, expected, leading(width), f"{width:g}")
        assert set(part) == (set(params) if width == 1 else set(names))


def test_channels_need_not_be_leading_ones(bare, data, params):
    net, structure = bare
    given = {n: params[n] for n in structure.shapes}
    groups = structure.cut_groups()
    assert [structure.groups[g].size for g in groups] == [FIRST, SECOND]
    wide = ((0, 2, 3, 5), (1, 2, 6, 7, 9))
    narrow = ((2, 5), (1, 7, 9))
    subnets = tuple(
        Subnet.from_channels(dict(zip(groups, kept, strict=True))) for kept in (wide, narrow)
    )
    task_subnets = (subnets[0], subnets[1].excluding("*"))
    settings = SETTINGS["momentum"]
    recipe = Slimmable(settings, lr=0.1)
    update = recipe.run(
        Task(0, task_subnets, given, recipe, 2), ClientContext(net, structure, data)
    ).update
    nets = [(tuple(map(torch.tensor, kept)), "") for kept in (wide, narrow)]
    expected, _ = by_hand(given, nets, data["train"][0], settings, 0.1, 2)
    assert_cells(update.params[0], expected, nets[0][0])


def test_one_width_alone_is_plain_training_bit_for_bit(structure, fresh_bench, params):
    settings, subnet = SETTINGS["momentum"], structure.subnet(0.5)
    found = [
        recipe.run(Task(1, (subnet,), params, recipe, 3), fresh_bench()).update
        for recipe in (
            Slimmable(settings, 0.1, (1, 3), masked=True, scale=True, weight=2.0),
            LocalSGD(settings, 0.1, (1, 3), masked=True, scale=True, weight=2.0),
        )
    ]
    assert all(t.equal(found[1].params[0][n]) for n, t in found[0].params[0].items())
    assert found[0].metrics == pytest.approx(found[1].metrics)
    assert found[0].weight == found[1].weight


def test_widths_agree_on_what_they_share_when_all_of_it_comes_back(bare, data, params):
    """With ``count_widths`` the narrow ones carry everything."""
    net, structure = bare
    given = {n: params[n] for n in structure.shapes}
    subnets = tuple(structure.subnet(w) for w in (1.0, 0.5, 0.3))
    recipe = Slimmable(SETTINGS["momentum"], lr=0.1)
    context = ClientContext(net, structure, data)
    update = recipe.run(Task(0, subnets, given, recipe, 1), context).update
    for subnet, part in zip(subnets, update.params, strict=True):
        cells = copy_subnet_tensors(update.params[0], structure, subnet)
        assert part.keys() == cells.keys()
        assert all(part[n].equal(t) for n, t in cells.items())


class Sum(nn.Module):
    """Two weights that are added get one gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.b = nn.Parameter(torch.tensor([4.0, 3.0, 2.0, 1.0]))
        self.out = nn.Parameter(torch.arange(12.0).view(3, 4).sin())

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, : len(self.a)] * (self.a + self.b)) @ self.out.T


def test_weights_that_share_a_gradient_are_told_apart():
    net = Sum()
    structure = declare_structure(net, {"a": ("h",), "b": ("h",), "out": (None, "h")})
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    data = {"train": {0: to_examples((x, y))}}
    params = {n: t.detach() for n, t in net.named_parameters()}
    subnets = (structure.subnet(1.0), structure.subnet(0.5).excluding("*"))
    recipe = Slimmable(replace(PLAIN, batch_size=6), lr=0.5)
    context = ClientContext(net, structure, data)
    update = recipe.run(Task(0, subnets, params, recipe, 0), context).update
    p = {n: t.clone().requires_grad_() for n, t in params.items()}
    loss = sum(
        F.cross_entropy((x[:, :k] * (p["a"] + p["b"])[:k]) @ p["out"][:, :k].T, y) for k in (4, 2)
    )
    gradients = torch.autograd.grad(loss, list(p.values()))
    for (name, w), g in zip(p.items(), gradients, strict=True):
        torch.testing.assert_close(update.params[0][name], (w - 0.5 * g).detach())


def test_frozen_weights_are_shared_but_not_trained(bare, data, params):
    net, structure = bare
    frozen = copy.deepcopy(net)
    frozen.first.weight.requires_grad_(False)
    given = {n: params[n] for n in structure.shapes}
    subnets = (structure.subnet(1.0), structure.subnet(0.5).excluding("*"))
    recipe = Slimmable(PLAIN, lr=0.1)
    context = ClientContext(frozen, structure, data)
    update = recipe.run(Task(0, subnets, given, recipe, 3), context).update
    nets = [(leading(1.0), ""), (leading(0.5), "")]
    expected, _ = by_hand(given, nets, data["train"][0], PLAIN, 0.1, 3)
    expected["first.weight"] = given["first.weight"]
    assert_cells(update.params[0], expected, leading(1.0))


def test_nothing_given_is_changed(bare, data, params):
    net, structure = bare
    given = {n: params[n].clone() for n in structure.shapes}
    before = {n: t.clone() for n, t in given.items()}
    own = {n: t.clone() for n, t in net.state_dict().items()}
    subnets = (structure.subnet(1.0), structure.subnet(0.5).excluding("*"))
    recipe = Slimmable(PLAIN, lr=0.1)
    recipe.run(Task(0, subnets, given, recipe, 3), ClientContext(net, structure, data))
    assert all(t.equal(before[n]) for n, t in given.items())
    assert all(t.equal(own[n]) for n, t in net.state_dict().items())


def test_the_oracle_computes_what_a_built_net_does(net, structure, data, params):
    """So that a mistake shared by both would have to be in both."""
    x = data["test"][0].inputs
    for width in (1.0, 0.5, 0.3):
        module = build_module(net, structure, structure.subnet(width), params).train()
        p = {n: t.clone() for n, t in params.items() if t.is_floating_point()}
        torch.testing.assert_close(logits(p, leading(width), x), module(x).detach())
        for name in ("norm.running_mean", "norm2.running_var"):
            size = len(module.state_dict()[name])
            torch.testing.assert_close(p[name][:size], module.state_dict()[name])
