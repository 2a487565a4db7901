"""How this program is called, so that commands which are printed work as typed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "fedquilt"


def write_command(words: Sequence[str], folder: Path = Path()) -> str:
    """A command of ours, as it can be typed in a folder.

    >>> write_command(["train", "--out", "my run"])
    "fedquilt train --out 'my run'"
    """
    return shlex.join([*find_program(sys.argv[0], folder), *words])


def find_program(called: str, folder: Path = Path()) -> list[str]:
    """The words that call this program: its name, or its path if the shell does not find it.

    Args:
        called: What was called, the first word of the command.
        folder: Where it will be typed.
    """
    path, found = Path(called), shutil.which(NAME)
    if path.parts[-2:] == ("fedquilt", "__main__.py"):
        return [_shorten(Path(sys.executable), folder), "-m", "fedquilt"]
    if path.name != NAME or not path.is_file():
        return [NAME]  # called by another program
    return [NAME] if found is not None and Path(found).samefile(path) else [_shorten(path, folder)]


def find_python(folder: Path = Path()) -> str:
    """The Python that this program runs in, as it can be typed in a folder."""
    found = shutil.which("python")
    is_found = found is not None and Path(found).parent.samefile(Path(sys.executable).parent)
    return "python" if is_found else _shorten(Path(sys.executable), folder)


def _shorten(path: Path, folder: Path) -> str:
    """The path from a folder, if it is below that."""
    path = Path(os.path.abspath(path))  # links stay: a link to Python knows its environment
    folder = folder.resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
