"""What a setting may be: stated once, with its type, and checked wherever it is given."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from fedquilt.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]


def check_fields(settings: object) -> None:
    """Refuses a dataclass with a field that is not what its annotation says.

    For ``__post_init__``. A list becomes a tuple; nothing else is converted: a number in quotation
    marks is refused.
    """
    kind = type(settings)
    for name, adapter in _make_adapters(kind).items():  # type: ignore[arg-type]  # mypy: types hash
        value = getattr(settings, name)
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(settings, name, value)  # the dataclass is frozen
        _check(adapter, value, f"setting '{name}' of {kind.__name__}")


def check_value(name: str, value: object, kind: Any) -> None:
    """Refuses an argument that is not of its kind, such as ``Count``.

    >>> check_value("rounds", 2.5, Count)
    Traceback (most recent call last):
    ...
    fedquilt.errors.ConfigError: rounds: input should be a valid integer, got 2.5
    """
    _check(TypeAdapter(kind), value, name)


def _check(adapter: TypeAdapter[Any], value: object, name: str) -> None:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as problem:
        rule = problem.errors()[0]["msg"]
        raise ConfigError(f"{name}: {rule[0].lower()}{rule[1:]}, got {value!r}") from None


@cache
def _make_adapters(kind: type) -> Mapping[str, TypeAdapter[Any]]:
    """What checks each field, as far as its type can be checked: a protocol cannot."""
    try:
        stated = get_type_hints(kind, include_extras=True)
    except NameError:  # of types that are imported for type checkers only
        return {}
    found = {}
    for field in fields(kind):
        with suppress(PydanticSchemaGenerationError):
            found[field.name] = TypeAdapter(stated[field.name])
    return found
