"""A function of the user as a value that can be sent: the path that it is imported by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
        return load_function(self.path, self.noun)

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        return self.load()(*arguments)
