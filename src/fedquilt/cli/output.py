"""Output that may lose its reader, which is no reason to stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class DetachableStream:
    """A stream that is written to for as long as somebody reads it, and to nowhere after that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text, as long as there is a reader."""
        try:
            return self._stream.write(text)
        except OSError:  # a closed pipe, a terminal that is gone, a full disk
            self._redirect()
            return len(text)

    def flush(self) -> None:
        """Writes what has waited, as long as there is a reader."""
        try:
            self._stream.flush()
        except OSError:
            self._redirect()
            self._stream.flush()

    def _redirect(self) -> None:
        """To nowhere, on the level of the system: there may be text in buffers still."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def detachable_output() -> Iterator[None]:
    """Work in here goes on when nobody reads its output any more, as behind ``| head``."""
    before: tuple[Any, Any] = sys.stdout, sys.stderr
    ours = [None if stream is None else DetachableStream(stream) for stream in before]
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for stream in ours:
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
