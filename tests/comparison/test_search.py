"""Successive halving, budgets in bytes, lists of values, and what they cost."""

import numpy as np
import pytest
import torch
from tests.comparison.conftest import run

import fedquilt as fq
from fedquilt.comparison.halving import halve, plan_rungs
from fedquilt.comparison.validation import hold_out_validation
from fedquilt.comparison.variants import list_variants
from fedquilt.errors import ConfigError
from fedquilt.federation.client import SERVER

RATES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)


@pytest.mark.parametrize("best", RATES)
def test_halving_finds_the_best_of_a_known_objective(best):
    """A parabola in the logarithm of the rate, with noise that falls with the rounds."""
    draw, spent = np.random.default_rng(0), []

    def evaluate(pairs, rounds):
        spent.append(len(pairs) * rounds)
        noise = draw.normal(0, 0.02 / rounds, len(pairs))
        return [-(np.log10(lr / best) ** 2) + n for (_, lr), n in zip(pairs, noise, strict=True)]

    ranked = halve({"one": RATES, "two": RATES}, 90, evaluate)
    assert ranked["one"][0] == ranked["two"][0] == best
    assert sum(spent) < 2 * len(RATES) * 90 / 3  # cheaper than all of them to the end


def test_a_candidate_that_fails_never_wins():
    ranked = halve({"a": [1, 2, 3]}, 9, lambda pairs, rounds: [None, float("nan"), -5.0])
    assert ranked["a"][0] == 3


def test_every_group_gets_the_same_rungs():
    seen = {"a": [], "b": []}

    def evaluate(pairs, rounds):
        for name in seen:
            seen[name].append((sum(group == name for group, _ in pairs), rounds))
        return [x for _, x in pairs]

    halve({"a": range(6), "b": range(6)}, 90, evaluate)
    assert seen["a"] == seen["b"] == plan_rungs(6, 90)


def test_validation_data_are_training_data_that_are_not_trained_on():
    inputs = torch.arange(40.0)[:, None]
    clients = fq.make_clients(
        (inputs, torch.arange(40) % 2), test=(inputs + 100, torch.zeros(40).long()), count=2
    )
    held = hold_out_validation(clients, seed=0)
    everything = torch.arange(40)

    def values(data):
        return set(data.batch(everything[: len(data)])[0].flatten().tolist())

    for client in (0, 1):
        assert values(held.train[client]) < values(clients.train[client])
        assert len(held.train[client]) == held.clients[client].num_examples == 16
    trained = values(held.train[0]) | values(held.train[1])
    assert values(held.test[SERVER]) == set(range(40)) - trained  # and nothing of the test data


def test_a_search_takes_the_rate_that_learns(tmp_path):
    table, log = run(
        tmp_path,
        rounds=6,
        compare={
            "methods": ["heterofl", "fjord"],
            "seeds": 1,
            "search_lr": True,
            "learning_rates": [1e-6, 0.1],
        },
    )
    assert {row["variant"]: row["learning_rate"] for row in table} == {
        "heterofl": 0.1,
        "fjord": 0.1,
    }
    assert len(log.done) == 4 + 2
    # the same as with that rate from the start
    assert run(tmp_path, rounds=6, compare={"methods": ["heterofl", "fjord"], "seeds": 1})[1].reused


def test_a_budget_in_bytes_allows_as_many_rounds_as_it_pays_for(tmp_path):
    """All clients take part, so that every round costs the same."""
    limit = 60_000.0
    table, _ = run(
        tmp_path,
        method={"fraction": 1.0},
        run={"evaluate_every": 1},
        compare={"methods": ["heterofl", "fedavg"], "seeds": 1, "bytes": limit},
    )
    rounds = {row.variant: row.rounds for row in table.rows}
    for row in table.rows:
        assert row.bytes <= limit < row.bytes * (1 + 1 / row.rounds) * 1.001
    assert rounds["heterofl"] > rounds["fedavg"]  # of which half of the clients train less


def test_a_budget_below_one_round_is_refused_with_the_number(tmp_path):
    with pytest.raises(ConfigError, match=r"one round of heterofl takes .* raise it"):
        run(tmp_path, compare={"methods": ["heterofl"], "seeds": 1, "macs": 10})


def test_lists_are_values_where_one_value_belongs():
    variants = list_variants(
        {
            "local_training.lr": [0.1, 0.01],
            "data.budgets": [1.0, 0.5],
            "method.scaler": [True, False],
        }
    )
    assert [v.name for v in variants] == [
        "heterofl lr=0.1 scaler=true",
        "heterofl lr=0.1 scaler=false",
        "heterofl lr=0.01 scaler=true",
        "heterofl lr=0.01 scaler=false",
    ]
    assert {tuple(v.settings["data.budgets"]) for v in variants} == {(1.0, 0.5)}
    lists = list_variants(
        {"data.budgets": [[1.0, 0.5], [1.0]], "model.hidden": [16, 8], "model.name": "mlp"}
    )
    assert [v.settings["data.budgets"] for v in lists] == [[1.0, 0.5], [1.0]]
    assert {str(v.settings["model.hidden"]) for v in lists} == {"[16, 8]"}


def test_swept_values_are_rows(tmp_path):
    table, log = run(
        tmp_path,
        local_training={"epochs": 1, "batch_size": 20, "lr": [0.1, 1e-6]},
        compare={"methods": [], "seeds": 1},
    )
    assert [row.variant for row in table.rows] == ["heterofl lr=0.1", "heterofl lr=1e-06"]
    assert len(log.done) == 2
