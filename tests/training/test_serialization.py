"""Recipes as plain values: every method's come back as they were, and nothing else is made."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from fedquilt.errors import ConfigError
from fedquilt.structure.budget import Budget
from fedquilt.structure.subnet import Subnet
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.objectives import Adversarial
from fedquilt.training.search import Search
from fedquilt.training.serialization import KIND, from_plain, to_plain
from fedquilt.training.settings import LocalTraining


def sent(value, allowed=()):
    """As it arrives: through a message."""
    return from_plain(json.loads(json.dumps(to_plain(value))), allowed)


@dataclass(frozen=True)
class Own:
    number: int
    parts: tuple[Budget, ...] = ()


@pytest.mark.parametrize(
    "recipe",
    [
        LocalSGD(
            LocalTraining(lr=0.1 + 0.2, max_grad_norm=None),
            1 / 3,
            labels=(0, 2),
            objective=Adversarial(),
        ),
        Search(Budget(0.5, params=10**12)),
        Subnet.from_channels({"a": range(3), "b": [100]})
        .with_private("half", "x*")
        .without_blocks("block"),
        None,
        (1, (2.5, "three"), True),
    ],
    ids=repr,
)
def test_what_is_sent_is_what_arrives(recipe):
    assert sent(recipe) == recipe
    assert hash(sent(recipe)) == hash(recipe)


def test_own_recipes_are_made_where_they_are_allowed():
    own = Own(3, (Budget(0.5),))
    assert sent(own, [Own]) == own
    with pytest.raises(ConfigError, match="no recipe of this fedquilt"):
        sent(own)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "fedquilt.cli.train:train",
        "fedquilt.training.local_sgd:batches",
        "fedquilt.training.local_sgd:SGD.run",
        "fedquilt.training.local_sgd:LocalTraining",
        "fedquilt.training.nothing:SGD",
        "fedquilt.training.:SGD",
        "",
        None,
        7,
    ],
)
def test_nothing_but_recipes_is_made_from_a_message(name):
    with pytest.raises(ConfigError, match="no recipe"):
        from_plain({KIND: name})


def test_settings_that_a_recipe_does_not_have_are_refused():
    with pytest.raises(ConfigError, match="same version"):
        from_plain({KIND: "fedquilt.training.statistics:QueryStatistics", "rows": 3})


@pytest.mark.parametrize("value", [{1, 2}, [1], {"a": 1}, object(), b"bytes", Own])
def test_what_is_not_plain_is_not_sent(value):
    with pytest.raises(ConfigError, match="numbers, words"):
        to_plain(value)


def halve(position: int, total: int) -> float:
    return 0.5**position


ADAMW = {"name": "adamw", "betas": [0.9, 0.98]}


@pytest.mark.parametrize("optimizer", ["adam", ADAMW, "mine.py:make", "sgd"])
def test_every_kind_of_optimizer_arrives_as_it_was(optimizer):
    settings = LocalTraining(optimizer=optimizer, schedule=("warmup:2", "mine.py:factor"))
    paths = ["mine.py:make", "mine.py:factor"]
    arrived = from_plain(json.loads(json.dumps(to_plain(settings))), functions=paths)
    assert arrived == settings


def test_a_function_travels_by_the_path_that_it_is_imported_by():
    arrived = from_plain(to_plain(LocalTraining(step_schedule=halve)), functions=None)
    assert arrived.step_schedule[0](3, 9) == 0.125
    assert arrived.step_schedule[0].path == f"{__name__}:halve"
    with pytest.raises(ConfigError, match="by the path that it can be imported by"):
        to_plain(lambda: None)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "os:system"},
        {"optimizer": {KIND: "fedquilt.training.function_path:FunctionPath"}},
        {"step_schedule": ["constant:1", "os:system"]},
        {"schedule": "os:system"},
    ],
    ids=str,
)
def test_a_message_names_no_code_that_the_receiver_does_not(settings):
    """As a string, or as what it becomes: neither is imported."""
    plain = to_plain(LocalTraining())
    if isinstance(settings.get("optimizer"), dict):
        settings["optimizer"] |= {"path": "os:system", "noun": "optimizer"}
    with pytest.raises(ConfigError, match="'os:system' is code, and it is not in the settings"):
        from_plain({**plain, **settings}, functions=["mine.py:make"])
