"""The doors: `Guard`, in front of every route, and `BoundedConnection`, in front of every socket.

A page elsewhere on the web can send requests to a server on loopback. It cannot set the Host header to our name
(which stops DNS rebinding) nor hide its own Origin (which stops forged requests). Beyond loopback a token is needed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import socket
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tensorlens.app.explorer import Limits
from tensorlens.files import to_json

COOKIE = "tensorlens_token"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine for itself; on these addresses no token is needed."""
_log = logging.getLogger("tensorlens.explorer")

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# A name or an IPv6 address in brackets, then a port or nothing; "[::1]evil.com" and "localhost:80@evil.com" do not fit.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE)


# Requests -------------------------------------------------------------------------------------------------------------


def allowed_hosts(address: str) -> frozenset[str] | None:
    """The names by which a server on an address may be called; None, for any name, if it serves on every address."""
    if address in ("0.0.0.0", "::"):
        return None
    return LOOPBACK | {address.lower(), socket.gethostname().lower()}


@dataclass(frozen=True, kw_only=True)
class Access:
    """The requests that the guard accepts.

    Attributes:
        hosts: Valid names of the server; None for any name, which needs a token.
        token: The token that every request must show; None on loopback.
    """

    hosts: frozenset[str] | None = LOOPBACK
    token: str | None = None


class Guard:
    """ASGI middleware that refuses strangers and puts safe headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or pass the request on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        safely = _Sender(send)
        try:
            response = self._refusal(scope)
            app = self._app if response is None else response
            await app(scope, receive, safely)
        except ClientDisconnect:
            return  # the client has gone
        except Exception as error:
            if safely.has_started:
                raise
            _log.exception("a request failed")
            await _refuse(500, _apology(error))(scope, receive, safely)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host, hosts = headers.get("host", ""), self._access.hosts
        name = _name(host)
        if name is None or hosts is not None and name not in hosts:
            expected = "a host name" if hosts is None else " or ".join(sorted(hosts))
            return _refuse(421, f"Expected a request to {expected}, got one to {host[:80]!r}.")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return _refuse(403, f"Expected a request from this page, got one from {origin[:80]!r}.")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["method"] != "GET":
            return _refuse(403, "Expected a request from this page, got one from another site.")
        return self._without_token(Request(scope))

    def _without_token(self, request: Request) -> Response | None:
        token = self._access.token
        if token is None or _same(request.cookies.get(COOKIE, ""), token):
            return None
        if request.url.path == "/" and _same(request.query_params.get("token", ""), token):
            rest = request.url.remove_query_params("token").query
            response = RedirectResponse("/" + (f"?{rest}" if rest else ""), status_code=303)
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return response
        return _refuse(
            401,
            "Expected the token of this explorer, got none or another one. Open the address that the explorer printed.",
        )


class _Sender:
    """Passes messages on, with safe headers; knows whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send, self.has_started = send, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)


class StrictJson(JSONResponse):
    """JSON in ASCII, so that half a surrogate pair can be sent, and without NaN, which JSON does not have."""

    def render(self, content: object) -> bytes:
        """The bytes of the body."""
        return to_json(content, ascii_only=True).encode()


def _apology(error: Exception) -> str:
    kind = type(error).__name__
    return f"Something unexpected happened ({kind}). The server is still running; its terminal has the details."


def _refuse(status: int, message: str) -> Response:
    return StrictJson({"type": "error", "message": message}, status_code=status)


def _name(host: str) -> str | None:
    """The host without its port and without the brackets of an IPv6 address; None if it does not have that form."""
    found = _HOST.fullmatch(host)
    return None if found is None else (found[1] or found[2]).lower()


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), token.encode())


# Sockets --------------------------------------------------------------------------------------------------------------


def configuration(app: Any, limits: Limits, **more: Any) -> uvicorn.Config:
    """How uvicorn serves the explorer."""

    class Connection(BoundedConnection):
        bounds = limits

    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        h11_max_incomplete_event_size=64 * 1024,
        **({"timeout_graceful_shutdown": 3, "log_level": "warning"} | more),
    )


class BoundedConnection(H11Protocol):
    """HTTP by h11 with a time limit: an incomplete head is dropped after `Limits.header_seconds`."""

    bounds = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock; make room if there are too many."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._clock: asyncio.TimerHandle | None = None
        self._watch()
        if len(self.connections) > self.bounds.connections:
            waiting = [one for one in self.connections if isinstance(one, BoundedConnection) and one.is_waiting]
            if waiting:
                min(waiting, key=lambda one: one._since).transport.abort()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Stop the clock when a head is complete, start it when one has begun."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin the next wait; until its first byte arrives, the keep-alive limit applies."""
        self._since = self.loop.time()
        super().on_response_complete()

    def _watch(self) -> None:
        if not self.is_waiting:
            self._stop_clock()
        elif self._clock is None:
            self._clock = self.loop.call_later(self.bounds.header_seconds, self._too_slow)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_slow(self) -> None:
        self._clock = None
        if self.is_waiting:
            self.transport.close()
