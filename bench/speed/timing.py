"""The one way to time: medians with their spread, and the memory that a computation takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds: the median, the fastest and the slowest of `n` runs; memory at the peak beyond what was there."""

    seconds: float
    fastest: float
    slowest: float
    n: int
    extra_bytes: int | None

    def __str__(self) -> str:
        """For tables: milliseconds with their spread."""
        return f"{1e3 * self.seconds:.3g} ms ({1e3 * self.fastest:.3g} to {1e3 * self.slowest:.3g})"

    @property
    def gib(self) -> str:
        """For tables: the memory."""
        return "–" if self.extra_bytes is None else f"{self.extra_bytes / 2**30:.2f}"


def timed(work: Callable[[], Any], *, n: int = 5, warm: int = 1, most_seconds: float = 20.0) -> Timing:
    """Run `work` up to `n` times after warming up, fewer if it takes long."""
    for _ in range(warm):
        work()
    finish()
    gc.collect()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    seconds: list[float] = []
    while len(seconds) < n and sum(seconds) < most_seconds:
        start = time.perf_counter()
        work()
        finish()
        seconds.append(time.perf_counter() - start)
    extra = torch.cuda.max_memory_allocated() - before if on_gpu else None
    return Timing(median(seconds), min(seconds), max(seconds), len(seconds), extra)


def finish() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clear() -> None:
    """Let go of what is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
