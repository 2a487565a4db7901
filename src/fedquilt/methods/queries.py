"""The closing phase in which clients are asked for the statistics of batch normalization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from fedquilt.federation.client import Client, Task, derive_seed
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.federation.tasks import plan_each
from fedquilt.methods.affordability import list_unable_budgets, sizes_within_budget
from fedquilt.methods.method import SIZE_NAMES, Method
from fedquilt.structure.budget import Budget
from fedquilt.training.statistics import QueryStatistics

QUERY = "statistics"  # the name of the phase
MAX_QUERIED = 100  # clients; where there are more, a sample of so many is asked


class QueryingMethod(Method, Protocol):
    """A method with a closing query."""

    @property
    def statistics_recipe(self) -> QueryStatistics:
        """How clients find statistics."""
        ...

    @property
    def queries_within_budgets(self) -> bool:
        """Whether a client is asked only for sizes that it can afford."""
        ...


def query_phase(setup: Setup, fraction: float | None = None, *, everyone: bool = False) -> Phase:
    """The closing phase in which clients are asked for statistics.

    Args:
        setup: What stays the same during the run.
        fraction: The fraction of the clients that are asked; None: a sample, if they are many.
        everyone: Whether all are asked where no fraction is given, since each finds statistics of
            a net of its own.
    """
    count = len(setup.clients)
    share = 1.0 if everyone else min(1.0, MAX_QUERIED / max(count, 1))
    return Phase(QUERY, 1, share if fraction is None else fraction, is_closing=True)


def plan_query(
    setup: Setup, state: State, cohort: Sequence[Client], method: QueryingMethod
) -> Sequence[Task]:
    """Asks clients for the statistics of the finished model, at every size (HeteroFL, Sec. 3.2).

    A size that no client of the cohort can afford is asked of all of them. A client that has a net
    of its own also finds the statistics of that one, which it keeps.
    """
    nets = {size: method.ensemble(setup, state, size) for size in method.sizes(setup)}
    asked = {
        budget: tuple(dict.fromkeys(subnet for size in wanted for subnet in nets[size]))
        for budget, wanted in _find_queried_sizes(
            setup, {client.budget: client for client in cohort}, method
        ).items()
    }

    def plan(client: Client) -> Task:
        subnets, recipe = asked[client.budget], method.statistics_recipe
        own = state.chosen_subnets.get(client.id)
        if own is not None:
            subnets, recipe = (*subnets, own), replace(recipe, personal=True)
        seed = derive_seed(setup.seed, state.round, client.id)
        return Task(client.id, subnets, state.params, recipe, seed)

    if not all(asked.values()):  # all tensors would travel to who can afford none of the sizes
        cohort = [c for c in cohort if asked[c.budget] or c.id in state.chosen_subnets]
    return plan_each(cohort, plan)


def _find_queried_sizes(
    setup: Setup, clients: Mapping[Budget, Client], method: QueryingMethod
) -> dict[Budget, tuple[float, ...]]:
    """The sizes that clients are asked for, by their budgets; one client for each is enough."""
    sizes = method.sizes(setup)
    asked = {
        budget: sizes_within_budget(setup, client, sizes)
        if method.queries_within_budgets
        else sizes
        for budget, client in clients.items()
    }
    nobodys = set(sizes).difference(*asked.values())
    return {
        budget: tuple(size for size in sizes if size in own or size in nobodys)
        for budget, own in asked.items()
    }


def describe_exceeding_query(setup: Setup, method: QueryingMethod) -> str | None:
    """What to say of a closing query that asks clients for more than they can afford."""
    registry = setup.registry
    queried = _find_queried_sizes(setup, {c.budget: c for c in registry.one_per_budget}, method)
    beyond: set[Budget] = set()
    for size in method.sizes(setup):
        for subnet in method.ensemble(setup, State(0, "", {}), size):
            poor = list_unable_budgets(setup, size, subnet)
            beyond |= {budget for budget in poor if size in queried[budget]}
    if not beyond:
        return None
    largest = max(size for budget in beyond for size in queried[budget])
    return (
        f"exceeds budgets: {registry.count_with(beyond)} of {len(registry)} clients are asked for "
        f"statistics of nets up to {SIZE_NAMES[method.size_kind]} {largest:g} at the end, and can "
        "afford less"
    )
