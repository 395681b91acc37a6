"""How matrices are multiplied: tf32 or not, and in which type."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from tensorlens.errors import check_choice
from tensorlens.tolerances import TINY

Precision = Literal["float32", "tf32", "bfloat16"]
"""Precisions of products: ``"tf32"`` keeps float32 storage, and is plain float32 on a device without tf32."""


def in_float64(x: Tensor) -> Tensor:
    """Cast to float64, for sums that must not be rounded; on the CPU if the device does not have that type."""
    return x.double() if x.dtype is torch.float64 or _knows_float64(x.device) else x.cpu().double()


def relative(difference: Tensor, scale: Tensor) -> float:
    """The norm of a difference, relative to that of what it is taken from."""
    return float(in_float64(difference).norm() / in_float64(scale).norm().clamp_min(TINY))


@cache
def _knows_float64(device: torch.device) -> bool:
    """Whether a device has float64: Apple's GPUs do not, nor do some of Intel's."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def compute_type(precision: str | None, dtype: torch.dtype) -> torch.dtype:
    """Type of the matrices: the requested one, otherwise the model's own, in float32 or better."""
    if precision is None:
        return torch.float32 if dtype.itemsize < 4 else dtype
    check_choice(precision, "precision", get_args(Precision))
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def matmul_mode(precision: str | None) -> AbstractContextManager[None]:
    """A context in which products of float32 matrices use tf32, or strictly not; for None, the user's setting."""
    return nullcontext() if precision is None else tf32(precision == "tf32")


turn = threading.RLock()
"""Threads take turns with what belongs to the process or to a model: a setting of torch, modes, forwards of modules."""


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Products of float32 matrices in tf32 where the device has it, or strictly not."""
    # By torch's newer setting alone: reading the older one fails where a user has used the newer.
    settings = torch.backends.cuda.matmul
    with turn:
        before = str(settings.fp32_precision)
        settings.fp32_precision = "tf32" if allowed else "ieee"
        try:
            yield
        finally:
            settings.fp32_precision = before


def tf32_allowed() -> bool:
    """Whether products of float32 matrices may be in tf32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def matmul_precision() -> str:
    """Torch's setting for products of float32 matrices; the newer one if a user has used that."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)
