"""`Recent`: the last few of something, bounded in number and in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Keeps what was used last. The newest is kept even if it is too large by itself. Safe to use from any thread.

    Args:
        most: How many.
        most_bytes: How many bytes in all.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(n_bytes for _, n_bytes in self._kept.values())

    def get(self, key: Key) -> Value | None:
        """What is kept for `key`, now the most recent, or None."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Key, value: Value, n_bytes: int) -> None:
        """Keep `value`, and let go of what was not used for longest."""
        with self._lock:
            self._kept[key] = (value, n_bytes)
            self._kept.move_to_end(key)
            while len(self._kept) > self._most or len(self._kept) > 1 and self.n_bytes > self._most_bytes:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._kept.clear()
