"""Runs an ASGI application on a port: connections that send nothing useful are closed in time."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Queue
from typing import Any

from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.web.access import Access, AccessControl, App

HEADER_SECONDS = 10.0  # from the start of a request to the end of its headers
KEEP_ALIVE_SECONDS = 15
MAX_CONNECTIONS = 512
START_SECONDS = 30.0
EXTRA = "it needs the extra: pip install 'fedquilt[serve]'"


def require_server(command: str) -> None:
    """Refuses a command whose packages are not installed."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as problem:
        raise FedquiltError(f"{command} is a server, and {EXTRA}") from problem


def run_server(app: App, access: Access, port: int, on_ready: Callable[[str], None]) -> None:
    """Serves until the process is told to stop; ``on_ready`` gets the address of the first page.

    Port 0 takes a free one.
    """
    with (
        _open_server(app, access, port, on_ready) as (server, listener),
        suppress(KeyboardInterrupt),  # how a person ends it
    ):
        server.run(sockets=[listener])


@contextmanager
def run_in_background(app: App, access: Access, port: int = 0) -> Iterator[str]:
    """Serves in a thread while the context lasts; gives the address of the first page."""
    ready: Queue[str] = Queue()
    with _open_server(app, access, port, ready.put) as (server, listener):
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield ready.get(timeout=START_SECONDS)
        finally:
            server.should_exit = True
            thread.join(START_SECONDS)


@contextmanager
def _open_server(
    app: App, access: Access, port: int, on_ready: Callable[[str], None]
) -> Iterator[tuple[Any, socket.socket]]:
    import uvicorn

    listener = _listen(access.host, port)
    host = f"[{access.host}]" if ":" in access.host else access.host
    token = "" if access.token is None else f"?token={access.token}"
    address = f"http://{host}:{listener.getsockname()[1]}/{token}"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready(address)

    config = uvicorn.Config(
        AccessControl(app, access),
        http=make_protocol(),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,
    )
    try:
        yield Server(config), listener
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except (OSError, OverflowError) as problem:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"the server cannot listen at {host}, port {port} ({problem}); choose another: "
            "port=0 takes a free one"
        ) from problem
    return listener


def make_protocol() -> type[Any]:
    """Uvicorn's HTTP with a time limit for headers, which it does not have itself."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import (  # type: ignore[assignment]
            H11Protocol as Protocol,
        )

    class TimedProtocol(Protocol):
        """Closes a connection whose request has no complete headers after some seconds."""

        _deadline: asyncio.TimerHandle | None = None
        _seen: Any = None  # the last request whose headers were complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_clock()

        def data_received(self, data: bytes) -> None:
            if self._deadline is None:
                self._start_clock()
            super().data_received(data)
            if self.cycle is not self._seen:
                self._seen = self.cycle
                self._stop_clock()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            self._seen = None
            super().connection_lost(exc)

        def _start_clock(self) -> None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._close)

        def _stop_clock(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _close(self) -> None:
            self._deadline = None
            is_working = self.cycle is not None and not self.cycle.response_complete
            if not is_working and not self.transport.is_closing():
                self.transport.close()

    return TimedProtocol
