"""What is compared: variants of settings, from methods, lists of values and named changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from fedquilt.errors import ConfigError, describe_unknown
from fedquilt.methods import METHODS
from fedquilt.models import find_factory
from fedquilt.settings.schema import DEFAULT_METHOD, list_settings
from fedquilt.settings.toml import format_value

ALL = "all"  # every method that fits
METHOD = "method.name"


@dataclass(frozen=True)
class Variant:
    """One row of a comparison.

    Args:
        name: What it is called in tables.
        settings: Its settings by dotted name.
        is_named: Whether it was asked for by name: such a variant is compared even if its clients
            train more than their budgets allow.
    """

    name: str
    settings: Mapping[str, Any]
    is_named: bool = True


def list_variants(
    settings: Mapping[str, Any],
    methods: Sequence[str] = (),
    named: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Variant]:
    """All variants: each method, with each combination of listed values, and those with names.

    Args:
        settings: Settings by dotted name. A list where one value belongs is a list of values.
        methods: The methods; ``all`` is every one that fits. Without any, the one of the settings,
            or all if the settings neither have one nor list values.
        named: Further variants by their names: settings that differ.
    """
    if not methods:
        is_alone = not named and not find_lists(settings)
        given = settings.get(METHOD, ALL if is_alone else () if named else DEFAULT_METHOD)
        methods = [given] if isinstance(given, str) else list(given)
    names = {name: True for name in map(str.lower, methods) if name != ALL}
    if ALL in map(str.lower, methods):
        names |= {name: names.get(name, False) for name in METHODS}
    for name in names:
        if name not in METHODS:
            raise ConfigError(describe_unknown("method", name, [*METHODS, ALL]))
    variants = []
    for name, is_named in names.items():
        own = {**settings, METHOD: name}
        variants += [Variant(n, s, is_named) for n, s in _expand(name, own)]
    for name, changes in (named or {}).items():
        own = {METHOD: DEFAULT_METHOD, **settings, **changes}
        if not isinstance(own[METHOD], str):
            raise ConfigError(f"variant '{name}' has one method; give it method.name")
        variants += [Variant(n, s) for n, s in _expand(name, own)]
    _refuse_same_names(variants)
    return variants


def _expand(name: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination of listed values, and a name for it."""
    lists = find_lists(settings)
    for values in itertools.product(*lists.values()):
        choice = dict(zip(lists, values, strict=True))
        words = [f"{n.rpartition('.')[2]}={_shorten(v)}" for n, v in choice.items()]
        yield " ".join([name, *words]), {**settings, **choice}


def find_lists(settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The settings that have a list where one value belongs.

    >>> find_lists({"local_training.lr": [0.1, 0.01], "data.budgets": [1, 0.5], "rounds": 3})
    {'local_training.lr': [0.1, 0.01]}
    """
    found: dict[str, list[Any]] = {}
    for name, value in settings.items():
        if isinstance(value, (list, tuple)) and value and not _accepts(settings, name, value):
            if not all(_accepts(settings, name, item) for item in value):
                continue  # wrong in another way, which validation names
            found[name] = list(value)
    return found


def _accepts(settings: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a setting may have a value; what is not known may have any."""
    kind = _find_type(settings, name)
    if kind is None:
        return True
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    except PydanticSchemaGenerationError:
        return True
    return True


def _find_type(settings: Mapping[str, Any], name: str) -> Any:
    """The type of a setting with its range; None if it is not known."""
    method = str(settings.get(METHOD, DEFAULT_METHOD))
    known = list_settings(method=method if method in METHODS else DEFAULT_METHOD)
    if name in known:
        field = known[name]
        kind: Any = field.annotation
        return Annotated[(kind, *field.metadata)] if field.metadata else kind
    section, _, option = name.partition(".")
    if section != "model":
        return None
    factory = find_factory(str(settings.get("model.name", known["model.name"].default)))
    return get_type_hints(factory).get(option)


def _shorten(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else format_value(value).strip('"')


def _refuse_same_names(variants: Sequence[Variant]) -> None:
    names = [variant.name for variant in variants]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"variants have names of their own, got '{name}' twice; call one something else"
            )
