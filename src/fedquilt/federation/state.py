"""What a run is about, and everything that survives from one round to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor, nn

from fedquilt.federation.client import Client
from fedquilt.federation.columns import ComputedColumn, Integers
from fedquilt.federation.flat_tensors import offload
from fedquilt.federation.registry import MANY_CLIENTS, ClientRegistry
from fedquilt.learning.task import CLASSIFICATION, LearningTask
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import Example

Sampling = Literal["fixed", "poisson"]  # how the clients of a round are drawn
DEFAULT_COHORT = 10  # clients that take part in a round of the papers' experiments


@dataclass(frozen=True, eq=False)
class Setup:
    """What stays the same during a run.

    Args:
        model: The supernet, as it is trained.
        structure: What can be cut in it.
        example: An input of the model.
        clients: Who takes part, as they have registered: a ``ClientRegistry``, or several clients.
        rounds: The rounds of training.
        seed: Of all random streams.
        sampling: fixed: every cohort has the same size; poisson: every client is in it with the
            same probability, independently of the others.
        task: What is learned: the loss and the metrics.

    >>> import torch, fedquilt as fq
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> example, clients = torch.zeros(1, 4), (fq.Client(0, num_examples=10),)
    >>> structure = fq.trace_structure(model, example)
    >>> setup = fq.Setup(model, structure, example, clients, rounds=5, seed=0)
    >>> fq.HeteroFL().phases(setup)[0].rounds
    5
    """

    model: nn.Module
    structure: Structure
    example: Example
    clients: Sequence[Client]
    rounds: int
    seed: int
    sampling: Sampling = "fixed"
    task: LearningTask = CLASSIFICATION

    @cached_property
    def registry(self) -> ClientRegistry:
        """The clients as columns."""
        return ClientRegistry.of(self.clients)

    @property
    def clients_by_id(self) -> Mapping[int, Client]:
        """The clients by their numbers."""
        return self.registry.by_id

    @cached_property
    def cached_results(self) -> dict[str, Any]:
        """What functions that are ``cache_per_setup`` have found for this setup, by their names."""
        return {}


T = TypeVar("T")


def cache_per_setup(function: Callable[[Setup], T]) -> Callable[[Setup], T]:
    """Caches a function of a setup, on the setup itself: the result lives as long as it does."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def call(setup: Setup) -> T:
        if name not in setup.cached_results:
            setup.cached_results[name] = function(setup)
        result: T = setup.cached_results[name]
        return result

    return call


@dataclass(frozen=True)
class Phase:
    """A stretch of rounds in which clients do the same kind of work.

    Args:
        name: How the method tells it from its other phases.
        rounds: How many rounds it has.
        fraction: The fraction of the clients, or of those in ``restrict_to``, that take part in
            each round. None: a tenth as in the papers, but at least ten clients.
        is_closing: Whether it finishes a model: it is run at the end, and on a copy whenever the
            model is evaluated on the way.
        restrict_to: The numbers of the clients that it is for; None: all. They are kept by the
            setup (``cache_per_setup``) where clients are many, since every round asks for them.

    >>> import fedquilt as fq
    >>> fq.Phase("train", rounds=100, fraction=0.2).cohort_size(num_clients=50)
    10
    """

    name: str
    rounds: int
    fraction: float | None
    is_closing: bool = False
    restrict_to: Sequence[int] | None = None  # None: all

    def cohort_size(self, num_clients: int) -> int:
        """How many clients take part in a round: at least one."""
        if self.fraction is None:
            return min(num_clients, max(DEFAULT_COHORT, round(num_clients / 10)))
        return max(1, round(self.fraction * num_clients))

    def eligible(self, clients: Sequence[Client]) -> ClientRegistry:
        """The clients that it is for."""
        return ClientRegistry.of(clients).select(self.restrict_to)

    def count_needed(self, clients: Sequence[Client]) -> int:
        """How many of the clients take part in a round."""
        return self.cohort_size(len(self.eligible(clients)))

    def sampling_rate(self, clients: Sequence[Client]) -> float:
        """The probability that a client that it is for takes part in a round."""
        return min(1.0, self.count_needed(clients) / max(len(self.eligible(clients)), 1))


