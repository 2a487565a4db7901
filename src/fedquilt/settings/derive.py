"""Sections that are derived from Python: a class or function states its settings once.

The names, types, ranges and defaults of settings are those of the parameters; the descriptions are
those of the ``Args`` part of the docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any, NamedTuple, Optional, get_type_hints

from pydantic import BaseModel, Field, create_model

PLAIN = (bool, int, float, str, tuple, NoneType)


class Argument(NamedTuple):
    """A parameter that settings can give: its type with its range, its default, its purpose."""

    annotation: Any
    default: Any
    description: str


def list_arguments(factory: Callable[..., Any]) -> dict[str, Argument]:
    """Lists the parameters of a class or function that TOML can give.

    These are the parameters whose defaults are plain values.

    >>> from fedquilt.training.settings import LocalTraining
    >>> list_arguments(LocalTraining)["epochs"].default
    5
    """
    hints = get_type_hints(factory, include_extras=True)
    docs = read_argument_docs(factory)
    return {
        name: Argument(hints[name], parameter.default, docs.get(name, ""))
        for name, parameter in inspect.signature(factory).parameters.items()
        if isinstance(parameter.default, PLAIN) and hints[name] is not NoneType
    }


def read_argument_docs(factory: Callable[..., Any]) -> dict[str, str]:
    """Reads what the docstring says about each argument.

    A class inherits what its bases say; a function what the class that it returns says.
    """
    owners: list[Any] = [factory]
    if not inspect.isclass(factory):
        made = get_type_hints(factory).get("return")
        owners = [*(made.__mro__ if inspect.isclass(made) else ()), factory]
    else:
        owners = list(reversed(inspect.getmro(factory)))
    docs: dict[str, str] = {}
    for owner in owners:
        docs |= dict(_parse_args(inspect.cleandoc(owner.__doc__ or "")))
    return docs


def _parse_args(docstring: str) -> Iterator[tuple[str, str]]:
    """The entries under ``Args:`` in Google's style."""
    match = re.search(r"^(?:Args|Attributes):\n((?: +.*\n?|\n)*)", docstring, re.MULTILINE)
    entries = re.split(r"^ {4}(?=\w)", match[1] if match else "", flags=re.MULTILINE)
    for entry in entries[1:]:
        name, _, text = entry.partition(":")
        yield name.split()[0], " ".join(text.split())


def derive_section(
    title: str,
    arguments: Mapping[str, Argument],
    base: type[BaseModel],
    *,
    doc: str,
    optional: bool = False,
    **fields: Any,
) -> type[BaseModel]:
    """Makes a section of settings from arguments.

    Args:
        title: The name of the section's class.
        arguments: The settings of the section.
        base: What the section inherits.
        doc: What the section is for.
        optional: Whether every setting may be left out as None, instead of having its default.
        fields: Further fields, as ``pydantic.create_model`` takes them.
    """
    for name, argument in arguments.items():
        annotation = Optional[argument.annotation] if optional else argument.annotation  # noqa: UP045
        default = None if optional else argument.default
        inherited = base.model_fields.get(name)
        description = argument.description or (inherited and inherited.description)
        fields[name] = (annotation, Field(default, description=description))
    # descriptions are given above; pydantic would look for them in the source, a second for all
    found_here = {"use_attribute_docstrings": False}
    return create_model(title, __base__=base, __doc__=doc, __cls_kwargs__=found_here, **fields)
