"""Medians with their spread, and the memory a computation takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def finish(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], device: str, *, n: int = 5, warm: int = 1, most_seconds: float = 20.0) -> Timing:
    """Run `work` up to `n` times after warming up, fewer if it takes long."""
    for _ in range(warm):
        work()
    finish(device)
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    seconds: list[float] = []
    while len(seconds) < n and sum(seconds) < most_seconds:
        start = time.perf_counter()
        work()
        finish(device)
        seconds.append(time.perf_counter() - start)
    extra = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    return Timing(median(seconds), min(seconds), max(seconds), len(seconds), extra)


def median_seconds(work: Callable[[], Any], device: str, *, n: int = 5, warm: int = 1) -> float:
    """The median of `n` runs after warming up, by the device's own clock where it has one; no memory is counted."""
    for _ in range(warm):
        work()
    if device != "cuda":
        return timed(work, device, n=n, warm=0).seconds
    times = []
    for _ in range(n):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times)


def interleaved(works: dict[str, Callable[[], Any]], device: str, *, rounds: int) -> dict[str, Timing]:
    """Each work once a round, so that a machine that is busy now and then is busy for all of them alike.

    On one thread of a CPU it is the processor's time that counts: what other programs take is not in it.
    """
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            finish(device)
            start = clock()
            work()
            finish(device)
            seconds[name].append(clock() - start)
    return {name: Timing(median(s), min(s), max(s), len(s), None) for name, s in seconds.items()}


def matmul_peak(device: str, dtype: torch.dtype) -> float:
    """Operations per second at the median, of the fastest of some large matrix products on random numbers."""
    sizes = (4096, 8192) if device == "cuda" else (1024, 2048)
    best = 0.0
    for n in sizes:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        best = max(best, 2 * n**3 / median_seconds(lambda a=a, b=b: a @ b, device, n=10, warm=3))
    return best


def copy_peak(device: str) -> float:
    """Bytes per second of a copy, read and written both counted."""
    a = torch.randn(2**28 if device == "cuda" else 2**24, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a), device, n=10, warm=3, most_seconds=5).fastest
