"""How commands speak: to people, or to programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console


def make_console(*, as_json: bool = False) -> Console:
    """Where people read; a program has standard output to itself."""
    return Console(stderr=as_json, markup=False, highlight=False, emoji=False)


def print_lines(console: Console, *lines: str) -> None:
    """Lines for people, as long as they are."""
    for line in lines:
        console.print(line, soft_wrap=True)


def print_json(document: Mapping[str, Any]) -> None:
    """The one document that a program reads."""
    print(json.dumps(document, indent=2, allow_nan=False))
