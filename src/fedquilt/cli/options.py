"""What several commands take, and what was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedquilt.cli.setting_options import describe_setting
from fedquilt.errors import ConfigError
from fedquilt.settings.toml import parse_value
from fedquilt.structure.budget import Budget

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a finished run.")]
RunModel = Annotated[
    str | None,
    typer.Option("--model", help="The run's model, if its file.py:function is another now."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the file.py:function that the run's directory names."),
]
Host = Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="FEDQUILT_TOKEN",
        help="What users must know; made and printed if others than this machine can connect.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Device = Annotated[str, typer.Option(help=describe_setting("run.device"))]
Workers = Annotated[int | None, typer.Option(help=describe_setting("run.workers"))]
RunsAtATime = Annotated[
    int | None,
    typer.Option(min=0, help="Runs at a time; 0: one, in this process. Left out: one per core."),
]
AnyCode = Annotated[
    bool,
    typer.Option("--any-code", help="Take results that another version of the code made, too."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any setting, such as local_training.epochs=5. Repeatable.",
    ),
]
ParamsLimit = Annotated[int | None, typer.Option("--params", help="At most so many parameters.")]
MacsLimit = Annotated[int | None, typer.Option("--macs", help="At most so many MACs an example.")]
MemoryLimit = Annotated[
    int | None, typer.Option("--memory", help="At most so many bytes while training.")
]
UploadLimit = Annotated[int | None, typer.Option("--upload", help="At most so many bytes to send.")]


def drop_unset(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were not left out."""
    return {name: value for name, value in options.items() if value is not None}


def parse_assignments(texts: Sequence[str] | None) -> dict[str, Any]:
    """What ``--set`` was given: dotted names and TOML values."""
    changes = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigError(
                f"--set takes NAME=VALUE, such as local_training.epochs=5, got '{text}'"
            )
        changes[name.strip()] = parse_value(value.strip())
    return changes


def parse_widths(texts: Sequence[str]) -> tuple[float, ...]:
    """Widths from texts such as ``1,0.5``."""
    words = [word for text in texts for word in text.split(",")]
    try:
        return tuple(Budget(float(word)).width for word in words)
    except ValueError:
        raise ConfigError(f"widths are numbers like 1,0.5,0.25, got '{','.join(words)}'") from None
