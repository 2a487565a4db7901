"""Runs a function with a time limit."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class DeadlineExceeded(Exception):
    """The time limit was exceeded."""


def run_with_deadline(seconds: float, work: Callable[[], Result]) -> Result:
    """Calls a function, and returns its result; raises DeadlineExceeded after ``seconds``.

    0 means no limit. The function runs in a thread, which is stopped at its next step in Python.
    A thread that hangs in other code is left behind, and ends with the process.

    >>> run_with_deadline(5, lambda: 6 * 7)
    42
    """
    if not seconds:
        return work()
    results: list[Result] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as problem:  # raised again by the caller
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(DeadlineExceeded)
        )
        raise DeadlineExceeded(f"the work took longer than {seconds:g} seconds")
    if problems:
        raise problems[0]
    return results[0]
