"""Progress of long work: the one progress bar, and cancelling between its pieces.

The work knows nothing about jobs, readers or clocks; a piece is never interrupted, so nothing half done is
left. A callback belongs to the context that set it: in other threads, `check_cancelled()` costs one lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

Callback = Callable[[float | None], None]
"""Takes the part of the work that is done, or None; raises if the work must stop."""

_callback: ContextVar[Callback | None] = ContextVar("tensorlens_cancel", default=None)


def bar(items: Iterable[Any] | None = None, progress: bool | None = None, **options: Any) -> tqdm[Any]:
    """A bar on standard error: shown if `progress`, hidden if not, and only on a terminal if None.

    Args:
        items: The items to iterate over; without them, the caller updates the bar.
        progress: Whether to show it, as in functions for users.
        options: As for `tqdm`.
    """
    return tqdm(items, disable=None if progress is None else not progress, **options)


def check_cancelled(part: float | None = None) -> None:
    """Call the callback of this context, which raises if the work must stop; nothing happens if there is none.

    Args:
        part: How much of the work is done, if that is known.
    """
    callback = _callback.get()
    if callback is not None:
        callback(part)


@contextmanager
def cancelled_by(callback: Callback) -> Iterator[None]:
    """Within the block, `check_cancelled()` calls `callback`.

    Args:
        callback: Raises to stop the work. Use a subclass of `BaseException` only, so that nothing swallows it.
    """
    token = _callback.set(callback)
    try:
        yield
    finally:
        _callback.reset(token)
