"""Settings that are given in Python are refused as those of the command line are."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.methods.base import BaseMethod
from fedquilt.ranges import Count, check_fields
from fedquilt.settings.load import load_config

if TYPE_CHECKING:
    from decimal import Decimal

WRONG = {
    "lr": (0, -0.1, math.nan, math.inf, "0.1", None),
    "momentum": (-0.1, 1, "0.9"),
    "weight_decay": (-1e-9, math.nan),
    "epochs": (0, -1, 1.5, True, "2"),
    "batch_size": (0, 2.0),
    "max_grad_norm": (0, -1, "1"),
    "milestones": (3, (1.5,), "12"),
    "milestone_decay": (0, -1),
    "cosine": (1, "yes"),
    "round_decay": (0, 1.1),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_an_optimiser_refuses_what_no_training_can_use(name, value):
    with pytest.raises(ConfigError, match=f"setting '{name}' of LocalTraining: .*got ") as refusal:
        fq.LocalTraining(**{name: value})
    assert repr(value) in str(refusal.value)


OUTSIDE = {
    "lr": 0,
    "momentum": 1,
    "weight_decay": -1,
    "epochs": 0,
    "batch_size": 0,
    "max_grad_norm": -1,
}


@pytest.mark.parametrize(
    ("name", "value"), (OUTSIDE | {"milestone_decay": 0, "round_decay": 1.1}).items()
)
def test_settings_of_a_file_have_the_same_ranges(name, value):
    with pytest.raises(ConfigError, match=f"'local_training.{name}"):
        load_config({"local_training": {name: value}})
    with pytest.raises(ConfigError, match=f"'{name}' of LocalTraining"):
        fq.LocalTraining(**{name: value})


def test_the_ends_of_every_range_belong_to_it_or_do_not():
    steps = fq.LocalTraining(
        lr=1, momentum=0, weight_decay=0, epochs=1, batch_size=1, max_grad_norm=None, round_decay=1
    )
    assert steps.lr == 1


def test_a_list_is_taken_for_the_tuple_that_is_meant():
    assert fq.LocalTraining(milestones=[2, 3]) == fq.LocalTraining(milestones=(2, 3))
    assert hash(fq.HeteroFL(widths=[1, 0.5])) == hash(fq.HeteroFL(widths=(1, 0.5)))


@pytest.mark.parametrize("name", fq.METHODS)
@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, math.nan, "0.5"])
def test_every_method_refuses_a_fraction_that_is_none(name, fraction):
    with pytest.raises(ConfigError, match=r"setting 'fraction' of \w+: .*got "):
        fq.METHODS[name](fraction=fraction)


@pytest.mark.parametrize("name", fq.METHODS)
def test_every_method_refuses_an_optimiser_that_is_none(name):
    with pytest.raises(
        ConfigError, match=r"setting 'local_training' of \w+: .*LocalTraining.*got 'sgd'"
    ):
        fq.METHODS[name]("sgd")


def test_a_method_of_ones_own_is_checked_by_its_annotations_too():
    @dataclass(frozen=True)
    class Mine(BaseMethod):
        fraction: float = 1.0
        depth: Count = 1
        objective: fq.Method | None = None  # a protocol is not looked into

    assert Mine(objective=object()).depth == 1
    with pytest.raises(ConfigError, match=r"setting 'depth' of Mine: .*got 0"):
        Mine(depth=0)


def test_types_that_only_a_type_checker_knows_are_not_checked():
    @dataclass(frozen=True)
    class Odd:
        value: "Decimal"

        def __post_init__(self):
            check_fields(self)

    assert Odd("3").value == "3"


@pytest.mark.parametrize("width", ["0.5", None, 0, 1.5, math.nan])
def test_a_width_is_a_number(width):
    with pytest.raises(BudgetError, match=r"fractions in \(0, 1\], got "):
        fq.Budget(width)


@pytest.mark.parametrize("limit", ["100", 0, -1, math.nan])
def test_a_limit_is_a_number_above_0(limit):
    with pytest.raises(BudgetError, match="limit on params is a number above 0, got "):
        fq.Budget(params=limit)


ARGUMENTS = {
    "count": ("2", 2.5),
    "min_examples": (0, 1.5, None),
    "seed": (-1, "a", 1.5),
    "validation": ("0.1", 1, None),
    "test_fraction": (-0.1, "0"),
    "holdout_clients": (1, "x"),
    "budgets": (["a"], [0], [], 1.5),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in ARGUMENTS.items() for v in vs])
def test_clients_are_made_of_numbers_in_their_ranges(name, value):
    pair = torch.zeros(8, 2), torch.arange(8) % 2
    with pytest.raises(fq.FedquiltError, match=r"got|empty") as refusal:
        fq.make_clients(pair, **{"count": 2, name: value})
    assert "\n" not in str(refusal.value)


def test_one_budget_is_everybodys():
    pair = torch.zeros(8, 2), torch.arange(8) % 2
    for budget in (0.5, {"width": 0.5}, fq.Budget(0.5)):
        assert {c.budget.width for c in fq.make_clients(pair, count=2, budgets=budget).clients} == {
            0.5
        }


@pytest.mark.parametrize("every", [-1, 1.5, "1", None])
def test_a_pace_counts_rounds(every):
    with pytest.raises(ConfigError, match="setting 'evaluate_every' of Cadence"):
        fq.Cadence(evaluate_every=every)
