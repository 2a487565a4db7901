"""A TOML file to start with: the settings that people change first, each with its description.

Descriptions and defaults come from the schema, so that they cannot differ from it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fedquilt.settings.schema import list_settings
from fedquilt.settings.toml import format_value

WIDTH = 98
SCHEMA_LINE = "#:schema ./fedquilt.schema.json"
SETTINGS: Mapping[str, Sequence[str]] = {  # by section, in the order of the file
    "": ("rounds", "seed"),
    "data": ("source", "partition", "clients", "budgets"),
    "model": ("name",),
    "task": ("loss", "metrics"),
    "method": ("name", "fraction"),
    "local_training": ("lr", "epochs", "batch_size", "optimizer"),
    "run": ("evaluate_every", "checkpoint_every", "workers", "device", "trackers"),
    "selection": ("keep", "patience"),
}
EXAMPLES: Mapping[str, Any] = {  # of settings that are left out by default
    "data.budgets": [1.0, 0.5, 0.25],
    "data.clients": 10,
    "task.metrics": ["accuracy"],
    "method.fraction": 0.5,
    "local_training.lr": 0.05,
    "local_training.epochs": 2,
    "local_training.batch_size": 32,
    "local_training.optimizer": "sgd",
    "run.workers": 2,
    "run.trackers": ["csv"],
    "selection.patience": 5,
}


def make_template(chosen: Mapping[str, Any], head: Sequence[str] = ()) -> str:
    """Writes the text of a TOML file.

    Args:
        chosen: The settings that are set; all others are there as comments.
        head: Lines of explanation at the top.

    >>> print(make_template({"rounds": 20}).partition("# seed")[0])
    #:schema ./fedquilt.schema.json
    <BLANKLINE>
    # Rounds of training.
    rounds = 20
    <BLANKLINE>
    # Seed of everything random; the same seed repeats a run to the bit.
    <BLANKLINE>
    """
    known = list_settings()
    parts = [SCHEMA_LINE, "\n".join(f"# {line}" for line in head)] if head else [SCHEMA_LINE]
    for section, names in SETTINGS.items():
        if section:
            parts.append(f"[{section}]")
        for name in names:
            dotted = f"{section}.{name}" if section else name
            field = known[dotted]
            about = textwrap.wrap(" ".join((field.description or "").split()), WIDTH)
            value = chosen.get(dotted, EXAMPLES.get(dotted, field.default))
            line = f"{name} = {format_value(value)}"
            lines = [*(f"# {text}" for text in about), line if dotted in chosen else f"# {line}"]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
