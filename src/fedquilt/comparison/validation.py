"""Runs that are scored on validation data: a part of the training data, and never the test data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.comparison.scoring import Scoring
from fedquilt.comparison.trial import Trial
from fedquilt.data import ConcatExamples
from fedquilt.data.population import Population
from fedquilt.errors import DataError
from fedquilt.federation.client import SERVER
from fedquilt.runs.plan import RunPlan

FRACTION = 0.2  # of each client's training examples
STREAM = 7919  # of the seeds that draw them


@dataclass(frozen=True, eq=False)
class ValidationTrial:
    """A run that trains on most of the training data, and is scored on the rest of them."""

    trial: Trial

    @property
    def variant(self) -> str:
        """What is compared."""
        return self.trial.variant

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.trial.seed

    @property
    def rounds(self) -> int:
        """The rounds of training."""
        return self.trial.rounds

    @property
    def name(self) -> str:
        """The name of the run, with what it is for."""
        return f"search-{self.trial.name}"

    @property
    def device(self) -> str:
        """The device that clients train on."""
        return self.trial.device

    @property
    def clients_per_pass(self) -> int | str:
        """How many clients train in one pass."""
        return self.trial.clients_per_pass

    @property
    def scoring(self) -> Scoring | None:
        """How the finished run is scored."""
        return self.trial.scoring

    def describe(self) -> Mapping[str, Any]:
        """As the run itself, and the part that is held back."""
        return {**self.trial.describe(), "scored_on_training_data": FRACTION}

    def plan(self, folder: Path) -> RunPlan:
        """The run with other data."""
        plan = self.trial.plan(folder)
        population = hold_out_validation(plan.population, plan.setup.seed)
        setup = replace(plan.setup, clients=population.clients)
        return replace(plan, setup=setup, population=population)


def hold_out_validation(population: Population, seed: int) -> Population:
    """The population with a part of each client's training examples in place of all test data."""
    train, held = {}, {}
    for client, data in population.train.items():
        order = np.random.default_rng((STREAM, seed, client)).permutation(len(data))
        count = int(FRACTION * len(data))
        train[client] = data.select(np.sort(order[count:]))
        if count:
            held[client] = data.select(np.sort(order[:count]))
    if not held:
        raise DataError(
            "a search needs validation data, and no client has five training examples; leave out "
            "search_lr, or have fewer clients"
        )
    clients = tuple(
        replace(
            client,
            num_examples=len(train[client.id]),
            labels=train[client.id].label_set,
            num_tests=None,
        )
        for client in population.clients
    )
    together = ConcatExamples(tuple(held[client] for client in sorted(held)))
    return Population(clients, train, {SERVER: together}, population.validation)
