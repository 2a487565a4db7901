"""Work that must end in time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class TooLate(Exception):
    """The work was not done in time."""


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """What the work returns; raises TooLate when the time is over. 0 means any time.

    The work is done in a thread, which is told to stop: it does at its next step in Python. If it
    hangs in something else it is left behind, and ends with the process at the latest.

    >>> within(5, lambda: 6 * 7)
    42
    """
    if not seconds:
        return work()
    results: list[Result] = []
    problems: list[BaseException] = []

    def do() -> None:
        try:
            results.append(work())
        except BaseException as problem:  # handed on to whoever waits
            problems.append(problem)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TooLate)
        )
        raise TooLate(f"the work was not done within {seconds:g} seconds")
    if problems:
        raise problems[0]
    return results[0]
