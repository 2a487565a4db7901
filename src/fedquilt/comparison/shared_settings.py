"""What all variants of a comparison have in common, unless the user says otherwise.

Methods have defaults of their own: how many clients take part, budgets, learning rate, epochs and
batches. With those, two methods would train other clients on other batches. So a comparison gives
all of them the same, and what is left is what the methods do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedquilt.comparison.trial import LoadedData
from fedquilt.errors import ConfigError
from fedquilt.federation.budgets import FractionBudgets, TierBudgets, parse_budgets
from fedquilt.federation.state import Phase
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import (
    build_local_training,
    build_model,
    build_structure,
    fit_model_to_data,
    list_local_training,
    make_example,
)
from fedquilt.settings.schema import DEFAULT_CLIENTS
from fedquilt.structure.cost import compute_cost
from fedquilt.training.settings import LocalTraining

BUDGETS = (1.0, 0.5, 0.25, 0.125)
NATURAL_FRACTION = 0.1  # of natural clients, whose number is not known before the data are read


def share_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those that all variants share, where they are left out.

    >>> shared = share_settings({"data.clients": 50, "local_training.lr": 0.1})
    >>> shared["method.fraction"], shared["local_training.lr"], shared["local_training.epochs"]
    (0.2, 0.1, 5)
    """
    prefix = "local_training."
    given = {n.removeprefix(prefix): v for n, v in settings.items() if n.startswith(prefix)}
    training = list_local_training(build_local_training(LocalTraining(), given))
    common: dict[str, Any] = {f"{prefix}{n}": v for n, v in training.items() if v is not None}
    common |= {"data.budgets": BUDGETS, "method.fraction": _choose_fraction(settings)}
    return {**common, **settings}


def _choose_fraction(settings: Mapping[str, Any]) -> float:
    """The cohort that methods without a fraction of their own have, as a fraction."""
    count = settings.get("data.clients")
    if count is None and settings.get("data.partition") == "natural":
        return NATURAL_FRACTION
    count = DEFAULT_CLIENTS if count is None else int(count)
    return Phase("train", 1, None).cohort_size(count) / max(count, 1)


def limit_physically(settings: Mapping[str, Any], resource: str, data: LoadedData) -> list[Any]:
    """Budgets as physical limits: what the model that is cut to each width needs of a resource."""
    distribution = parse_budgets(settings["data.budgets"])
    if isinstance(distribution, TierBudgets):
        shares = [(width, 1) for width in distribution.widths]
    elif isinstance(distribution, FractionBudgets):
        if not all(budget.is_width_alone for budget, _ in distribution.fractions):
            return list(settings["data.budgets"])  # they are limits already
        shares = [(budget.width, part) for budget, part in distribution.fractions]
    else:
        raise ConfigError(
            "budgets that are drawn are sizes, and have no physical limits; leave out budgets_as, "
            "or list the budgets"
        )
    source = data.load()
    plain = {n: v for n, v in settings.items() if n.startswith(("model.", "data."))}
    config = fit_model_to_data(
        load_config(override_settings({}, plain)),
        source.shape,
        source.num_classes,
        source.num_tokens,
    )
    model, example = build_model(config), make_example(source)
    structure = build_structure(config, model, example)
    limits = []
    for width, part in shares:
        cost = compute_cost(model, structure, structure.subnet(width), example)
        needs = {"params": cost.params, "macs": cost.macs, "memory": cost.memory}
        needs["upload"] = cost.bytes
        limits.append({resource: needs[resource], "part": part})
    return limits
