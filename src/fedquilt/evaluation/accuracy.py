"""Accuracy of every size, on the server's held-out data and on the clients' own test data.

"Global" is the model on all held-out data. "Local" restricts each client's answers to the classes
it has, on its own test data, averaged over examples (HeteroFL, Sec. 4). "User" accuracy is each
client's on its own test data, all classes allowed, averaged over clients (Split-Mix, Sec. 5); so is
robust accuracy, on attacked inputs; and where clients come from a few domains, user accuracy is
also told for each of these. For methods with personal models all are means over
clients of what each one's own model gets. "Personal" accuracy is the user accuracy of nets that
clients chose each for itself, whatever the size of the global one (APFL, Sec. 5.2: user accuracy
is "Glo", personal accuracy "Loc"), or that each keeps as its own (pFedMe).

Where examples have a target at every position, all of these are examples, and the loss is also
told as perplexity.

Where all weights are shared and only statistics stay with the clients, clients' accuracies are with
their own statistics, and the global one is with those that were asked for at the end: it is that
of the model which is taken away. If none were asked for, there is no such model: each held-out
example is answered by the client whose test data it is.

Scores are with a model's stored statistics, so that neither the order of the data nor the size of
batches matters. With ``batch_statistics`` every batch of test data is normalised by itself instead,
as papers score methods that keep no statistics.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fedquilt.engines.engine import Engine
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.federation.boundary import admit
from fedquilt.federation.client import SERVER, Client, Failure, Task, Update, seed_of
from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Method, shares_weights
from fedquilt.structure.cost import Cost, cost
from fedquilt.structure.subnet import Subnet
from fedquilt.training.attack import PGD
from fedquilt.training.dualnorm import NO_DIAL, has_dial
from fedquilt.training.evaluate import Evaluate

MOST_LOSS = 700.0  # whose exponential is still a float
PARTS = 8  # held-out data is evaluated in this many tasks, whatever the number of workers


@dataclass(frozen=True)
class SizeScore:
    """How the net of one width, at one robustness, does."""

    width: float
    params: int
    macs: int
    accuracy: float | None  # global, in [0, 1]; None without held-out data
    local_accuracy: float | None  # None where clients have no test data of their own
    loss: float | None  # None without held-out data, and where it is not finite
    num_examples: int  # targets, where each example has several
    user_accuracy: float | None = None  # mean over clients with test data
    robustness: float | None = None  # the dial; None where there is none
    robust_accuracy: float | None = None  # mean over clients; None without an attack
    personal_accuracy: float | None = None  # of clients' own nets; None if they have none
    perplexity: float | None = None  # exp(loss) where examples have several targets
    group_accuracy: Mapping[str, float] | None = None  # user accuracy in each domain
    batch_statistics: bool = False  # whether each batch of test data was normalised by itself


def evaluate(
    setup: Setup,
    method: Method,
    state: State,
    engine: Engine,
    *,
    held_out: bool,
    testers: tuple[int, ...],
    widths: tuple[float, ...] | None = None,
    robustness: tuple[float, ...] = (),
    attack: PGD | None = None,
    tell: Callable[[Failure], None] = lambda failure: None,
    batch_statistics: bool = False,
) -> list[SizeScore]:
    """Scores of a finished state, largest size first, at one robustness after another.

    ``held_out`` says whether the server has data, ``testers`` which clients have. ``tell`` hears of
    clients that gave no usable result, without which the scores are.
    """
    if robustness and not has_dial(setup.model):
        raise ConfigError(NO_DIAL)
    sizes = widths or method.sizes(setup)
    mixes = [method.mix(setup, state, width) for width in sizes]
    subnets = tuple(dict.fromkeys(subnet for mix in mixes for subnet in mix))  # each once
    has_statistics = method.has_statistics(setup)
    recipe = Evaluate(
        mixes=tuple(tuple(map(subnets.index, mix)) for mix in mixes),
        home=method.home,
        robustness=robustness,
        attack=attack,
        scale=method.scales_outputs,
        batch_statistics=batch_statistics or not (has_statistics or method.home),
    )
    only_statistics = bool(method.home) and shares_weights(setup, method)
    by_clients = bool(testers) and only_statistics and not has_statistics
    shared: list[Task] = []
    if held_out and not by_clients:
        is_global = only_statistics and has_statistics
        for_server = replace(recipe, home=()) if is_global else recipe
        shared = _held_out_tasks(setup, state, subnets, for_server)
    own = [_own_task(state, c, subnets, recipe) for c in setup.clients if c.id in testers]
    results = list(_admitted(setup, state, engine, [*shared, *own]))
    on_shared, on_own = results[: len(shared)], results[len(shared) :]
    _refuse_unknown(on_shared)
    for result in results:
        if isinstance(result, Failure):
            tell(result)
    answered = [r for r in on_own if isinstance(r, Update)]  # clients that failed are left out
    points = [(r, w, m) for r in robustness or (None,) for w, m in zip(sizes, mixes, strict=True)]
    personal = _mean_over_clients(answered, "hits", len(mixes)) if not robustness else None
    everywhere = answered if by_clients and held_out else on_shared
    domains = _domains(setup.clients, answered)
    return [
        replace(
            _score(i, width, dial, cost_of(setup, mix, memory=False), everywhere, answered),
            personal_accuracy=personal,
            group_accuracy=_by_domain(domains, i),
            batch_statistics=recipe.batch_statistics,
        )
        for i, (dial, width, mix) in enumerate(points)
    ]


def _admitted(
    setup: Setup, state: State, engine: Engine, tasks: Sequence[Task]
) -> Iterator[Update | Failure]:
    """What came of the tasks; counts that cannot be are failures."""
    for task, result in zip(tasks, engine.run(tasks), strict=True):
        yield admit(setup, task, result, state.params)


def _refuse_unknown(on_shared: Sequence[Update | Failure]) -> None:
    """Refuses scores on held-out data of which the server misses a part, or that nobody has seen.

    A client whose own model was to answer, and did not, is left out like any other.
    """
    failures = [result for result in on_shared if isinstance(result, Failure)]
    ours = [failure for failure in failures if failure.client == SERVER]
    if ours or (failures and len(failures) == len(on_shared)):
        reason = (ours or failures)[0].reason
        raise TrainingError(f"the held-out data could not be evaluated: {reason}")


def _own_task(state: State, client: Client, subnets: tuple[Subnet, ...], recipe: Evaluate) -> Task:
    """The global nets on a client's test data, and the client's own net, if it has one."""
    recipe, subnets = replace(recipe, labels=client.labels), _without_home(subnets, recipe)
    if client.id in state.chosen and not recipe.robustness:
        assert recipe.mixes is not None
        recipe = replace(recipe, mixes=(*recipe.mixes, (len(subnets),)))
        subnets = (*subnets, state.chosen[client.id].leaving(*recipe.home))
    return Task(client.id, subnets, state.params, recipe, _seed(client.id))


def _score(
    point: int,
    width: float,
    dial: float | None,
    price: Cost,
    on_shared: Sequence[Update | Failure],
    answered: Sequence[Update],
) -> SizeScore:
    accuracy, loss, count = _share(on_shared, "hits", point)
    local, _, local_count = _share(answered, "local", point)
    return SizeScore(
        width,
        price.params,
        price.macs,
        accuracy,
        local,
        loss,
        count or local_count,
        _mean_over_clients(answered, "hits", point),
        dial,
        _mean_over_clients(answered, "robust", point),
        perplexity=_perplexity(on_shared, loss),
    )


def accuracy_by_client(
    setup: Setup, method: Method, state: State, engine: Engine, testers: tuple[int, ...]
) -> dict[int, float]:
    """The largest net's accuracy on each client's own test data, all classes allowed."""
    recipe = Evaluate(
        home=method.home,
        scale=method.scales_outputs,
        batch_statistics=not (method.has_statistics(setup) or method.home),
    )
    mix = _without_home(method.mix(setup, state, max(method.sizes(setup))), recipe)
    recipe = replace(recipe, mixes=(tuple(range(len(mix))),))
    tasks = [Task(c, mix, state.params, recipe, _seed(c)) for c in testers]
    return {
        result.client: result.metrics["hits:0"] / result.metrics["examples"]
        for result in _admitted(setup, state, engine, tasks)
        if isinstance(result, Update)
    }


def cost_of(setup: Setup, mix: Sequence[Subnet], *, memory: bool = True) -> Cost:
    """What a mix costs: the sum of its subnets; the memory only if somebody wants to know."""
    model, structure, example = setup.model, setup.structure, setup.example
    prices = [cost(model, structure, subnet, example, memory=memory) for subnet in mix]
    return functools.reduce(operator.add, prices)


def _without_home(subnets: tuple[Subnet, ...], recipe: Evaluate) -> tuple[Subnet, ...]:
    """The subnets as far as they are sent to a client."""
    return tuple(subnet.leaving(*recipe.home) for subnet in subnets)


def _held_out_tasks(
    setup: Setup, state: State, subnets: tuple[Subnet, ...], recipe: Evaluate
) -> list[Task]:
    recipe = replace(recipe, attack=None)  # robust accuracy is a mean over clients
    subnets = _without_home(subnets, recipe)
    if recipe.home:  # every client's own model sees all of the held-out data
        recipe = replace(recipe, of=SERVER)
        return [Task(c.id, subnets, state.params, recipe, _seed(c.id)) for c in setup.clients]
    return [
        Task(SERVER, subnets, state.params, replace(recipe, part=p, parts=PARTS), _seed(p))
        for p in range(PARTS)
    ]


def _seed(number: int) -> int:
    """Where an attack starts: the same in every evaluation."""
    return seed_of(0, number)


def _share(
    results: Iterable[Update | Failure], kind: str, point: int
) -> tuple[float | None, float | None, int]:
    listed = [result for result in results if isinstance(result, Update)]
    count = sum(int(a.metrics["examples"]) for a in listed)
    if not count:
        return None, None, 0
    hits = sum(a.metrics.get(f"{kind}:{point}", 0.0) for a in listed)  # a part may be empty
    return hits / count, _loss(listed, f"loss:{point}"), count


def _loss(listed: Sequence[Update], name: str) -> float | None:
    """The mean over examples; a client's that is no number is left out, unless all are."""
    known = [a for a in listed if a.client == SERVER or math.isfinite(a.metrics.get(name, 0.0))]
    count = sum(int(a.metrics["examples"]) for a in known)
    loss = sum(a.metrics.get(name, 0.0) for a in known)
    return loss / count if count and math.isfinite(loss) else None


