"""Recipes as plain values, for those who are told what to do in a message.

A recipe is a frozen dataclass of numbers, words, and other such dataclasses; so are its plain
values, each with the name of its class. Only classes of this library are made from a message, and
those that the receiver itself has allowed: nothing in a message is ever run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fedquilt.errors import ConfigError

KIND = "is"
ROOMS = ("fedquilt.training.", "fedquilt.structure.budget:", "fedquilt.structure.subnet:")


def as_plain(value: Any) -> Any:
    """The value as numbers, words, lists and mappings.

    >>> from fedquilt.training.exits import ExitLosses
    >>> as_plain(ExitLosses(0.5))
    {'is': 'fedquilt.training.exits:ExitLosses', 'distil': 0.5, 'only_last': False}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [as_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
        return {KIND: _name(type(value)), **own}
    raise ConfigError(
        f"a recipe that is sent to clients holds numbers, words, tuples and dataclasses of those, "
        f"got {type(value).__name__}"
    )


def from_plain(value: Any, allowed: Iterable[type] = ()) -> Any:
    """The value again; ``allowed`` are classes beside this library's own.

    >>> from fedquilt.training.exits import ExitLosses
    >>> from_plain(as_plain(ExitLosses(0.5)))
    ExitLosses(distil=0.5, only_last=False)
    """
    classes = {_name(kind): kind for kind in allowed}
    return _made(value, classes)


def _made(value: Any, classes: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return tuple(_made(item, classes) for item in value)
    if not isinstance(value, dict):
        return value
    settings = {name: _made(item, classes) for name, item in value.items() if name != KIND}
    name = value.get(KIND)
    kind = classes.get(name) if isinstance(name, str) else None
    kind = kind or _known(str(name))
    try:
        return kind(**settings)
    except TypeError as problem:
        raise ConfigError(
            f"'{name}' cannot be made of what was sent ({problem}); do both sides have the same "
            "version of fedquilt?"
        ) from problem


def _known(name: str) -> type:
    module, _, word = name.partition(":")
    if name.startswith(ROOMS) and word.isidentifier():
        try:
            found = getattr(importlib.import_module(module), word, None)
        except ImportError:
            found = None
        if isinstance(found, type) and is_dataclass(found) and _name(found) == name:
            return found
    raise ConfigError(
        f"'{name}' is no recipe of this fedquilt; update it, or allow your own recipe where the "
        "client's app is made"
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
