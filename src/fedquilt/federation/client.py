"""Clients, the tasks they are given, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import Params
from fedquilt.structure.subnet import Subnet

if TYPE_CHECKING:
    from fedquilt.training.recipe import Recipe

SERVER = -1  # the client that holds the server's own held-out data
NOT_WAITED_FOR = "it was not waited for: enough others had answered"  # which is no fault
PERSONAL = "own"  # the owner of tensors that a client keeps as those of its own net
EVERYONE = -2  # the server with the data of all clients, where it has gathered them


def called(client: int) -> str:
    """How messages speak of who worked.

    >>> called(3), called(SERVER), called(EVERYONE)
    ('client 3', 'the server', 'all clients together')
    """
    names = {SERVER: "the server", EVERYONE: "all clients together"}
    return names.get(client, f"client {client}")


@dataclass(frozen=True)
class Client:
    """What the server knows about one participant."""

    id: int
    num_examples: int
    labels: tuple[int, ...] = ()  # classes it has
    budget: Budget = field(default_factory=Budget)
    group: str = field(default="", repr=False)  # where its data come from, such as a domain
    num_tests: int | None = field(
        default=None, repr=False
    )  # targets to test on; None: nobody knows


@dataclass(frozen=True, eq=False)
class Task:
    """What the server asks of a client: a recipe, and the subnets to do it with.

    ``params`` are the global tensors, by reference; whoever moves the task to the client takes the
    subnets' cells from them, so only those travel. Without subnets all of ``params`` travel as they
    are: tensors of another kind, such as codes.
    """

    client: int
    subnets: tuple[Subnet, ...]
    params: Params
    recipe: Recipe
    seed: int


@dataclass(frozen=True, eq=False)
class Update:
    """What a client sends back: subnets, which it may have chosen itself, and their tensors.

    Instead of a subnet's tensors there may be a code of them, which the method opens.
    """

    client: int
    subnets: tuple[Subnet, ...]
    params: tuple[Mapping[str, Tensor], ...]
    weight: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """A client that gave no usable answer, and why."""

    client: int
    reason: str

    def __str__(self) -> str:
        """Who, and why; once, if the reason names it.

        >>> print(Failure(3, "out of memory"), Failure(3, "client 3 sent nothing"), sep="; ")
        client 3: out of memory; client 3 sent nothing
        """
        who = called(self.client)
        return self.reason if self.reason.startswith(f"{who} ") else f"{who}: {self.reason}"


def seed_of(*parts: int) -> int:
    """A seed for one stream of randomness, such as (seed, round, client).

    Different parts give different streams, also when some are zero or missing: NumPy takes
    (1,) and (1, 0) for the same, so the number of parts goes in as well.

    >>> seed_of(0, 1, 2) == seed_of(0, 1, 2) != seed_of(0, 2, 1)
    True
    """
    words = [word for part in parts for word in divmod(part % 2**64, 2**32)]
    numbers = [len(parts), *words]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
