"""Laws of every recipe: a function of its task, the client's state and data, and nothing else."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from dataclasses import replace

import pytest
import torch

import fedquilt.training
from fedquilt.federation.client import ClientResult, Task
from fedquilt.structure.budget import Budget
from fedquilt.structure.structure import STATISTICS, TRACKED
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.bilevel import SHARES, Bilevel
from fedquilt.training.dpsgd import DPSGD
from fedquilt.training.evaluate import Evaluate
from fedquilt.training.feddyn import FedDynTraining
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.local_test import WithLocalTest
from fedquilt.training.moreau import Moreau
from fedquilt.training.ordered import OrderedDropout
from fedquilt.training.poisoning import LabelFlip, Poisoned
from fedquilt.training.private import PrivateReply
from fedquilt.training.sandwich import Sandwich
from fedquilt.training.search import Search
from fedquilt.training.secure import MaskedReply, RevealSecrets, ShareSecrets, StartSession
from fedquilt.training.settings import LocalTraining
from fedquilt.training.slimmable import Slimmable
from fedquilt.training.statistics import QueryStatistics
from fedquilt.training.ternary import TernarySGD

LOCAL = LocalTraining(lr=0.05, epochs=2, batch_size=4)
SGD = LocalSGD(LOCAL, lr=0.05)
WHOLE = (Subnet(),)
PERSONAL = (Subnet().with_private("own", TRACKED),)
NESTED = "nested"  # stands for two widths, which need the structure
LOCAL_STATISTICS = {"norm.running_mean": torch.full((6,), 0.3)}

CASES = {  # recipe, subnets, client state
    "LocalSGD": (SGD, WHOLE, {}),
    "LocalSGD that keeps statistics": (
        replace(SGD, local_params=(STATISTICS,)),
        WHOLE,
        LOCAL_STATISTICS,
    ),
    "Slimmable": (Slimmable(LOCAL, 0.05), NESTED, {}),
    "OrderedDropout": (OrderedDropout(LOCAL, 0.05), NESTED, {}),
    "Sandwich": (Sandwich(LOCAL, 0.05, nets=3), (Subnet().excluding(TRACKED),), {}),
    "Search": (Search(Budget(0.5)), WHOLE, {}),
    "Bilevel": (Bilevel(LOCAL, 0.05, ("first",)), WHOLE, {SHARES: torch.tensor([0.6])}),
    "FedDynTraining": (
        FedDynTraining(SGD, alpha=0.1),
        WHOLE,
        {"classifier.bias": torch.full((4,), 0.2)},
    ),
    "Moreau": (Moreau(LOCAL, 0.05, steps=2), WHOLE, {"classifier.bias@own": torch.ones(4)}),
    "TernarySGD": (TernarySGD(SGD, 0, 0.05, 0.05), WHOLE, {}),
    "QueryStatistics": (QueryStatistics(4), WHOLE, {}),
    "QueryStatistics of the client's own net": (
        QueryStatistics(4, personal=True),
        PERSONAL,
        {"norm.running_mean@own": torch.ones(6)},
    ),
    "PrivateReply": (
        PrivateReply(SGD, clip=0.5, noise=0.1, secret="ab" * 32, round=1),
        WHOLE,
        {},
    ),
    "Poisoned": (Poisoned(SGD, LabelFlip()), WHOLE, {}),
    "Evaluate": (Evaluate(local_params=(STATISTICS,)), WHOLE, LOCAL_STATISTICS),
    "WithLocalTest": (
        WithLocalTest(replace(SGD, local_params=(STATISTICS,))),
        WHOLE,
        LOCAL_STATISTICS,
    ),
}


DRAW_SECRETS = {  # so they are no functions; tests/runs/test_secure.py and test_dpsgd.py try them
    StartSession,
    ShareSecrets,
    MaskedReply,
    RevealSecrets,
    DPSGD,  # needs a net without batch normalization
}


def test_every_recipe_is_among_the_cases():
    recipes = set()
    for module in pkgutil.iter_modules(fedquilt.training.__path__, "fedquilt.training."):
        for value in vars(importlib.import_module(module.name)).values():
            is_recipe = dataclasses.is_dataclass(value) and hasattr(value, "run")
            if is_recipe and list(inspect.signature(value.run).parameters)[1:] == [
                "task",
                "context",
            ]:
                recipes.add(value)
    assert recipes - DRAW_SECRETS == {type(recipe) for recipe, _, _ in CASES.values()}


def bits(tensors):
    return {name: t.detach().numpy().tobytes() for name, t in tensors.items()}


def frozen(result: ClientResult):
    """Everything that a result says, as values that can be compared."""
    update = result.update
    sent = (update.client, update.subnets, update.weight, dict(update.metrics))
    model = result.local_model and (result.local_model[0], [*map(bits, result.local_model[1])])
    state = None if result.state is None else bits(result.state)
    return sent, [*map(bits, update.params)], state, model


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request, structure, params):
    recipe, subnets, state = request.param
    if subnets == NESTED:
        subnets = (Subnet(), structure.subnet(0.5))
    return Task(0, subnets, params, recipe, seed=3), {n: t.clone() for n, t in state.items()}


def test_the_same_input_gives_the_same_bits(case, fresh_bench):
    """Also where modules have been used: for this task, and for another client's."""
    task, state = case
    used = fresh_bench()
    expected = frozen(task.recipe.run(task, fresh_bench().for_client(state)))
    assert frozen(task.recipe.run(task, used.for_client(state))) == expected
    other = {n: -t if t.is_floating_point() else t for n, t in task.params.items()}
    task.recipe.run(replace(task, client=1, params=other, seed=9), used.for_client(None))
    assert frozen(task.recipe.run(task, used.for_client(state))) == expected


def test_nothing_that_is_given_is_changed(case, fresh_bench):
    task, state = case
    context = fresh_bench().for_client(state)
    before = bits(task.params), bits(state), bits(named_tensors(context.model))
    attributes = dict(vars(context))
    result = task.recipe.run(task, context)
    assert (bits(task.params), bits(state), bits(named_tensors(context.model))) == before
    assert vars(context) == attributes
    assert not {t.data_ptr() for t in named_tensors(context.model).values()} & {
        t.data_ptr() for part in result.update.params for t in part.values() if t.numel()
    }


def test_results_do_not_change_with_later_work(case, fresh_bench):
    """Modules are used again: what was returned must not live in them."""
    task, state = case
    context = fresh_bench()
    result = task.recipe.run(task, context.for_client(state))
    before = frozen(result)
    other = {n: -t if t.is_floating_point() else t for n, t in task.params.items()}
    task.recipe.run(replace(task, client=1, params=other, seed=9), context.for_client(None))
    assert frozen(result) == before


def test_a_client_state_cannot_be_written_to(fresh_bench):
    state = fresh_bench().for_client({"count": torch.ones(1)}).client_state
    with pytest.raises(TypeError):
        state["count"] = torch.zeros(1)
    assert dict(fresh_bench().client_state) == {}
