"""What is checked before a run with secure sums, and how its pipelines come to see sums only."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation import AggregationPipeline
from fedquilt.federation.aggregation.secure_sum import SecureSum
from fedquilt.federation.client import Task
from fedquilt.federation.rings import find_rings, list_averaged
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.state import Setup
from fedquilt.federation.validation import list_sent_subnets
from fedquilt.methods.method import Method

MAX_RINGS_PER_CLIENT, FEW_RINGS = 2, 16  # more: every client has drawn cells of its own


def make_secure(
    pipelines: Mapping[str, AggregationPipeline], settings: SecureAggregation
) -> dict[str, AggregationPipeline]:
    """The pipelines of a method's phases, with aggregators that see sums only.

    Raises:
        ConfigError: A part has to see single updates, or tells of clients' data.
    """
    return {
        name: replace(pipeline, aggregator=SecureSum(settings, pipeline.aggregator))
        for name, pipeline in pipelines.items()
    }


def check_secure(setup: Setup, method: Method, settings: SecureAggregation) -> None:
    """Refuses what cannot be summed securely, before anything is trained.

    Warns of parts of the model that too few of all clients train: they would never change.
    """
    phases, name = method.phases(setup), type(method).__name__
    pipelines = {phase.name: method.aggregation(setup, phase.name) for phase in phases}
    for pipeline in pipelines.values():
        if any(part.reveals_data for part in pipeline.server_updates):
            raise ConfigError(
                f"in a secure sum the server chooses what clients send, and with {name} they "
                "choose by their data; choose a method such as heterofl"
            )
    make_secure(pipelines, settings)
    for phase in phases:
        if (count := phase.count_needed(setup.registry)) < settings.threshold:
            raise ConfigError(
                f"{count} clients take part in a round, and secure_aggregation.threshold is "
                f"{settings.threshold}; lower it, or let more clients take part (method.fraction)"
            )
        state = replace(method.start(setup), phase=phase.name)
        tasks = method.plan(setup, state, phase.eligible(setup.registry))
        if any(task.client not in setup.clients_by_id for task in tasks):
            raise ConfigError(f"a secure sum is over clients, and {name} trains on the server")
        _check_holders(setup, tasks, f"{name} ({phase.name})", settings.threshold)


def _check_holders(setup: Setup, tasks: Sequence[Task], name: str, threshold: int) -> None:
    """Refuses, or warns of, parts of the model that too few clients train."""
    population = Counter(list_sent_subnets(task) for task in tasks)
    rings = find_rings(setup.structure, population, list_averaged(setup))
    held = [
        (count, ring.num_cells)
        for ring, count in zip(rings, rings.count_holders(population), strict=True)
        if ring.holders
    ]
    if not held:
        raise ConfigError(f"{name} sends nothing that could be summed; train without a secure sum")
    if len(held) > max(MAX_RINGS_PER_CLIENT * len(tasks), FEW_RINGS):
        raise ConfigError(
            f"a secure sum is over clients that hold the same cells, and with {name} the subnets "
            f"of {len(tasks)} clients divide the model into {len(held)} parts; choose a method or "
            "settings where clients share their subnets"
        )
    lost = sum(size for count, size in held if count < threshold)
    if all(count < threshold for count, _ in held):
        raise ConfigError(
            f"with {name} no part of the model is sent by {threshold} clients, as "
            "secure_aggregation.threshold asks; lower it, give more clients the largest budgets, "
            "or choose a method whose clients share more of their subnets"
        )
    if lost:
        fewest = min(count for count, _ in held)
        warnings.warn(
            f"with {name} {lost:,} weights do not change in the first round: fewer than "
            f"{threshold} of all clients send them, down to {fewest:g}, and "
            f"secure_aggregation.threshold is {threshold}; lower it, or give more clients the "
            "largest budgets",
            stacklevel=2,
        )
