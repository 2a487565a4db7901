"""Settings as TOML: files, and single values as text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tomli_w

from fedquilt.errors import ConfigError
from fedquilt.settings.schema import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: str | Path) -> dict[str, Any]:
    """Reads the settings in a TOML file; ``load_config`` validates them."""
    try:
        return tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"the config file '{path}' does not exist") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"settings are a text file, and '{path}' is none; data are given with --data"
        ) from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ConfigError(f"the config file '{path}' cannot be read: {problem}") from problem


def dump_toml(config: Config) -> str:
    """Writes the settings as TOML. Settings that are None are left out: TOML has no null."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def parse_dump(text: str) -> dict[str, Any]:
    """Reads settings that ``dump_toml`` wrote."""
    return tomllib.loads(text)


def parse_value(text: str) -> Any:
    """Parses one TOML value. A bare word is text.

    >>> parse_value("[1, 0.5]"), parse_value("group")
    ([1, 0.5], 'group')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def format_value(value: Any) -> str:
    """Writes one value as TOML on one line.

    >>> format_value((1.0, {"params": 1000}))
    '[1.0, { params = 1000 }]'
    """
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(format_value, value)) + "]"
    # tomli-w writes each element of an array on its own line, and tables in it inline
    return tomli_w.dumps({"value": [value]}).splitlines()[1].strip().removesuffix(",")
