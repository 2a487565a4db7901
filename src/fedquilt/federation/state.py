"""What a run is about, and everything that survives from one round to the next."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedquilt.federation.client import Client
from fedquilt.structure.groups import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import Example

USUAL_COHORT = 10  # clients that take part in a round of the papers' experiments


@dataclass(frozen=True, eq=False)
class Setup:
    """What stays the same during a run."""

    model: nn.Module
    structure: Structure
    example: Example
    clients: tuple[Client, ...]
    rounds: int
    seed: int


@dataclass(frozen=True)
class Phase:
    """A stretch of rounds in which clients do the same kind of work.

    ``fraction`` of the clients, or of those that it is ``among``, take part in each round. None is
    the papers' tenth, but not fewer than the ten clients that this is of their hundred. A closing
    phase finishes a model: it is run at the end, and on a copy whenever the model is
    evaluated on the way.
    """

    name: str
    rounds: int
    fraction: float | None
    is_closing: bool = False
    among: tuple[int, ...] | None = None  # None: all

    def cohort_size(self, num_clients: int) -> int:
        """How many clients take part in a round: at least one."""
        if self.fraction is None:
            return min(num_clients, max(USUAL_COHORT, round(num_clients / 10)))
        return max(1, round(self.fraction * num_clients))

    def able(self, clients: tuple[Client, ...]) -> list[Client]:
        """The clients that it is for."""
        return [c for c in clients if self.among is None or c.id in self.among]

    def needed(self, clients: tuple[Client, ...]) -> int:
        """How many of the clients take part in a round."""
        return self.cohort_size(len(self.able(clients)))


def sample(
    clients: tuple[Client, ...],
    phase: Phase,
    seed: int,
    spare: float = 0.0,
    present: Collection[int] | None = None,
) -> list[Client]:
    """A random cohort, in the order of the clients' numbers; ``spare``: and so many more.

    Who is not ``present`` is passed over, unless nobody is that the phase is for.
    """
    able = phase.able(clients)
    order = np.random.default_rng(seed).permutation(len(able)).tolist()
    there = [i for i in order if present is None or able[i].id in present] or order
    size = math.ceil(phase.needed(clients) * (1 + spare))
    return [able[i] for i in sorted(there[:size])]


@dataclass(frozen=True, eq=False)
class State:
    """Everything that survives from one round to the next."""

    round: int
    phase: str
    params: Mapping[str, Tensor]  # global tensors; a subnet's own are called name@owner
    memory: Mapping[str, Any] = field(default_factory=dict)  # a method's own, as JSON values
    server: Mapping[str, Tensor] = field(default_factory=dict)  # a method's own, no part of a model
    chosen: Mapping[int, Subnet] = field(default_factory=dict)  # by clients, each for itself
