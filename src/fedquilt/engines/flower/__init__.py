"""The Flower engine, and the apps that any Flower project may name.

In a project's ``pyproject.toml``::

    [tool.flwr.app.components]
    serverapp = "fedquilt.engines.flower:server"
    clientapp = "fedquilt.engines.flower:client"

The apps are made when they are asked for: the engine itself needs none of what they bring along.
"""

from __future__ import annotations

from typing import Any

__all__ = ["client", "client_app", "server", "server_app"]  # Flower looks here for names of apps

HOMES = {
    "server": "fedquilt.deploy.server",
    "client": "fedquilt.deploy.client",
    "server_app": "fedquilt.deploy.server",
    "client_app": "fedquilt.deploy.client",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(HOMES[name]), name)
