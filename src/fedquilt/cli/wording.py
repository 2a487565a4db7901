"""Errors of the library in the words of the terminal.

The library speaks Python: ``trust=True``, ``model='net.py:make'``. The terminal says the same in
its options: ``--trust``, ``--model net.py:make``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ARGUMENT = re.compile(r"""(?<![\w.\-])([a-z_]+)=(True|'[^']*'|"[^"]*"|[\w./:]*[\w/])""")
VALUE = re.compile(r"(\b[A-Z]\w*\([^()]*\))")  # the repr of a value, which stays as it is


def speak_options(sentence: str, options: Mapping[str, str]) -> str:
    """Replaces keyword arguments of Python by the options of the same name.

    Args:
        sentence: What the library says.
        options: The options of all commands by their parameters' names.

    >>> speak_options("give trust=True, or model='FILE'", {"trust": "--trust", "model": "--model"})
    'give --trust, or --model FILE'
    >>> speak_options("set method.width=0.5", {"width": "--width"})
    'set method.width=0.5'
    >>> speak_options("Budget(width=0.1) is too small", {"width": "--width"})
    'Budget(width=0.1) is too small'
    """

    def translate(match: re.Match[str]) -> str:
        option, value = options.get(match[1]), match[2].strip("'\"")
        if option is None:
            return match[0]
        return option if value == "True" else f"{option} {value}"

    parts = VALUE.split(sentence)  # values are at odd places
    parts[::2] = [ARGUMENT.sub(translate, part) for part in parts[::2]]
    return "".join(parts)
