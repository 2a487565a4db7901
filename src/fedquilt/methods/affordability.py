"""Which sizes of a model clients can afford, and what to say if a method asks for more."""

from __future__ import annotations

from collections.abc import Mapping

from fedquilt.errors import BudgetError, ConfigError
from fedquilt.federation.client import Client
from fedquilt.federation.columns import ClientNumbers
from fedquilt.federation.state import Setup, cache_per_setup
from fedquilt.structure.budget import Budget, fit_budget
from fedquilt.structure.cost import compute_cost
from fedquilt.structure.subnet import Subnet


def sizes_within_budget(
    setup: Setup, client: Client, sizes: tuple[float, ...]
) -> tuple[float, ...]:
    """Of several widths, those that a client can afford."""
    limit = find_affordable_width(setup, client)
    return tuple(width for width in sizes if width <= limit)


def find_affordable_width(setup: Setup, client: Client) -> float:
    """The widest fraction of the model that a client's budget allows."""
    width, _ = fit_budget(setup.model, setup.structure, client.budget, setup.example)
    return width


def list_affordable_widths(setup: Setup, client: Client, sizes: tuple[float, ...]) -> list[float]:
    """The widths, largest first, that a client can afford; what it can afford if that is less."""
    limit = find_affordable_width(setup, client)
    return [width for width in sizes if width <= limit + 1e-9] or [limit]


def filter_affordable(setup: Setup, client: Client, sizes: Mapping[float, Subnet]) -> list[float]:
    """Of several sizes, as fractions of the model, those that a client can afford; largest first.

    A budget's width is the largest fraction; its physical limits hold for the subnet.
    """
    found, budget = [], client.budget
    for size in sorted(sizes, reverse=True):
        if size <= budget.width + 1e-9 and (
            budget.is_width_alone
            or budget.allows(compute_cost(setup.model, setup.structure, sizes[size], setup.example))
        ):
            found.append(size)
    if not found:
        smallest = compute_cost(setup.model, setup.structure, sizes[min(sizes)], setup.example)
        raise BudgetError(
            f"no size meets {budget} of client {client.id}; the smallest is {min(sizes):g} of the "
            f"model and costs {smallest}; raise the budget, or let the method have smaller sizes"
        )
    return found


def list_unable_budgets(setup: Setup, size: float, subnet: Subnet) -> set[Budget]:
    """Budgets of clients that do not allow a subnet, which is that fraction of the model."""
    budgets = setup.registry.budget_counts
    limited = not all(budget.is_width_alone for budget in budgets)
    price = compute_cost(setup.model, setup.structure, subnet, setup.example) if limited else None
    return {
        budget
        for budget in budgets
        if size > budget.width + 1e-9 or (price is not None and not budget.allows(price))
    }


def count_unable_clients(setup: Setup, size: float, subnet: Subnet) -> int:
    """How many clients have a budget that does not allow a subnet."""
    return setup.registry.count_with(list_unable_budgets(setup, size, subnet))


def describe_ignored_budgets(
    setup: Setup, size: float = 1.0, subnet: Subnet | None = None
) -> str | None:
    """What to say of a method that has everybody train one net; None if all can afford it."""
    poor = count_unable_clients(setup, size, subnet or Subnet())
    if not poor:
        return None
    net = "the whole net" if size == 1 else f"a net of width {size:g}"
    return (
        f"ignores budgets: {net} is trained, and {poor} of {len(setup.clients)} clients can "
        "afford less"
    )


def list_trained_sizes(setup: Setup, widths: tuple[float, ...] | None) -> tuple[float, ...]:
    """The widths that a method names, or else those that budgets allow, largest first."""
    return list_budget_sizes(setup) if widths is None else tuple(sorted(widths, reverse=True))


def validate_widths(widths: tuple[float, ...] | None) -> None:
    """Refuses what is no fraction of a model."""
    for width in widths or ():
        if not 0 < width <= 1:
            raise ConfigError(f"widths are fractions in (0, 1], got {width}")


def nested_subnet(setup: Setup, width: float, sizes: tuple[float, ...], own: str) -> Subnet:
    """The leading channels; what ``own`` means is that of the width, or of the next larger size."""
    subnet = setup.structure.subnet(width)
    if not setup.structure.statistics:
        return subnet
    wide_enough = [size for size in sizes if size >= width - 1e-9]
    return subnet.with_private(f"{min(wide_enough) if wide_enough else max(sizes):g}", own)


@cache_per_setup
def list_budget_sizes(setup: Setup) -> tuple[float, ...]:
    """The widths that the clients' budgets allow, largest first; found once for each budget."""
    clients = setup.registry.one_per_budget
    return tuple(sorted({find_affordable_width(setup, c) for c in clients}, reverse=True))


@cache_per_setup
def list_able_clients(setup: Setup) -> ClientNumbers:
    """Clients that can afford the whole net."""
    whole = compute_cost(setup.model, setup.structure, Subnet(), setup.example)
    return setup.registry.find_with(lambda b: b.width >= 1 and b.allows(whole))


@cache_per_setup
def list_richest_clients(setup: Setup) -> ClientNumbers:
    """Clients that can afford the widest uniform net of all."""
    clients = setup.registry.one_per_budget
    widths = {client.budget: find_affordable_width(setup, client) for client in clients}
    most = max(widths.values())
    return setup.registry.find_with(lambda budget: widths[budget] == most)
