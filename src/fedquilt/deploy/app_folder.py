"""Writes the folder of a Flower app: a project file with the settings of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.settings.load import flatten_settings
from fedquilt.settings.schema import Config
from fedquilt.settings.toml import format_value

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A run of fedquilt"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedquilt"

[tool.flwr.app.components]
serverapp = "fedquilt.deploy.server_app:app"
clientapp = "fedquilt.deploy.client_app:app"

[tool.flwr.app.config]
{settings}
"""


def write_app(folder: Path, config: Config, name: str = "quilt") -> Path:
    """Writes an app that trains with these settings; every node must have fedquilt installed."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(k)} = {json.dumps(v)}" for k, v in make_run_config(config).items())
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name, settings="\n".join(lines)))
    return folder


def make_run_config(config: Config) -> dict[str, Any]:
    """Converts settings to Flower's run config: dotted names, lists and tables as text.

    >>> from fedquilt.settings.schema import DataSection
    >>> make_run_config(Config(data=DataSection(budgets="a1-e9")))["data.budgets"]
    'a1-e9'
    """
    plain: Mapping[str, Any] = config.model_dump(exclude_none=True)
    return {
        name: value if isinstance(value, (bool, int, float, str)) else format_value(value)
        for name, value in flatten_settings(plain).items()
    }
