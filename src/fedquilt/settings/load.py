"""From plain values to validated settings. Errors name the setting and the nearest known one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.settings.schema import (
    CHOICES,
    Config,
    list_settings,
)


def override_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces settings by dotted name, and returns the new settings.

    >>> override_settings({"data": {"source": "mnist"}}, {"data.clients": 5, "rounds": 2})
    {'data': {'source': 'mnist', 'clients': 5}, 'rounds': 2}
    """
    result: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in settings.items()}
    for name, value in changes.items():
        *sections, key = name.split(".")
        section = result
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"'{part}' is not a section, so '{name}' cannot be set")
        section[key] = value
    return result


def flatten_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Lists settings by dotted name, as ``override_settings`` takes them.

    >>> flatten_settings({"data": {"source": "mnist"}, "rounds": 2})
    {'data.source': 'mnist', 'rounds': 2}
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        is_section = isinstance(value, Mapping)
        result |= {f"{name}.{k}": v for k, v in value.items()} if is_section else {name: value}
    return result


def load_config(settings: Mapping[str, Any]) -> Config:
    """Validates settings; an error is one sentence about the first that is wrong.

    >>> load_config({"rounds": 3}).method.name
    'heterofl'
    >>> load_config({"local_training": {"epoch": 3}})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedquilt.errors.ConfigError: setting 'local_training.epoch' is not known (did you mean ...
    """
    try:
        return Config.model_validate(dict(settings))
    except ValidationError as problem:
        raise ConfigError(_describe_error(problem.errors()[0], settings)) from None


def _describe_error(error: ErrorDetails, settings: Mapping[str, Any]) -> str:
    name = ".".join(_list_keys(error["loc"]))
    if error["type"] == "extra_forbidden":
        return _describe_unknown_setting(name, settings)
    if error["type"] == "union_tag_invalid":
        return describe_unknown(name.replace("_", " "), str(error["ctx"]["tag"]), CHOICES[name])
    rule = error["msg"]
    return f"setting '{name}': {rule[0].lower()}{rule[1:]}, got {error['input']!r}"


def _list_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys of a setting, without what pydantic adds: the member of a union that it tried."""
    keys = [str(part) for part in location]
    if len(keys) > 1 and keys[1] in CHOICES.get(keys[0], ()):
        del keys[1]
    return keys[:2]


def _describe_unknown_setting(name: str, settings: Mapping[str, Any]) -> str:
    names = {choice: str(settings.get(choice, {}).get("name", "")).lower() for choice in CHOICES}
    known = list(list_settings(**{choice: name for choice, name in names.items() if name}))
    section, _, key = name.rpartition(".")
    if section:
        candidates = [n for n in known if n.startswith(f"{section}.")]
        kind = f"setting of {names[section]}" if names.get(section) else "setting"
        return describe_unknown(kind, name, candidates)
    elsewhere = [n for n in known if n.endswith(f".{key}")]
    if elsewhere:
        return f"setting '{name}' is not known; did you mean {' or '.join(elsewhere)}?"
    return describe_unknown("setting", name, Config.model_fields)
