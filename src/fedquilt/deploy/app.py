"""A Flower app for a run: a folder of two lines of code, and the run's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.config import Config, as_value, dotted

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
serverapp = "fedquilt.engines.flower:server"
clientapp = "fedquilt.engines.flower:client"

[tool.flwr.app.config]
{settings}
"""


def write_app(folder: Path, config: Config, name: str = "quilt") -> Path:
    """Writes the app that does a run with these settings; fedquilt is installed where it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(k)} = {json.dumps(v)}" for k, v in run_config(config).items())
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name, settings="\n".join(lines)))
    return folder


def run_config(config: Config) -> dict[str, Any]:
    """The settings as Flower's run config: by dotted name; lists and tables as text.

    >>> from fedquilt.config import DataSection
    >>> run_config(Config(data=DataSection(budgets="a1-e9")))["data.budgets"]
    'a1-e9'
    """
    plain: Mapping[str, Any] = config.model_dump(exclude_none=True)
    return {
        name: value if isinstance(value, (bool, int, float, str)) else as_value(value)
        for name, value in dotted(plain).items()
    }
