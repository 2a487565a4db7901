"""The closing phase in which clients are asked for the statistics of batch normalization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from fedquilt.federation.client import Client, Task, derive_seed
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.methods.affordability import list_unable_clients, sizes_within_budget
from fedquilt.methods.method import SIZE_NAMES, Method
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


def query_phase(setup: Setup, *, everyone: bool = False) -> Phase:
    """The closing phase in which clients are asked for statistics: a sample, if they are many."""
    count = len(setup.clients)
    share = 1.0 if everyone else min(1.0, MAX_QUERIED / max(count, 1))
    return Phase(QUERY, 1, share, is_closing=True)


def plan_query(
    setup: Setup, state: State, cohort: Sequence[Client], method: QueryingMethod
) -> list[Task]:
    """Asks clients for the statistics of the finished model, at every size (HeteroFL, Sec. 3.2).

    A size that no client of the cohort can afford is asked of all of them. A client that has a net
    of its own also finds the statistics of that one, which it keeps.
    """
    nets = {size: method.ensemble(setup, state, size) for size in method.sizes(setup)}
    queried = queried_sizes(setup, cohort, method)
    tasks = []
    for client in cohort:
        wanted = queried[client.id]
        subnets = tuple(dict.fromkeys(subnet for size in wanted for subnet in nets[size]))
        own = state.chosen_subnets.get(client.id)
        recipe = method.statistics_recipe
        if own is not None:
            subnets, recipe = (*subnets, own), replace(recipe, personal=True)
        seed = derive_seed(setup.seed, state.round, client.id)
        if subnets:  # else all tensors would travel, to a client that can afford none of the sizes
            tasks.append(Task(client.id, subnets, state.params, recipe, seed))
    return tasks


def queried_sizes(
    setup: Setup, cohort: Sequence[Client], method: QueryingMethod
) -> dict[int, tuple[float, ...]]:
    """The sizes whose statistics each client of a cohort is asked for, largest first."""
    sizes = method.sizes(setup)
    asked = {
        client.id: sizes_within_budget(setup, client, sizes)
        if method.queries_within_budgets
        else sizes
        for client in cohort
    }
    nobodys = set(sizes).difference(*asked.values())
    return {
        client: tuple(size for size in sizes if size in own or size in nobodys)
        for client, own in asked.items()
    }


def describe_exceeding_query(setup: Setup, method: QueryingMethod) -> str | None:
    """What to say of a closing query that asks clients for more than they can afford."""
    queried, beyond = queried_sizes(setup, setup.clients, method), set()
    for size in method.sizes(setup):
        subnets = method.ensemble(setup, State(0, "", {}), size)
        poor = (c.id for subnet in subnets for c in list_unable_clients(setup, size, subnet))
        beyond |= {client for client in poor if size in queried[client]}
    if not beyond:
        return None
    largest = max(size for client in beyond for size in queried[client])
    return (
        f"exceeds budgets: {len(beyond)} of {len(setup.clients)} clients are asked for statistics "
        f"of nets up to {SIZE_NAMES[method.size_kind]} {largest:g} at the end, and can afford less"
    )
