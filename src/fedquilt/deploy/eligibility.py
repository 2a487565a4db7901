"""Decides which clients of a federation can take part in a run.

Clients must agree about their inputs and classes, since each builds the model by itself, and the
method must have a subnet for their labels and budgets. Clients that do not fit are excluded, as
long as most do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fedquilt.deploy.node_info import NodeInfo
from fedquilt.errors import BudgetError, DataError
from fedquilt.federation.client import Client
from fedquilt.federation.state import Setup
from fedquilt.federation.validation import MAX_CLASSES
from fedquilt.settings.resolve import build_method
from fedquilt.settings.schema import Config

FIX = "all clients must have the same, or model.num_classes must be set"


def find_inconsistent_clients(
    infos: Mapping[int, NodeInfo], config: Config, *, has_own_model: bool
) -> dict[int, str]:
    """The clients whose inputs or classes differ from those of most clients, and why.

    Classes may differ if the settings give their number, or if the app builds its own model.

    Raises:
        DataError: No majority of clients agrees.
    """
    num_classes = (config.model.model_extra or {}).get("num_classes")
    needs_same_classes = num_classes is None and not has_own_model

    def describe(info: NodeInfo) -> str:
        classes = f", {info.num_classes} classes" if needs_same_classes else ""
        return f"{info.input_spec}{classes}"

    ((common, count),) = Counter(map(describe, infos.values())).most_common(1)
    reasons: dict[int, str] = {}
    for client, info in infos.items():
        if describe(info) != common:
            reason = f"client {client} has inputs of {describe(info)}, most have {common}; {FIX}"
            if 2 * count <= len(infos):
                raise DataError(reason)
            reasons[client] = reason
        elif isinstance(num_classes, int) and info.num_classes > num_classes:
            reasons[client] = (
                f"client {client} has {info.num_classes} classes, and model.num_classes is "
                f"{num_classes}"
            )
    return reasons


def find_unsupported_clients(
    infos: Mapping[int, NodeInfo], config: Config, setup: Setup
) -> dict[int, str]:
    """The clients for whose labels or budgets the method has no subnet, and why.

    Raises:
        DataError: No client's labels fit.
        BudgetError: The method has a subnet for no client's budget.
    """
    classes = setup.structure.classes
    num_outputs = MAX_CLASSES if classes is None else setup.structure.groups[classes].size
    reasons: dict[int, str] = {}
    for number, info in infos.items():
        label = max(info.client.labels, default=0)
        if label >= num_outputs:
            reasons[number] = f"client {number} has the label {label}, of {num_outputs} classes"
    if len(reasons) == len(infos):
        raise DataError(f"{next(iter(reasons.values()))}; the other clients do not fit either")
    others = tuple(info.client for number, info in infos.items() if number not in reasons)
    try:
        _plan_first_round(config, replace(setup, clients=others))
    except BudgetError:
        failed = {c.id: reason for c in others if (reason := _try_client(config, setup, c))}
        if not failed or len(failed) == len(others):
            raise
        reasons |= failed
    return reasons


def _try_client(config: Config, setup: Setup, client: Client) -> str | None:
    """Why the method has no subnet for a client; None if it has one."""
    try:
        _plan_first_round(config, replace(setup, clients=(client,)))
    except BudgetError as problem:
        return str(problem)
    return None


def _plan_first_round(config: Config, setup: Setup) -> None:
    method = build_method(config)
    prepared = method.prepare_model(setup)
    state = replace(method.start(prepared), phase=method.phases(prepared)[0].name)
    list(method.plan(prepared, state, prepared.clients))  # tasks are made when they are asked for
