"""HeteroFL's Scaler."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedquilt.federation.client import Task
from fedquilt.structure.cut import build
from fedquilt.training.descent import Optimiser
from fedquilt.training.scaler import scaled
from fedquilt.training.sgd import SGD


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
        with scaled(module, structure):
            run()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    ("width", "kept"), [(0.5, (3, 5)), (0.3, (2, 3)), (0.1, (1, 1)), (1.0, (6, 10))]
)
def test_outputs_are_divided_by_the_share_of_channels_kept(net, structure, params, width, kept):
    module = build(net, structure, structure.subnet(width), params).train()
    seen = layer_outputs(module, torch.randn(4, 1, 5, 5), structure)
    for name, count, full in (("first", kept[0], 6), ("second", kept[1], 10)):
        layer = module.get_submodule(name)
        inputs, output = seen[name]
        plain = F.conv2d(inputs, layer.weight, layer.bias, padding=1)
        torch.testing.assert_close(output, plain * full / count)
    inputs, output = seen["classifier"]  # classes are never cut
    assert output.equal(F.linear(inputs, module.classifier.weight, module.classifier.bias))


def test_nothing_is_scaled_in_evaluation(net, structure, params):
    module = build(net, structure, structure.subnet(0.5), params).eval()
    x = torch.randn(3, 1, 5, 5)
    plain = module(x)
    with scaled(module, structure):
        assert module(x).equal(plain)


def test_nothing_stays_on_the_module_even_after_a_failure(net, structure, params):
    module = build(net, structure, structure.subnet(0.5), params).train()
    with scaled(module, structure):
        assert any(m._forward_hooks for m in module.modules())
    with pytest.raises(RuntimeError, match="channels"), scaled(module, structure):
        module(torch.zeros(1, 2, 5, 5))
    assert not any(m._forward_hooks for m in module.modules())


@pytest.mark.parametrize(("width", "same"), [(1.0, True), (0.5, False)])
def test_the_switch_matters_only_below_full_width(structure, bench, params, width, same):
    found = []
    for scale in (False, True):
        recipe = SGD(Optimiser(epochs=1), lr=0.1, scale=scale)
        found.append(recipe.run(Task(0, (structure.subnet(width),), params, recipe, 0), bench))
    plain, scaled_up = (u.params[0] for u in found)
    assert all(scaled_up[n].equal(t) for n, t in plain.items()) == same
