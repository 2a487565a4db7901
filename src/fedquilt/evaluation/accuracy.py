"""The metric of every size, on the server's held-out data and on the clients' own test data.

The metric is accuracy, unless the task has another.

"Global" is the model on all held-out data. "Local" restricts each client's answers to the classes
it has, on its own test data, averaged over examples (HeteroFL, Sec. 4). "User" accuracy is each
client's on its own test data, all classes allowed, averaged over clients (Split-Mix, Sec. 5); so is
robust accuracy, on attacked inputs; and where clients come from a few domains, user accuracy is
also told for each of these. For methods with personal models all are means over
clients of what each one's own model gets. "Personal" accuracy is the user accuracy of nets that
clients chose each for itself, whatever the size of the global one (APFL, Sec. 5.2: user accuracy
is "Glo", personal accuracy "Loc"), or that each keeps as its own (pFedMe). On request it is that of
the global nets with statistics of each client's own data, which is how Split-Mix's paper scores
nets without tracked statistics (Appendix A.3); user accuracy is with those of the model that is
taken away.

Where examples have a target at every position, all of these are examples, and the loss is also
told as perplexity.

Where all weights are shared and only statistics stay with the clients, clients' accuracies are with
their own statistics, and the global one is with those that were asked for at the end: it is that
of the model which is taken away. If none were asked for, there is no such model: each held-out
example is answered by the client whose test data it is.

Scores are with a model's stored statistics, so that neither the order of the data nor the size of
batches matters. With ``batch_statistics`` every batch of test data is normalized by itself instead,
as papers score methods that keep no statistics.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fedquilt.engines.engine import Engine
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.evaluation.personal import choose_statistics, refresh_statistics
from fedquilt.evaluation.scores import SizeScore
from fedquilt.federation.client import SERVER, Client, Failure, Task, Update, derive_seed
from fedquilt.federation.registry import ClientRegistry
from fedquilt.federation.state import Setup, State
from fedquilt.federation.validation import EXAMPLES, LOSS, validate_reply
from fedquilt.learning.task import LearningTask
from fedquilt.methods.method import (
    Method,
    PersonalChoice,
    check_personal_choice,
    shares_weights,
)
from fedquilt.structure.cost import Cost, compute_cost
from fedquilt.structure.subnet import Subnet
from fedquilt.training.attack import PGD
from fedquilt.training.dualnorm import NO_DIAL, has_dial
from fedquilt.training.evaluate import Evaluate, sum_numbers

MAX_LOSS = 700.0  # whose exponential is still a float
PARTS = 32  # held-out data is evaluated in this many tasks, whatever the number of workers
PARTS_OF_BATCHES = 8  # where batches are normalized by themselves: other parts, other batches


def evaluate(
    setup: Setup,
    method: Method,
    state: State,
    engine: Engine,
    *,
    has_server_test: bool,
    testers: Collection[int],
    widths: tuple[float, ...] | None = None,
    robustness: tuple[float, ...] = (),
    attack: PGD | None = None,
    on_failure: Callable[[Failure], None] = lambda failure: None,
    batch_statistics: bool = False,
    personal_statistics: PersonalChoice = False,
    split: str = "test",
    people: ClientRegistry | None = None,
) -> list[SizeScore]:
    """Scores of a finished state, largest size first, at one robustness after another.

    Args:
        setup: What stays the same during the run.
        method: The method, which says which sizes there are.
        state: The state whose model is evaluated.
        engine: Runs the tasks; it has the test data.
        has_server_test: Whether the server has test data.
        testers: The clients that have test data.
        widths: The sizes to evaluate; None: those of the method.
        robustness: The settings of the robustness dial to evaluate.
        attack: The attack for robust accuracy; None: there is none.
        on_failure: Is called with clients that gave no valid result; scores are without these.
        batch_statistics: Whether each batch of test data is normalized by itself.
        personal_statistics: Whether the nets are also evaluated with statistics of each client's
            own data: True: as the method's paper does; ``batch``: of each batch of its test data;
            ``refreshed``: of its training data, taken by 20 passes before it tests. Where clients
            chose nets of their own, the personal value is that of these, as they are.
        split: Which of their data clients evaluate: ``test``, or ``validation``.
        people: Whose data are evaluated; None: the clients of the run. Sizes are those of the run.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(12, 4), torch.arange(12) % 3)
    >>> clients = fq.make_clients(data, test=data, count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> structure, method = fq.trace_structure(model, data[0][:1]), fq.FedAvg()
    >>> setup = fq.Setup(model, structure, data[0][:1], clients.clients, rounds=1, seed=0)
    >>> engine = fq.LocalEngine(model, structure, {"test": clients.test}, workers=0)
    >>> state = method.start(setup)
    >>> scores = evaluate(setup, method, state, engine, has_server_test=True, testers=(0, 1))
    >>> [(score.width, score.num_examples) for score in scores]
    [(1.0, 12)]
    >>> engine.close()
    """
    if robustness and not has_dial(setup.model):
        raise ConfigError(NO_DIAL)
    check_personal_choice(personal_statistics)
    sizes = widths or method.sizes(setup)
    ensembles = [method.ensemble(setup, state, width) for width in sizes]
    subnets = tuple(dict.fromkeys(itertools.chain.from_iterable(ensembles)))  # each once
    recipe = replace(
        _make_recipe(setup, method),
        ensembles=tuple(tuple(map(subnets.index, ensemble)) for ensemble in ensembles),
        robustness=robustness,
        attack=attack,
        split=split,
    )
    if batch_statistics:
        recipe = replace(recipe, batch_statistics=True)
    tested = setup if people is None else replace(setup, clients=people)
    tasks = _plan_tasks(
        tested, method, state, subnets, recipe, has_server_test=has_server_test, testers=testers
    )
    has_chosen = not robustness and any(client in state.chosen_subnets for client in testers)
    statistics = None if has_chosen else choose_statistics(method, personal_statistics)
    refreshed = refresh_statistics(tasks.own, statistics)
    groups = (tasks.shared, tasks.own, refreshed)
    results = _validate_results(tested, state, engine, [*itertools.chain(*groups)])
    on_shared, on_own, on_refreshed = (list(itertools.islice(results, len(g))) for g in groups)
    _refuse_unknown(on_shared)
    for failure in _list_failures(on_shared, on_own, on_refreshed):
        on_failure(failure)
    answered = [r for r in on_own if isinstance(r, Update)]  # clients that failed are left out
    personal = [r for r in on_refreshed if isinstance(r, Update)] if refreshed else answered
    points = list(itertools.product(robustness or (None,), zip(sizes, ensembles, strict=True)))
    learned = setup.task
    chosen = None if robustness else _mean_over_clients(learned, answered, len(ensembles))

    def find_personal(point: int) -> float | None:
        is_refreshed = chosen is None and bool(personal_statistics)
        return _mean_over_clients(learned, personal, point) if is_refreshed else chosen

    everywhere = on_shared if tasks.shared or not has_server_test else answered
    domains = _list_domains(tested.registry, answered)
    price = functools.partial(compute_ensemble_cost, setup, memory=False)
    return [
        replace(
            _score(learned, i, width, dial, price(ensemble), everywhere, answered),
            personal_value=find_personal(i),
            group_values=_group_by_domain(learned, domains, i),
            batch_statistics=recipe.batch_statistics,
        )
        for i, (dial, (width, ensemble)) in enumerate(points)
    ]


def _make_recipe(setup: Setup, method: Method) -> Evaluate:
    """How nets of a method are evaluated; with statistics of batches if they have none."""
    return Evaluate(
        metrics=setup.task.numbers,
        local_params=method.local_params,
        scale=method.scales_outputs,
        batch_statistics=not (method.has_statistics(setup) or method.local_params),
    )


@dataclass(frozen=True)
class _Tasks:
    """What is evaluated: on held-out data that all share, and on clients' own."""

    shared: list[Task]
    own: list[Task]


def _plan_tasks(
    setup: Setup,
    method: Method,
    state: State,
    subnets: tuple[Subnet, ...],
    recipe: Evaluate,
    *,
    has_server_test: bool,
    testers: Collection[int],
) -> _Tasks:
    """Held-out data are not needed if clients have them and their own statistics."""
    has_statistics = method.has_statistics(setup)
    only_statistics = bool(method.local_params) and shares_weights(setup, method)
    by_clients = bool(testers) and only_statistics and not has_statistics
    shared: list[Task] = []
    if has_server_test and not by_clients:
        is_global = only_statistics and has_statistics
        for_server = replace(recipe, local_params=()) if is_global else recipe
        shared = _make_server_tasks(setup, state, subnets, for_server)
    own = [
        _make_client_task(setup, state, setup.registry[row], subnets, recipe)
        for row in setup.registry.find_rows(testers).tolist()
    ]
    return _Tasks(shared, own)


def _validate_results(
    setup: Setup, state: State, engine: Engine, tasks: Sequence[Task]
) -> Iterator[Update | Failure]:
    """What came of the tasks; counts that cannot be are failures."""
    for task, result in zip(tasks, engine.run(tasks), strict=True):
        yield validate_reply(setup, task, result, state.params)


def _list_failures(*results: Sequence[Update | Failure]) -> list[Failure]:
    return [result for own in results for result in own if isinstance(result, Failure)]


def _refuse_unknown(on_shared: Sequence[Update | Failure]) -> None:
    """Refuses scores on held-out data of which the server misses a part, or that nobody has seen.

    A client whose own model was to answer, and did not, is left out like any other.
    """
    failures = _list_failures(on_shared)
    ours = [failure for failure in failures if failure.client == SERVER]
    if ours or (failures and len(failures) == len(on_shared)):
        reason = (ours or failures)[0].reason
        raise TrainingError(f"the held-out data could not be evaluated: {reason}")


def _make_client_task(
    setup: Setup, state: State, client: Client, subnets: tuple[Subnet, ...], recipe: Evaluate
) -> Task:
    """The global nets on a client's test data, and the client's own net, if it has one."""
    labels = client.labels if setup.task.counts_hits else None
    recipe, subnets = replace(recipe, labels=labels), _without_home(subnets, recipe)
    if client.id in state.chosen_subnets and not recipe.robustness:
        assert recipe.ensembles is not None
        recipe = replace(recipe, ensembles=(*recipe.ensembles, (len(subnets),)))
        subnets = (*subnets, state.chosen_subnets[client.id].excluding(*recipe.local_params))
    return Task(client.id, subnets, state.params, recipe, _seed(client.id))


def _score(
    learned: LearningTask,
    point: int,
    width: float,
    dial: float | None,
    price: Cost,
    on_shared: Sequence[Update | Failure],
    answered: Sequence[Update],
) -> SizeScore:
    replies = [result.metrics for result in on_shared if isinstance(result, Update)]
    own = [update.metrics for update in answered]
    name = learned.metric.name
    on_server = learned.compute(sum_numbers(learned, replies, point))
    local, local_count = _compute_share(own, "local", point)
    num_examples = sum(int(reply[EXAMPLES]) for reply in replies)
    loss = _mean_loss(on_shared, f"{LOSS}:{point}")
    return SizeScore(
        width,
        price.params,
        price.macs,
        on_server[name],
        local,
        loss,
        num_examples or local_count or sum(int(reply[EXAMPLES]) for reply in own),
        _mean_over_clients(learned, answered, point),
        dial,
        _mean_share(own, "robust", point),
        perplexity=_compute_perplexity(replies, loss),
        metric=learned.metric,
        metrics=on_server if replies else learned.compute(sum_numbers(learned, own, point)),
    )


def evaluate_by_client(
    setup: Setup,
    method: Method,
    state: State,
    engine: Engine,
    testers: Collection[int],
    *,
    people: ClientRegistry | None = None,
) -> dict[int, float]:
    """The largest net's metric on each client's own test data, all classes allowed.

    ``people`` are whose data these are, if they are not the clients of the run.
    """
    recipe = _make_recipe(setup, method)
    ensemble = _without_home(method.ensemble(setup, state, max(method.sizes(setup))), recipe)
    recipe = replace(recipe, ensembles=(tuple(range(len(ensemble))),))
    tasks = [Task(c, ensemble, state.params, recipe, _seed(c)) for c in testers]
    tested = setup if people is None else replace(setup, clients=people)
    values = {
        result.client: _compute_main(setup.task, [result.metrics], 0)
        for result in _validate_results(tested, state, engine, tasks)
        if isinstance(result, Update)
    }
    return {client: value for client, value in values.items() if value is not None}


def compute_ensemble_cost(setup: Setup, ensemble: Sequence[Subnet], *, memory: bool = True) -> Cost:
    """What an ensemble costs: the sum of its subnets; memory only on request."""
    model, structure, example = setup.model, setup.structure, setup.example
    prices = [compute_cost(model, structure, subnet, example, memory=memory) for subnet in ensemble]
    return functools.reduce(operator.add, prices)


def _without_home(subnets: tuple[Subnet, ...], recipe: Evaluate) -> tuple[Subnet, ...]:
    """The subnets as far as they are sent to a client."""
    return tuple(subnet.excluding(*recipe.local_params) for subnet in subnets)


def _make_server_tasks(
    setup: Setup, state: State, subnets: tuple[Subnet, ...], recipe: Evaluate
) -> list[Task]:
    recipe = replace(recipe, attack=None)  # robust accuracy is a mean over clients
    subnets = _without_home(subnets, recipe)
    if recipe.local_params:  # every client's own model sees all of the held-out data
        recipe = replace(recipe, of=SERVER)
        return [Task(c, subnets, state.params, recipe, _seed(c)) for c in setup.clients_by_id]
    parts = PARTS_OF_BATCHES if recipe.batch_statistics else PARTS
    return [
        Task(SERVER, subnets, state.params, replace(recipe, part=p, parts=parts), _seed(p))
        for p in range(parts)
    ]


def _seed(number: int) -> int:
    """Where an attack starts: the same in every evaluation."""
    return derive_seed(0, number)


Reply = Mapping[str, float]  # the numbers that one client, or a part of the data, reports


def _compute_main(learned: LearningTask, replies: Sequence[Reply], point: int) -> float | None:
    """The metric, of all of the replies in one."""
    return learned.compute(sum_numbers(learned, replies, point))[learned.metric.name]


def _compute_share(replies: Sequence[Reply], kind: str, point: int) -> tuple[float | None, int]:
    """The fraction of hits of a kind, and of how many examples; None if it was not counted."""
    count = sum(int(reply[EXAMPLES]) for reply in replies)
    name = f"{kind}:{point}"
    if not count or not any(name in reply for reply in replies):
        return None, count
    return sum(reply.get(name, 0.0) for reply in replies) / count, count


def _mean_loss(results: Sequence[Update | Failure], name: str) -> float | None:
    """The mean over examples; a client's that is no number is left out, unless all are."""
    listed = [result for result in results if isinstance(result, Update)]
    known = [a for a in listed if a.client == SERVER or math.isfinite(a.metrics.get(name, 0.0))]
    count = sum(int(a.metrics[EXAMPLES]) for a in known)
    loss = sum(a.metrics.get(name, 0.0) for a in known)
    return loss / count if count and math.isfinite(loss) else None


def _compute_perplexity(replies: Sequence[Reply], loss: float | None) -> float | None:
    """How many equally likely targets the loss is worth; None where an example has one only."""
    if loss is None or loss > MAX_LOSS or not any("sequences" in reply for reply in replies):
        return None
    return math.exp(loss)


def _list_domains(registry: ClientRegistry, answered: Sequence[Update]) -> dict[str, list[Update]]:
    """The answers of each group of clients; none where there is one group, or a client in each."""
    names = registry.groups.counts
    if not 1 < len(names) < len(registry):
        return {}
    found: dict[str, list[Update]] = {name: [] for name in names}
    for update in answered:
        found[registry.groups[registry.by_id.row(update.client)]].append(update)
    return {name: answers for name, answers in found.items() if answers}


def _group_by_domain(
    learned: LearningTask, domains: Mapping[str, Sequence[Update]], point: int
) -> dict[str, float] | None:
    means = {name: _mean_over_clients(learned, a, point) for name, a in domains.items()}
    return {name: mean for name, mean in means.items() if mean is not None} or None


def _mean_over_clients(
    learned: LearningTask, answered: Sequence[Update], point: int
) -> float | None:
    """The mean of the clients' own values; clients without this point, or a value, do not count."""
    numbers = [f"{name}:{point}" for name in (*learned.numbers, LOSS)]
    known = [a.metrics for a in answered if any(name in a.metrics for name in numbers)]
    values = [_compute_main(learned, [reply], point) for reply in known]
    return _mean([value for value in values if value is not None])


def _mean_share(replies: Sequence[Reply], kind: str, point: int) -> float | None:
    """The mean over clients of the fraction of hits of a kind."""
    name = f"{kind}:{point}"
    return _mean([reply[name] / reply[EXAMPLES] for reply in replies if name in reply])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
