"""Accuracy of every size, on the server's held-out data and on the clients' own test data.

"Global" is the model on all held-out data. "Local" restricts each client's answers to the classes
it has, on its own test data, averaged over examples (HeteroFL, Sec. 4). For methods with personal
models both are means over clients of what each one's own model gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedquilt.engines.engine import Engine
from fedquilt.errors import TrainingError
from fedquilt.federation.client import SERVER, Failure, Task, Update
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Method
from fedquilt.structure.cost import cost
from fedquilt.structure.subnet import Subnet
from fedquilt.training.evaluate import Evaluate

PARTS = 8  # held-out data is evaluated in this many tasks, whatever the number of workers


@dataclass(frozen=True)
class SizeScore:
    """How the subnet of one width does."""

    width: float
    params: int
    macs: int
    accuracy: float | None  # global, in [0, 1]; None without held-out data
    local_accuracy: float | None  # None where clients have no test data of their own
    loss: float | None  # None without held-out data, and where it is not finite
    num_examples: int


def evaluate(
    setup: Setup,
    method: Method,
    state: State,
    engine: Engine,
    *,
    held_out: bool,
    testers: tuple[int, ...],
    widths: tuple[float, ...] | None = None,
) -> list[SizeScore]:
    """Scores of a finished state, largest size first.

    ``held_out`` says whether the server has data, ``testers`` which clients have.
    """
    sizes = widths or method.sizes(setup)
    subnets = tuple(method.subnet(setup, width).leaving(*method.home) for width in sizes)
    shared = _held_out_tasks(setup, method, state, subnets) if held_out else []
    own = [
        Task(c.id, subnets, state.params, Evaluate(labels=c.labels, home=method.home), 0)
        for c in setup.clients
        if c.id in testers
    ]
    results = list(engine.run([*shared, *own]))
    on_shared, on_own = results[: len(shared)], results[len(shared) :]
    for result in on_shared:
        if isinstance(result, Failure):
            raise TrainingError(f"the held-out data could not be evaluated: {result.reason}")
    scores = []
    for i, (width, subnet) in enumerate(zip(sizes, subnets, strict=True)):
        price = cost(setup.model, setup.structure, subnet, setup.example)
        accuracy, loss, count = _share(on_shared, i)
        local, _, local_count = _share(on_own, i)  # clients that failed are left out
        scores.append(
            SizeScore(width, price.params, price.macs, accuracy, local, loss, count or local_count)
        )
    return scores


def _held_out_tasks(
    setup: Setup, method: Method, state: State, subnets: tuple[Subnet, ...]
) -> list[Task]:
    if method.home:  # every client's own model sees all of the held-out data
        recipe = Evaluate(home=method.home, of=SERVER)
        return [Task(c.id, subnets, state.params, recipe, 0) for c in setup.clients]
    return [
        Task(SERVER, subnets, state.params, Evaluate(part=part, parts=PARTS), 0)
        for part in range(PARTS)
    ]


def _share(
    results: Iterable[Update | Failure], size: int
) -> tuple[float | None, float | None, int]:
    listed = [result for result in results if isinstance(result, Update)]
    count = sum(int(a.metrics["examples"]) for a in listed)
    if not count:
        return None, None, 0
    hits = sum(a.metrics[f"hits:{size}"] for a in listed)
    loss = sum(a.metrics[f"loss:{size}"] for a in listed)
    return hits / count, loss / count if math.isfinite(loss) else None, count
