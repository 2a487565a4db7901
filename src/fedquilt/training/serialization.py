"""Recipes as plain values, which can be sent in a message.

A recipe is a frozen dataclass of numbers, strings, tuples and other such dataclasses. Each becomes
a mapping with the name of its class. From a message only classes of this library are made, and
those that the receiver has allowed; no code of a message is run. Functions of users travel as the
paths that they are imported by, and only those that the receiver has allowed are accepted.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fedquilt.errors import ConfigError
from fedquilt.training.function_path import FunctionPath
from fedquilt.user_code import find_function_path

KIND = "is"
ALLOWED_PREFIXES = (
    "fedquilt.training.",
    "fedquilt.federation.secure.quantization:",
    "fedquilt.federation.secure.session:",
    "fedquilt.structure.budget:",
    "fedquilt.structure.subnet:",
)


def to_plain(value: Any) -> Any:
    """The value as numbers, strings, lists and mappings.

    >>> from fedquilt.training.exits import ExitLosses
    >>> to_plain(ExitLosses(0.5))
    {'is': 'fedquilt.training.exits:ExitLosses', 'distil': 0.5, 'only_last': False}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        return {KIND: _class_name(type(value)), **own}
    if callable(value) and not isinstance(value, type):
        path = find_function_path(value)
        if path is None:
            raise ConfigError(
                "a function is sent by the path that it can be imported by on every machine, got "
                f"{value!r}; give file.py:function, or a function of an installed module"
            )
        return to_plain(FunctionPath(path, "function"))
    raise ConfigError(
        f"a recipe that is sent to clients holds numbers, words, tuples and dataclasses of those, "
        f"got {type(value).__name__}"
    )


def from_plain(
    value: Any, allowed: Iterable[type] = (), functions: Collection[str] | None = ()
) -> Any:
    """The value that ``to_plain`` was given.

    Args:
        value: Numbers, strings, lists and mappings.
        allowed: Classes that may be made besides those of this library.
        functions: Paths of functions that the value may name; None: any.

    >>> from fedquilt.training.exits import ExitLosses
    >>> from_plain(to_plain(ExitLosses(0.5)))
    ExitLosses(distil=0.5, only_last=False)
    """
    classes = {_class_name(kind): kind for kind in allowed}
    built = _build(value, classes)
    for function in list_functions(built):
        if functions is not None and function.path not in functions:
            raise ConfigError(
                f"the {function.noun} '{function.path}' is code, and it is not in the settings "
                "here; name it there if you trust it"
            )
    return built


def list_functions(value: Any) -> Iterator[FunctionPath]:
    """The functions that a recipe or method names by their paths.

    >>> from fedquilt.training.settings import LocalTraining
    >>> [one.path for one in list_functions(LocalTraining(optimizer="mine.py:make"))]
    ['mine.py:make']
    """
    if isinstance(value, FunctionPath):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from list_functions(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from list_functions(getattr(value, field.name))


def _build(value: Any, classes: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return tuple(_build(item, classes) for item in value)
    if not isinstance(value, dict):
        return value
    settings = {name: _build(item, classes) for name, item in value.items() if name != KIND}
    name = value.get(KIND)
    kind = classes.get(name) if isinstance(name, str) else None
    kind = kind or _find_class(str(name))
    try:
        return kind(**settings)
    except TypeError as problem:
        raise ConfigError(
            f"'{name}' cannot be made of what was sent ({problem}); do both sides have the same "
            "version of fedquilt?"
        ) from problem


def _find_class(name: str) -> type:
    module, _, word = name.partition(":")
    if name.startswith(ALLOWED_PREFIXES) and word.isidentifier():
        try:
            kind = getattr(importlib.import_module(module), word, None)
        except ImportError:
            kind = None
        if isinstance(kind, type) and is_dataclass(kind) and _class_name(kind) == name:
            return kind
    raise ConfigError(
        f"'{name}' is no recipe of this fedquilt; update it, or allow your own recipe where the "
        "client's app is made"
    )


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
