"""What a context knows about statistics that stay on the client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedquilt.structure.create import trace_structure
from fedquilt.structure.structure import STATISTICS
from fedquilt.structure.subnet import Subnet
from fedquilt.training.context import ClientContext

HOME = (STATISTICS, "*num_batches_tracked")


def kept_by(
    context: ClientContext, subnet: Subnet, home: tuple[str, ...], params
) -> dict[str, Tensor]:
    """What a client keeps after it has trained a subnet."""
    context = context.for_client(None)
    module = context.module(subnet, params, home)
    return context.next_client_state([module], [subnet], home) or {}


@pytest.mark.parametrize("home", [(STATISTICS,), HOME])
@pytest.mark.parametrize("owner", ["", "own"])
def test_a_client_lacks_statistics_until_it_has_trained(structure, context, params, home, owner):
    subnet = structure.subnet(0.5)
    subnet = subnet.with_private(owner, *home) if owner else subnet
    assert context.lacks_statistics(subnet, home)
    context = context.for_client(kept_by(context, subnet, home, params))
    assert not context.lacks_statistics(subnet, home)


def test_a_client_lacks_statistics_of_every_net_but_its_own(structure, context, params):
    own = structure.subnet(0.5).with_private("own", *HOME)
    context = context.for_client(kept_by(context, own, HOME, params))
    assert context.lacks_statistics(Subnet(), HOME)
    assert context.lacks_statistics(structure.subnet(0.5), HOME)
    assert context.lacks_statistics(structure.subnet(0.5).with_private("other", *HOME), HOME)


@pytest.mark.parametrize("name", ["norm.running_mean", "norm2.running_var"])
def test_all_of_them_have_to_be_there(context, params, name):
    state = kept_by(context, Subnet(), HOME, params)
    del state[name]
    context = context.for_client(state)
    assert context.lacks_statistics(Subnet(), HOME)


def test_counters_are_no_statistics(context, params):
    state = kept_by(context, Subnet(), HOME, params)
    context = context.for_client({n: t for n, t in state.items() if "tracked" not in n})
    assert not context.lacks_statistics(Subnet(), HOME)


@pytest.mark.parametrize("home", [(), ("*num_batches_tracked",), ("*", f"!{STATISTICS}")])
def test_statistics_that_travel_are_never_lacking(context, home):
    assert not context.lacks_statistics(Subnet(), home)


@pytest.mark.parametrize("home", [("*",), (":norms",), (STATISTICS, "classifier.bias")])
def test_a_client_that_keeps_weights_too_has_not_trained_them_either(context, home):
    """Its own net is as it was at first; statistics alone would not make it right."""
    assert not context.lacks_statistics(Subnet(), home)


def test_a_net_without_statistics_lacks_none():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    structure = trace_structure(net, torch.zeros(2, 3))
    assert not ClientContext(net, structure, {}).lacks_statistics(Subnet(), HOME)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


def test_statistics_of_blocks_that_are_skipped_are_not_missed():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Block(), nn.Linear(4, 2))
    structure = trace_structure(net, torch.zeros(2, 3))
    (block,) = structure.blocks
    context = ClientContext(net, structure, {})
    state = {"1.running_mean": torch.zeros(4), "1.running_var": torch.ones(4)}
    context = context.for_client(state)
    assert context.lacks_statistics(Subnet(), HOME)
    assert not context.lacks_statistics(Subnet().without_blocks(block), HOME)