def _perplexity(results: Iterable[Update | Failure], loss: float | None) -> float | None:
    """How many equally likely targets the loss is worth; None where an example has one only."""
    listed = (result for result in results if isinstance(result, Update))
    if loss is None or loss > MOST_LOSS or not any("sequences" in a.metrics for a in listed):
        return None
    return math.exp(loss)


def _domains(clients: Sequence[Client], answered: Sequence[Update]) -> dict[str, list[Update]]:
    """The answers of each group of clients; none where there is one group, or a client in each."""
    group = {client.id: client.group for client in clients}
    names = dict.fromkeys(group.values())
    if not 1 < len(names) < len(group):
        return {}
    found = {name: [a for a in answered if group[a.client] == name] for name in names}
    return {name: answers for name, answers in found.items() if answers}


def _by_domain(domains: Mapping[str, Sequence[Update]], point: int) -> dict[str, float] | None:
    means = {name: _mean_over_clients(a, "hits", point) for name, a in domains.items()}
    return {name: mean for name, mean in means.items() if mean is not None} or None


def _mean_over_clients(answered: Sequence[Update], kind: str, point: int) -> float | None:
    name = f"{kind}:{point}"
    shares = [a.metrics[name] / a.metrics["examples"] for a in answered if name in a.metrics]
    return sum(shares) / len(shares) if shares else None
