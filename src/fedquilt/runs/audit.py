"""Audits of finished runs: how well an attacker tells who was in the training data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt.data import ClientData, ConcatExamples, Dataset
from fedquilt.data.population import Population
from fedquilt.engines.scratch import ScratchDirectory
from fedquilt.errors import ConfigError
from fedquilt.evaluation.membership import (
    MembershipScore,
    Numbers,
    compute_confidences,
    compute_likelihood_ratios,
    compute_losses,
    measure_membership,
)
from fedquilt.federation.client import SERVER, derive_seed
from fedquilt.runs.from_config import match_preprocessing, plan_run
from fedquilt.runs.plan import start_run
from fedquilt.runs.run import Run
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import load_source
from fedquilt.settings.schema import Config

MAX_EXAMPLES = 5000  # members, and as many others


def audit_run(
    run: Run,
    population: Population | None = None,
    *,
    width: float | None = None,
    unit: Literal["example", "client"] = "example",
    max_examples: int = MAX_EXAMPLES,
    seed: int = 0,
) -> MembershipScore:
    """Attacks a finished model by its loss: it is smaller on examples that it was trained on.

    Args:
        run: The finished run.
        population: The clients with their training data, and the server's held-out data, which are
            the others; None: those of the run.
        width: The size of the model that is attacked; None: the largest.
        unit: ``"example"``, or ``"client"``: then the mean loss of a client's examples is compared
            with that of as many held-out examples.
        max_examples: As many members and others at most, drawn.
        seed: Of the draw and of the bootstrap.

    >>> import torch, fedquilt as fq
    >>> inputs, labels = torch.rand(40, 4), torch.arange(40) % 3
    >>> data, test = (inputs[:20], labels[:20]), (inputs[20:], labels[20:])
    >>> clients = fq.make_clients(data, test=test, count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, inputs[:1], "fedavg", clients, rounds=1, workers=0)
    >>> fq.audit_run(run).num_members
    20
    """
    people = run.population if population is None else population
    if people is None or SERVER not in people.test or not people.train:
        raise ConfigError(
            "an audit compares training data with held-out data of the server, and one of them is "
            "not here; give a population that has both"
        )
    members = ConcatExamples(tuple(people.train[client] for client in sorted(people.train)))
    others, module = people.test[SERVER], run.customize(width)
    if unit == "client":
        sizes = [len(people.train[client]) for client in sorted(people.train)]
        inside = -_score_clients(module, members, sizes)
        count = int(np.median(sizes))
        outside = -_score_clients(module, others, [count] * (len(others) // count))
    else:
        inside, outside = (
            -compute_losses(compute_confidences(module, part, _draw(len(part), max_examples, seed)))
            for part in (members, others)
        )
    return measure_membership(inside, outside, unit=unit, seed=seed)


def _score_clients(module: nn.Module, examples: ClientData, sizes: list[int]) -> Numbers:
    """The mean loss of each of some sets of examples, which follow each other."""
    rows = torch.arange(sum(sizes))
    losses = compute_losses(compute_confidences(module, examples, rows))
    return np.array([part.mean() for part in np.split(losses, np.cumsum(sizes)[:-1])])


def _draw(count: int, most: int, seed: int) -> Tensor:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:most].sort().values


def audit_with_shadows(
    run: Run,
    shadows: int,
    *,
    width: float | None = None,
    max_examples: int = MAX_EXAMPLES,
    seed: int = 0,
    workers: int | None = None,
) -> MembershipScore:
    """Attacks a run that settings describe with LiRA: trains shadow runs, and compares with them.

    Each shadow run has the settings of the run, and as many examples, drawn from the training and
    the held-out data together. So it takes as long as the run itself.

    Args:
        run: The finished run.
        shadows: How many shadow runs are trained; 2 at least.
        width: The size of the model that is attacked; None: the largest.
        max_examples: As many members and others at most, drawn.
        seed: Of all draws.
        workers: Processes that train.
    """
    if shadows < 2:
        raise ConfigError(f"LiRA needs two shadow runs at least, got {shadows}")
    if run.info.config is None:
        raise ConfigError(
            "shadow runs are trained by the settings of a run, and this one was trained from "
            "Python; audit it without shadow runs"
        )
    config = load_config(override_settings(dict(run.info.config), {"run.workers": workers}))
    source = match_preprocessing(run, load_source(config))
    if source.groups_train is not None:
        raise ConfigError(
            "shadow runs draw clients' examples anew, and these have natural clients or domains; "
            "audit the run without shadow runs"
        )
    pool = ConcatExamples((source.train, source.test))
    count, inside = len(pool), len(source.train)
    rows = torch.cat(
        [
            _draw(inside, max_examples, seed),
            inside + _draw(count - inside, max_examples, derive_seed(seed, 1)),
        ]
    )
    confidences, is_member = [], []
    for number in range(shadows):
        drawn = torch.randperm(
            count, generator=torch.Generator().manual_seed(derive_seed(seed, 2, number))
        )[:inside]
        trained = torch.zeros(count, dtype=torch.bool)
        trained[drawn] = True
        with _train_shadow(config, source, pool, drawn, derive_seed(seed, 3, number)) as shadow:
            confidences.append(compute_confidences(shadow.customize(width), pool, rows))
        is_member.append(trained[rows].numpy())
    target = compute_confidences(run.customize(width), pool, rows)
    scores = compute_likelihood_ratios(target, np.array(confidences), np.array(is_member))
    split = min(inside, max_examples)
    return measure_membership(scores[:split], scores[split:], attack="lira", seed=seed)


@contextmanager
def _train_shadow(
    config: Config, source: Dataset, pool: ConcatExamples, rows: Tensor, seed: int
) -> Iterator[Run]:
    """A run with the same settings on some examples of the pool, in a folder that is removed."""
    own = load_config(
        override_settings(config.model_dump(), {"seed": seed % 2**31, "run.evaluate_every": 0})
    )
    data = replace(source, train=pool.select(rows.sort().values))
    with ScratchDirectory() as folder:
        yield start_run(plan_run(own, data, folder / "shadow")).train()
