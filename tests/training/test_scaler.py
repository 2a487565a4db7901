"""HeteroFL's Scaler."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedquilt.federation.client import Task
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.scaler import (
    compute_output_rates,
    fold_scale,
    has_hooked_scale,
    scale_outputs,
)
from fedquilt.training.settings import LocalTraining


def layer_outputs(module, x, structure=None):
    seen = {}
    hooks = []

    def note(name):
        return lambda layer, inputs, output: seen.update({name: (inputs[0], output)})

    def run():
        for name in ("first", "second", "classifier"):
            hooks.append(module.get_submodule(name).register_forward_hook(note(name)))
        module(x)

    if structure is None:
        run()
    else:
        with scale_outputs(module, structure):
            run()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    ("width", "kept"), [(0.5, (3, 5)), (0.3, (2, 3)), (0.1, (1, 1)), (1.0, (6, 10))]
)
def test_outputs_are_divided_by_the_share_of_channels_kept(net, structure, params, width, kept):
    module = build_module(net, structure, structure.subnet(width), params).train()
    seen = layer_outputs(module, torch.randn(4, 1, 5, 5), structure)
    for name, count, full in (("first", kept[0], 6), ("second", kept[1], 10)):
        layer = module.get_submodule(name)
        inputs, output = seen[name]
        plain = F.conv2d(inputs, layer.weight, layer.bias, padding=1)
        torch.testing.assert_close(output, plain * full / count)
    inputs, output = seen["classifier"]  # classes are never cut
    assert output.equal(F.linear(inputs, module.classifier.weight, module.classifier.bias))


def test_outputs_are_scaled_in_evaluation_too(net, structure, params):
    module = build_module(net, structure, structure.subnet(0.5), params).eval()
    seen = layer_outputs(module, torch.randn(4, 1, 5, 5), structure)
    inputs, output = seen["first"]
    plain = F.conv2d(inputs, module.first.weight, module.first.bias, padding=1)
    torch.testing.assert_close(output, plain * 2)


class Tied(nn.Module):
    """Tokens in and out by one matrix, which only the way in is scaled for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(self.embed(x)).relu())


class Functional(nn.Module):
    """A layer whose weight is also used by others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + F.linear(x.square(), self.first.weight))


class Attention(nn.Module):
    """PyTorch's attention does not call its last layer, but takes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(5, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)[:, None]
        return self.out(self.attend(y, y, y, need_weights=False)[0][:, 0].relu())


def sequence(second: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), second, nn.ReLU(), nn.Linear(8, 4))


def by_a_hook(normalise: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, about its older kind
        return sequence(normalise(nn.Linear(8, 8)))


FLOATS = torch.zeros(2, 5)
NETS = {
    "plain": (lambda: sequence(nn.Linear(8, 8)), FLOATS, True),
    "weight norm": (lambda: sequence(parametrizations.weight_norm(nn.Linear(8, 8))), FLOATS, False),
    "spectral norm": (
        lambda: sequence(parametrizations.spectral_norm(nn.Linear(8, 8))),
        FLOATS,
        False,
    ),
    "weight norm by a hook": (lambda: by_a_hook(nn.utils.weight_norm), FLOATS, False),
    "spectral norm by a hook": (lambda: by_a_hook(nn.utils.spectral_norm), FLOATS, False),
    "tied": (Tied, torch.tensor([[1, 2, 6]]), False),
    "functional": (Functional, FLOATS, False),
    "attention": (Attention, FLOATS, True),
}


@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_a_folded_module_answers_by_itself_as_it_did_scaled(name):
    make, example, has_plain_weights = NETS[name]
    torch.manual_seed(0)
    whole = make()
    structure = trace_structure(whole, example)
    module = build_module(whole, structure, structure.subnet(0.5)).eval()
    x = torch.randn(6, 5) if example.is_floating_point() else torch.randint(7, (6, 3))
    with scale_outputs(module, structure):
        expected = module(x)
    assert not torch.allclose(module(x), expected)
    folded = fold_scale(module, structure, example)
    torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(copy.deepcopy(folded)(x), expected, rtol=1e-5, atol=1e-6)
    assert has_hooked_scale(folded) != has_plain_weights
    if has_plain_weights:  # then they are all that is needed
        bare = build_module(whole, structure, structure.subnet(0.5)).eval()
        bare.load_state_dict(folded.state_dict())
        torch.testing.assert_close(bare(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in NETS if "spectral" in name])
def test_looking_for_shares_does_not_move_singular_vectors(name):
    make, example, _ = NETS[name]
    whole = make()
    structure = trace_structure(whole, example)
    module = build_module(whole, structure, structure.subnet(0.5)).train()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    assert len(compute_output_rates(module, structure)) == 2
    assert all(torch.equal(tensor, before[n]) for n, tensor in module.state_dict().items())


def test_nothing_stays_on_the_module_even_after_a_failure(net, structure, params):
    module = build_module(net, structure, structure.subnet(0.5), params).train()
    with scale_outputs(module, structure):
        assert any(m._forward_hooks for m in module.modules())
    with pytest.raises(RuntimeError, match="channels"), scale_outputs(module, structure):
        module(torch.zeros(1, 2, 5, 5))
    assert not any(m._forward_hooks for m in module.modules())


@pytest.mark.parametrize(("width", "same"), [(1.0, True), (0.5, False)])
def test_the_switch_matters_only_below_full_width(structure, context, params, width, same):
    found = []
    for scale in (False, True):
        recipe = LocalSGD(LocalTraining(epochs=1), lr=0.1, scale=scale)
        found.append(
            recipe.run(Task(0, (structure.subnet(width),), params, recipe, 0), context).update
        )
    plain, scaled_up = (u.params[0] for u in found)
    assert all(scaled_up[n].equal(t) for n, t in plain.items()) == same
