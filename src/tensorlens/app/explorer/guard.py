"""Who may ask: `Guard`, in front of every route.

A page elsewhere on the web can send requests to a server on loopback. It cannot set the Host header to our name
(which stops DNS rebinding) nor hide its own Origin (which stops forged requests). Beyond loopback a token is needed.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tensorlens.strict_json import to_json

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
COOKIE = "tensorlens_token"
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


@dataclass(frozen=True, kw_only=True)
class Access:
    """What the guard lets through.

    Attributes:
        hosts: Names the server may be called by; None for any, which needs a token.
        token: What every request must show, or None on loopback.
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
        except Exception as error:
            if safely.has_started:
                raise
            _log.exception("a request failed")
            await _refuse(500, _apology(error))(scope, receive, safely)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._access.hosts is not None and _name(host) not in self._access.hosts:
            return _refuse(421, f"Expected a request to {_names(self._access.hosts)}, got one to {host[:80]!r}.")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return _refuse(403, f"Expected a request from this page, got one from {origin[:80]!r}.")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["method"] != "GET":
            return _refuse(403, "Expected a request from this page, got one from another site.")
        return self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        token = self._access.token
        if token is None or any(_same(shown, token) for shown in (_bearer(headers), _cookie(headers))):
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if scope["path"] == "/" and _same(query.pop("token", [""])[0], token):
            rest = urlencode(query, doseq=True)
            response = RedirectResponse("/" + (f"?{rest}" if rest else ""), status_code=303)
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return response
        return _refuse(401, "Expected the token of this explorer, got none or another. Open the address it printed.")


class _Sender:
    """Sends on, with safe headers; knows whether an answer has begun."""

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
    """JSON in ASCII, so that half a surrogate pair can be sent, and without NaN, which is no JSON."""

    def render(self, content: object) -> bytes:
        """The bytes of the body."""
        return to_json(content, ascii_only=True).encode()


def _apology(error: Exception) -> str:
    kind = type(error).__name__
    return f"The explorer met something it did not expect ({kind}). The server goes on; see its terminal."


def _refuse(status: int, message: str) -> Response:
    return StrictJson({"type": "error", "message": message}, status_code=status)


def _name(host: str) -> str:
    """The host without its port; IPv6 addresses lose their brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _names(hosts: frozenset[str]) -> str:
    return " or ".join(sorted(hosts))


def _bearer(headers: Mapping[str, str]) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _cookie(headers: Mapping[str, str]) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), token.encode())
