"""`bar`: the one progress bar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def bar(items: Iterable[Any] | None = None, progress: bool | None = None, **options: Any) -> tqdm[Any]:
    """A bar on standard error: shown if `progress`, hidden if not, and only on a terminal if None.

    Args:
        items: The items to iterate over; without them, the caller updates the bar.
        progress: Whether to show it, as in functions for users.
        options: As for `tqdm`.
    """
    return tqdm(items, disable=None if progress is None else not progress, **options)
