"""How commands that run for long are stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = ("SIGTERM", "SIGHUP")  # the second when a terminal is closed; not everywhere


@contextmanager
def handle_stop_signals() -> Iterator[None]:
    """Lets other signals stop what Ctrl-C stops, in the same way; not one that is ignored."""
    numbers = [getattr(signal, name) for name in STOPPING if hasattr(signal, name)]
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
