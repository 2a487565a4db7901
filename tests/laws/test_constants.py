"""Laws of tensors that no training changes, for every method."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.errors import UpdateError
from fedquilt.federation.client import Update
from fedquilt.federation.state import Setup
from fedquilt.federation.update import validate_update
from fedquilt.structure.cut import copy_subnet_tensors
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors

from .conftest import METHODS, Case, Net, population


class Masked(Net):
    """Asks by a constant which of two answers counts, as a causal mask does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.features(x))
        both = torch.stack([x.mean((2, 3)), x.amax((2, 3))], -1)
        return self.classifier((both * self.mask.softmax(0)).sum(-1))


@pytest.fixture(scope="module")
def masked() -> Setup:
    torch.manual_seed(0)
    model, example = Masked(), torch.zeros(2, 1, 6, 6)
    structure = fq.trace_structure(model, example)
    return Setup(model, structure, example, population().clients, rounds=1, seed=7)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_mask_of_infinities_stays_as_it_is_and_stops_nobody(name, masked):
    method = METHODS[name]
    case = Case(method, masked, method.prepare_model(masked), population())
    with case.engine() as engine:
        for _ in range(2):  # in the second round clients start from what they have kept
            state, done = case.first_round(engine)
            assert not done.failures
            case = replace(case, setup=replace(case.setup, seed=8))
        kept = engine.client_versions()
    mask = masked.model.mask
    found = {n: t for n, t in state.params.items() if n.partition("@")[0].endswith("mask")}
    assert all(torch.equal(tensor, mask.expand_as(tensor)) for tensor in found.values())
    start = method.start(case.setup).params
    changed = [n for n, t in state.params.items() if n in start and not torch.equal(t, start[n])]
    assert changed or kept


def test_other_infinities_than_the_servers_are_refused(masked):
    params = {n: t.detach() for n, t in named_tensors(masked.model).items()}
    inf, nan = torch.inf, torch.nan
    for bad in ([-inf, -inf], [0.0, inf], [0.0, nan], [nan, -inf]):
        sent = copy_subnet_tensors(params, masked.structure, Subnet())
        validate_update(Update(0, (Subnet(),), (sent,), 1.0, {}), masked.structure, params)
        sent["mask"] = torch.tensor(bad)
        with pytest.raises(UpdateError, match="'mask' with values that are not finite"):
            validate_update(Update(0, (Subnet(),), (sent,), 1.0, {}), masked.structure, params)
