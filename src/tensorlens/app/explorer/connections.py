"""Sockets that are kept waiting: how long the head of a request may take, and which socket gives way to a newcomer."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tensorlens.app.explorer.limits import Limits


def configuration(app: Any, limits: Limits, **more: Any) -> uvicorn.Config:
    """How uvicorn serves the explorer: no limit on requests in flight, which queue, but on sockets that only wait."""

    class Connection(BoundedConnection):
        bounds = limits

    return uvicorn.Config(
        app,
        http=Connection,
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        h11_max_incomplete_event_size=64 * 1024,
        **({"timeout_graceful_shutdown": 3, "log_level": "warning"} | more),
    )


class BoundedConnection(H11Protocol):
    """HTTP by h11 on a socket that may not wait for ever: a head half sent is dropped after `Limits.header_seconds`."""

    bounds = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock; make room if there are too many."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._clock: asyncio.TimerHandle | None = None
        self._expect_head()
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
        if not self.is_waiting:
            self._stop_clock()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The next wait begins."""
        self._since = self.loop.time()
        super().on_response_complete()

    def _expect_head(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(self.bounds.header_seconds, self._too_slow)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_slow(self) -> None:
        self._clock = None
        if self.is_waiting:
            self.transport.close()
