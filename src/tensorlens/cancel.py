"""Cancelling by a callback: long work calls `check()` between its pieces, and whoever started it may raise there.

The work knows nothing about jobs, readers or clocks; a piece is never interrupted, so nothing half done is
left. The callback belongs to the context that set it: in other threads, `check()` costs one lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_callback: ContextVar[Callable[[], None] | None] = ContextVar("tensorlens_cancel", default=None)


def check() -> None:
    """Call the callback of this context, which raises if the work must stop; nothing happens if there is none."""
    callback = _callback.get()
    if callback is not None:
        callback()


@contextmanager
def checking(callback: Callable[[], None]) -> Iterator[None]:
    """Within the block, `check()` calls `callback`.

    Args:
        callback: Raises to stop the work. Use a subclass of `BaseException` only, so that nothing swallows it.
    """
    token = _callback.set(callback)
    try:
        yield
    finally:
        _callback.reset(token)
