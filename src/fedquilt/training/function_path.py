"""A function of the user as a value that can be sent: the path that it is imported by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedquilt.user_code import load_function


@dataclass(frozen=True)
class FunctionPath:
    """A function that is imported when it is first called, on the machine that calls it.

    Args:
        path: ``file.py:function`` or ``package.module:function``.
        noun: What the function is for. Errors name it.

    >>> FunctionPath("math:sqrt", "schedule")(9)
    3.0
    """

    path: str
    noun: str

    def load(self) -> Callable[..., Any]:
        """Imports the function, or raises a ConfigError that says why it cannot be."""
        file = Path(self.path.rpartition(":")[0])
        return _load(self.path, self.noun, file.stat().st_mtime_ns if file.is_file() else 0)

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        return self.load()(*arguments)


@lru_cache(maxsize=64)
def _load(path: str, noun: str, modified: int) -> Callable[..., Any]:
    """Imports a function, once for each version of its file."""
    return load_function(path, noun)