def sample_cohort(
    clients: Sequence[Client],
    phase: Phase,
    seed: int,
    oversample: float = 0.0,
    available: Collection[int] | None = None,
    sampling: Sampling = "fixed",
) -> Sequence[Client]:
    """Draws a random cohort, in the order of the clients' numbers; each is made when asked for.

    ``oversample`` is the fraction of clients that are asked beyond those needed. Clients that are
    not ``available`` are passed over, unless none of those that the phase is for is available. With
    Poisson sampling a cohort may be empty, and who is not available is not replaced.

    Above ``MANY_CLIENTS`` the draw takes time in proportion to the cohort, not to all clients.
    """
    able = phase.eligible(clients)
    rng = np.random.default_rng(seed)
    if sampling == "poisson":
        rows = _draw_poisson(rng, len(able), phase.sampling_rate(clients) * (1 + oversample))
        if available is not None:
            rows = np.array([r for r in rows.tolist() if able.ids[r] in available], np.int64)
    else:
        size = math.ceil(phase.cohort_size(len(able)) * (1 + oversample))
        rows = np.sort(np.array(_draw_fixed(rng, able, size, available), np.int64))
    return ComputedColumn(lambda row: able[int(rows[row])], len(rows))


def _draw_poisson(rng: np.random.Generator, count: int, rate: float) -> Integers:
    """Draws each of the rows with the same probability, independently; in order."""
    if count <= MANY_CLIENTS:
        return np.flatnonzero(rng.random(count) < rate)
    size = rng.binomial(count, min(rate, 1.0))  # as many as would be drawn, and which
    return np.sort(rng.choice(count, size, replace=False, shuffle=False))


def _draw_fixed(
    rng: np.random.Generator, able: ClientRegistry, size: int, available: Collection[int] | None
) -> list[int]:
    """Draws rows of clients, which are available if any of them is."""
    count = len(able)
    if count <= MANY_CLIENTS:
        order = rng.permutation(count)
        if available is None:
            return [int(row) for row in order[:size]]
        ids = able.ids
        return ([i for i in order.tolist() if ids[i] in available] or order.tolist())[:size]
    there = None if available is None else able.find_rows(available)
    count = count if there is None or not len(there) else len(there)
    drawn = rng.choice(count, min(size, count), replace=False, shuffle=False)
    return [int(row) for row in (drawn if there is None or not len(there) else there[drawn])]


@dataclass(frozen=True, eq=False)
class State:
    """Everything that survives from one round to the next.

    Args:
        round: The number of rounds that are done.
        phase: The name of the method's phase.
        params: The global tensors by name; one that belongs to a subnet alone is ``name@owner``.
        method_state: What a method needs to remember, as JSON values.
        server_tensors: Tensors that a method needs to remember and that are no part of a model,
            such as the moments of a server optimizer.
        chosen_subnets: The subnets that clients have chosen themselves, by client.

    >>> import torch, fedquilt as fq
    >>> from dataclasses import replace
    >>> state = fq.State(round=0, phase="train", params={"weight": torch.zeros(3, 4)})
    >>> replace(state, round=1, method_state={"best": 0.5}).method_state
    {'best': 0.5}
    """

    round: int
    phase: str
    params: Mapping[str, Tensor]  # global tensors; a subnet's own are called name@owner
    method_state: Mapping[str, Any] = field(default_factory=dict)  # a method's own, as JSON values
    server_tensors: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # a method's own, no part of a model
    chosen_subnets: Mapping[int, Subnet] = field(
        default_factory=dict
    )  # by clients, each for itself


def offload_state(state: State) -> State:
    """The same state, the tensors of a large model in temporary files that are mapped."""
    params, server = offload(state.params), offload(state.server_tensors)
    return replace(state, params=params, server_tensors=server)
