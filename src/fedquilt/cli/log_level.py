"""``--log-level`` of every command: what the library logs, on standard error."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any, TextIO

import typer

from fedquilt.errors import ConfigError, describe_unknown

LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

LogLevel = Annotated[
    str | None,
    typer.Option(
        envvar="FEDQUILT_LOG_LEVEL",
        metavar="LEVEL",
        help="Log to standard error: debug, info, warning or error.",
    ),
]


class StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the time: displays replace it while they live."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        self.stream = sys.stderr
        super().emit(record)


def takes_log_level(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the option ``--log-level``."""

    @functools.wraps(command)
    def run(*values: Any, log_level: str | None = None, **named: Any) -> Any:
        if log_level is None:
            return command(*values, **named)
        if log_level.lower() not in LEVELS:
            raise ConfigError(describe_unknown("log level", log_level, LEVELS))
        logger, handler = logging.getLogger("fedquilt"), StandardErrorHandler()
        before = logger.level
        logger.addHandler(handler)
        logger.setLevel(log_level.upper())
        try:
            return command(*values, **named)
        finally:
            logger.setLevel(before)
            logger.removeHandler(handler)

    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = inspect.Parameter("log_level", keyword, default=None, annotation=LogLevel)
    # typer reads the signature and the annotations of the function itself
    del run.__wrapped__
    run.__signature__ = signature.replace(parameters=[*own, added])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, added)}
    return run
