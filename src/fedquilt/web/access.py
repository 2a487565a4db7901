"""Who may use a server: programs of this machine, or those that know the token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from fedquilt.errors import ConfigError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MIN_TOKEN = 16  # characters
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/health",)  # that say nothing about the model or the runs
SECURITY_HEADERS: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self' data: blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
]


@dataclass(frozen=True)
class Access:
    """Where a server listens, and the token that its users need; None: none is needed."""

    host: str
    token: str | None

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine can connect."""
        return is_loopback(self.host)

    @property
    def cookie(self) -> str:
        """The name of the cookie that holds the token; servers of one machine have their own."""
        digest = hashlib.sha256((self.token or "").encode()).hexdigest()
        return f"fedquilt-{digest[:8]}"


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def choose_access(host: str, token: str | None) -> Access:
    """The token that was given, or a new one if others can connect; on loopback none is needed."""
    if token is not None and (len(token) < MIN_TOKEN or not token.isascii() or " " in token):
        raise ConfigError(
            f"a token has at least {MIN_TOKEN} ASCII characters and no spaces, got {len(token)} "
            "characters; leave it out, and one is made"
        )
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    return Access(host, token)


class AccessControl:
    """An ASGI application behind the check of the token, with headers that keep pages safe.

    A server on a loopback address also checks the host's name: a page of another site cannot make
    a browser read from it under a name of its own.
    """

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = dict(scope["headers"])
        if self._access.is_local and not _is_local_name(headers.get(b"host", b"")):
            await _refuse(send, 421, "this server answers to localhost only")
            return
        if self._access.token is not None and scope["path"] not in OPEN_PATHS:
            if self._brings_token_in_address(scope):
                await self._move_token_to_cookie(scope, send)
                return
            if not self._knows_token(headers):
                await _refuse(send, 401, "give the token: Authorization: Bearer TOKEN")
                return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._access.token or "").encode())

    def _knows_token(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer" and self._matches(given.strip()):
            return True
        try:
            jar = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        return self._access.cookie in jar and self._matches(jar[self._access.cookie].value)

    def _brings_token_in_address(self, scope: Scope) -> bool:
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        return scope["method"] == "GET" and "token" in query and self._matches(query["token"])

    async def _move_token_to_cookie(self, scope: Scope, send: Send) -> None:
        """Sends a browser to the page without the token in its address, with a cookie."""
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        cookie = f"{self._access.cookie}={self._access.token}; HttpOnly; SameSite=Strict; Path=/"
        location = "/" + quote(scope["path"].lstrip("/")) + ("?" + rest if rest else "")
        headers = [(b"location", location.encode()), (b"set-cookie", cookie.encode())]
        await _respond(send, 303, b"", headers)


def _is_local_name(host: bytes) -> bool:
    name, _, port = host.decode("latin-1").rpartition(":")
    if not name or not port.isdigit():
        name = host.decode("latin-1")
    return name.lower() in LOCAL_NAMES


async def _refuse(send: Send, status: int, sentence: str) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _respond(send, status, b'{"error": "%s"}' % sentence.encode(), headers)


async def _respond(send: Send, status: int, body: bytes, headers: Headers) -> None:
    size = [(b"content-length", str(len(body)).encode())]
    all_headers = [*headers, *size, *SECURITY_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})
