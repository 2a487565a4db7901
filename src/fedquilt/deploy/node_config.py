"""What a node is started with: Flower's node config.

It names the node's client (``partition-id``), and optionally ``budget``, ``data``, ``state``,
``device`` and ``secure-threshold``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import torch

from fedquilt.devices import find_devices
from fedquilt.errors import ConfigError
from fedquilt.federation.secure.settings import require_cryptography
from fedquilt.structure.budget import Budget

Value = bool | int | float | str
NodeConfig = Mapping[str, Value]


def make_node_configs(
    count: int, budgets: str | None = None, data: Sequence[str] = (), devices: str | None = None
) -> list[dict[str, Value]]:
    """Makes the configuration of each node: budgets and devices in turn, and data for each.

    >>> make_node_configs(3, "1,auto")[2]
    {'partition-id': 2, 'budget': 1.0}
    """
    nodes: list[dict[str, Value]] = [{"partition-id": number} for number in range(count)]
    if data and len(data) != count:
        raise ConfigError(
            f"there are {count} nodes and data for {len(data)}; give data for each node"
        )
    for node, path in zip(nodes, data, strict=False):
        if not Path(path).expanduser().exists():
            raise ConfigError(f"there is no data in '{path}'")
        node["data"] = str(Path(path).expanduser().resolve())
    if budgets is not None:
        values = [_check_budget(text.strip()) for text in budgets.split(",")]
        for node, value in zip(nodes, cycle(values), strict=False):
            node["budget"] = value
    if devices is not None:
        for node, device in zip(nodes, cycle(find_devices(devices)), strict=False):
            node["device"] = str(device)
    return nodes


def find_node_device(node: NodeConfig, default: str) -> torch.device:
    """The device of a node: the one it was started with, or the one that the settings name.

    A node works for one client at a time, so it uses the first of several.
    """
    first, *_ = find_devices(str(node.get("device", default)))
    return first


def find_secure_threshold(node: NodeConfig) -> int | None:
    """The lowest threshold of secure sums that a node accepts; None: it also sends plain updates.

    >>> find_secure_threshold({"partition-id": 0, "secure-threshold": 5})
    5
    """
    value = node.get("secure-threshold")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise ConfigError(f"secure-threshold is a number of clients, 2 or more, got {value!r}")
    require_cryptography()
    return value


def parse_budget(value: Value) -> Budget | None:
    """Parses a node's budget: a width or limits; None for ``auto``, which the node measures.

    >>> parse_budget("params=100000 macs=2000000").params
    100000
    """
    if value == "auto":
        return None
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return Budget(float(value))
        limits = dict(part.split("=") for part in str(value).split())
        return Budget(**{name: int(limit) for name, limit in limits.items()})
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            "a node's budget is a width, limits such as 'params=100000 macs=2000000', or 'auto', "
            f"got '{value}'"
        ) from problem


def _check_budget(text: str) -> Value:
    """The value of a node config: a width as a number, the others as text."""
    try:
        value: Value = float(text)
    except ValueError:
        value = text
    parse_budget(value)
    return value
