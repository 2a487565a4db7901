"""The identity of a run: what must be the same for it to be resumed.

It is a hash of canonical JSON. Settings that have their default value are left out, so that a new
setting with a default does not change the identity of earlier runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor

from fedquilt.federation.hostile import Attack
from fedquilt.federation.privacy import Privacy
from fedquilt.federation.registry import ClientRegistry
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.state import Setup
from fedquilt.files import hash_tensor
from fedquilt.learning.task import CLASSIFICATION
from fedquilt.methods.method import Method


def compute_fingerprint(
    setup: Setup,
    method: Method,
    privacy: Privacy | None = None,
    secure: SecureAggregation | None = None,
    attack: Attack | None = None,
) -> str:
    """The SHA-256 of model, method, clients, seed, sampling, privacy, secure sums and attacks.

    Rounds may differ.
    """
    identity = {
        "tensors": {name: list(shape) for name, shape in setup.structure.shapes.items()},
        "structure": setup.structure.describe(),
        "method": describe_settings(method),
        "clients": _describe_clients(setup.registry),
        "seed": setup.seed,
    }
    if setup.sampling != "fixed":
        identity["sampling"] = setup.sampling
    if privacy is not None:
        identity["privacy"] = describe_settings(privacy)
    if setup.task is not CLASSIFICATION:
        identity["task"] = setup.task.describe()
    if secure is not None:
        identity["secure_aggregation"] = describe_settings(secure)
    if attack is not None:
        identity["attacks"] = describe_settings(attack)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _describe_clients(registry: ClientRegistry) -> list[Any] | dict[str, Any]:
    """What a method knows of clients; their groups and test data do not change training."""
    if not registry.can_be_listed:
        return {"count": len(registry), "sha256": registry.hash_columns()}
    budgets = {budget: describe_settings(budget) for budget in registry.budget_counts}
    return [
        [client.id, client.num_examples, list(client.labels), budgets[client.budget]]
        for client in registry
    ]


def describe_settings(value: Any) -> Any:
    """The value as JSON, each object with the name of its class and its non-default settings.

    >>> from fedquilt.structure.budget import Budget
    >>> describe_settings((Budget(), Budget(0.5)))
    [{'class': 'Budget'}, {'class': 'Budget', 'width': 0.5}]
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Tensor):
        return hash_tensor(value)
    if isinstance(value, Mapping):
        return {str(key): describe_settings(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [describe_settings(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(describe_settings(item) for item in value)
    if isinstance(value, partial):
        parts = {"arguments": value.args, "named": value.keywords}
        return {"class": "partial", "function": describe_settings(value.func)} | {
            name: describe_settings(part) for name, part in parts.items()
        }
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return {"class": type(value).__name__, **_describe_fields(value)}


def describe_default(settings: Any, name: str) -> Any:
    """The default of one setting, as JSON; None if it has none."""
    for field in fields(settings) if is_dataclass(settings) else ():
        if field.name == name:
            return _describe_field_default(field)
    return None


def _describe_fields(value: Any) -> dict[str, Any]:
    if not is_dataclass(value):
        return {name: describe_settings(item) for name, item in sorted(vars(value).items())}
    settings = {}
    for field in fields(value):
        setting = describe_settings(getattr(value, field.name))
        if field.compare and (_is_required(field) or setting != _describe_field_default(field)):
            settings[field.name] = setting
    return settings


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _describe_field_default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return describe_settings(field.default_factory())
    return None if field.default is MISSING else describe_settings(field.default)
