"""Clients, the tasks they are given, and what comes back.

A recipe is what clients do in a task. This one sends back half of every weight that it got:

>>> from dataclasses import dataclass
>>> import torch, fedquilt as fq
>>> @dataclass(frozen=True)
... class Shrink:
...     factor: float
...
...     def run(self, task: fq.Task, context: fq.ClientContext) -> fq.ClientResult:
...         examples = context.examples("train", task.client)
...         module = context.module(task.subnets[0], task.params)
...         tensors = {name: self.factor * t for name, t in module.state_dict().items()}
...         metrics = {"examples": len(examples)}
...         update = fq.Update(task.client, task.subnets, (tensors,), 1.0, metrics)
...         return fq.ClientResult(update)
>>> recipe: fq.Recipe = Shrink(0.5)
>>> model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
>>> structure = fq.trace_structure(model, torch.ones(1, 1))
>>> clients = fq.make_clients((torch.ones(6, 1), torch.arange(6) % 2), count=2)
>>> context = fq.ClientContext(model, structure, {"train": clients.train})
>>> params = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
>>> task = fq.Task(0, (structure.subnet(),), params, recipe, seed=0)
>>> update = recipe.run(task, context).update
>>> update.params[0]["0.bias"], update.metrics
(tensor([0.5000, 0.5000]), {'examples': 3})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedquilt.structure.budget import Budget
from fedquilt.structure.cut import Params
from fedquilt.structure.subnet import Subnet

SERVER = -1  # the client that holds the server's own held-out data
NOT_NEEDED = "it was not waited for: enough others had answered"  # which is no fault
PERSONAL = "own"  # the owner of tensors that a client keeps as those of its own net
EVERYONE = -2  # the server with the data of all clients, where it has gathered them


def client_label(client: int) -> str:
    """How messages speak of who worked.

    >>> client_label(3), client_label(SERVER), client_label(EVERYONE)
    ('client 3', 'the server', 'all clients together')
    """
    names = {SERVER: "the server", EVERYONE: "all clients together"}
    return names.get(client, f"client {client}")


@dataclass(frozen=True)
class Client:
    """What the server knows about one participant.

    Args:
        id: The client's number.
        num_examples: The number of its training examples.
        labels: The classes that it has.
        budget: What it can afford.
        group: Where its data come from, such as a domain.
        num_tests: The number of targets to test on; None: not known.

    >>> import fedquilt as fq
    >>> fq.Client(3, num_examples=120, labels=(0, 8), budget=fq.Budget(width=0.5)).budget.width
    0.5
    """

    id: int
    num_examples: int
    labels: tuple[int, ...] = ()  # classes it has
    budget: Budget = field(default_factory=Budget)
    group: str = field(default="", repr=False)  # where its data come from, such as a domain
    num_tests: int | None = field(
        default=None, repr=False
    )  # targets to test on; None: nobody knows


class Recipe(Protocol):
    """A frozen dataclass of plain settings that knows how to do one kind of client work.

    It may also have ``reply_spec(task, client)``, which says what the update may be; other updates
    are rejected (``fedquilt.federation.validation``). The client is as it has registered. The
    module's docstring has an example.
    """

    def run(self, task: Task, context: Any) -> ClientResult:
        """Does the work for one client.

        A function of its arguments: the same task, client state and data give the same result, bit
        for bit. Everything that comes of the work is in the result.

        Args:
            task: What to do, with which subnets.
            context: The client's data and state, and modules of its subnets: a
                ``ClientContext`` of ``fedquilt.training.context``, which a layer below cannot name.
        """
        ...


@dataclass(frozen=True, eq=False)
class Task:
    """What the server asks of a client: a recipe, and the subnets to do it with.

    Only the subnets' cells travel: the engine takes them from ``params``. Without subnets all of
    ``params`` travel as they are: tensors of another kind, such as codes.

    Args:
        client: The client's number.
        subnets: The parts of the model to work with.
        params: The global tensors, by reference.
        recipe: What to do.
        seed: The seed of the client's random numbers.
    """

    client: int
    subnets: tuple[Subnet, ...]
    params: Params
    recipe: Recipe
    seed: int


@dataclass(frozen=True, eq=False)
class Update:
    """What a client sends back: subnets, which it may have chosen itself, and their tensors.

    Without subnets it may have one set of tensors of another kind, such as keys.

    Args:
        client: The client's number.
        subnets: The parts of the model that it sends.
        params: The tensors of each subnet, or a code of them, which the method's decoder opens.
        weight: How much the update counts in a mean.
        metrics: Numbers about the work, such as the training loss.
    """

    client: int
    subnets: tuple[Subnet, ...]
    params: tuple[Mapping[str, Tensor], ...]
    weight: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class ClientResult:
    """What came of a client's work: the update that it sends, and what stays with it.

    Args:
        update: What goes to the server.
        state: The client's new state, in place of the old one; None: it stays as it was.
        local_model: The subnets that the client would itself use from now on, and their tensors;
            None: those that it sends.
    """

    update: Update
    state: Mapping[str, Tensor] | None = None
    local_model: tuple[tuple[Subnet, ...], tuple[Params, ...]] | None = None

    def to_host(self) -> ClientResult:
        """The same with all tensors on the host, as they are sent and stored."""
        state, local_model = self.state, self.local_model
        return ClientResult(
            replace(self.update, params=tuple(map(_copy_to_host, self.update.params))),
            None if state is None else _copy_to_host(state),
            local_model and (local_model[0], tuple(map(_copy_to_host, local_model[1]))),
        )


def _copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Failure:
    """A client that gave no usable answer, and why.

    Args:
        client: The client's number.
        reason: What went wrong.
    """

    client: int
    reason: str

    def __str__(self) -> str:
        """Who, and why; once, if the reason names it.

        >>> print(Failure(3, "out of memory"), Failure(3, "client 3 sent nothing"), sep="; ")
        client 3: out of memory; client 3 sent nothing
        """
        who = client_label(self.client)
        return self.reason if self.reason.startswith(f"{who} ") else f"{who}: {self.reason}"


def derive_seed(*parts: int) -> int:
    """A seed for one stream of randomness, such as (seed, round, client).

    Different parts give different streams, also when some are zero or missing: NumPy takes
    (1,) and (1, 0) for the same, so the number of parts goes in as well.

    >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2) != derive_seed(0, 2, 1)
    True
    """
    words = [word for part in parts for word in divmod(part % 2**64, 2**32)]
    numbers = [len(parts), *words]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
