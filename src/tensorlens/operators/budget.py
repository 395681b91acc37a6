"""What a computation may take: free memory, chunk sizes, precision, and going on after running out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar, get_args

import torch

from tensorlens.errors import InputError, SizeError

Precision = Literal["float32", "tf32", "bfloat16"]
"""How products are computed: ``"tf32"`` keeps float32 storage and is float32 itself where the device has no tf32."""

SHARE = 0.5
"""Part of the free memory that one computation may plan with."""

Result = TypeVar("Result")


def compute_type(precision: str | None, dtype: torch.dtype) -> torch.dtype:
    """Type of the matrices: as asked for, else the model's own, in float32 or better."""
    if precision is None:
        return torch.float32 if dtype.itemsize < 4 else dtype
    if precision not in get_args(Precision):
        raise InputError(f"`precision` must be one of {', '.join(get_args(Precision))}; got {precision!r}.")
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


@contextmanager
def matmul_mode(precision: str | None) -> Iterator[None]:
    """Products of float32 matrices in tf32, or strictly not, while this lasts."""
    settings = torch.backends.cuda.matmul
    if not torch.cuda.is_available() or precision is None:
        yield
        return
    before = settings.allow_tf32
    settings.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        settings.allow_tf32 = before


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device, what torch holds in reserve included."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def fitting(bytes_each: int, wanted: int, device: torch.device, share: float = SHARE) -> int:
    """How many of `wanted` things of `bytes_each` bytes go into the part of the free memory that may be used."""
    return max(1, min(wanted, int(share * free_bytes(device) / max(1, bytes_each))))


def until_it_fits(work: Callable[[int], Result], size: int) -> Result:
    """`work(size)`, with half the size again whenever memory runs out."""
    while True:
        try:
            return work(size)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                raise SizeError(
                    "Memory ran out with the smallest piece of work. Expected room for the cotangents of one channel "
                    "of one output; use a shorter input, `precision='bfloat16'`, or a device with more memory."
                ) from error
        # Outside the handler, whose traceback holds the tensors of the attempt.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size = (size + 1) // 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch failed for lack of memory; on the CPU it says so in words only."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
