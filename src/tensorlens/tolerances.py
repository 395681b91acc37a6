"""The one table of tolerances: which error is accepted where, and why, and how it is measured.

All are relative unless stated otherwise.

| question | entry |
|---|---|
| the laws of a certificate, a block recorded again | `CERTIFICATE`, by type of numbers |
| a law of a float64 model that casts to float32 itself | `CAST_TO_FLOAT32` |
| what a recording may have lost of a block | `CAPTURE` |
| a block that passes nothing on | `NOTHING` |
| a model that magnifies rounding | `MAGNIFIED_ROUNDING` |
| one sample alone and in a batch, one input twice | `repeated` |
| a map that is mostly rounding | `MAP_NOISE` |
| iterations towards singular values and norms | `SINGULAR_VALUE`, `MATRIX_NORM` |
| log-probabilities of a server | `SERVED_ON_AVERAGE`, `SERVED_AT_WORST` |
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CERTIFICATE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Two ways to compute one result may differ by this much: in a deep model about 10³ rounding errors add up."""

CAST_TO_FLOAT32 = 2e-6
"""For a float64 model whose own code casts its state to float32 once; n casts give √n times as much."""

CAPTURE = 2e-2
"""A lost path smaller than this share of its block cannot be distinguished from the error of finite differences."""

NOTHING = 1e-6
"""If a random state contributes less than this share of the output, the block or operator passes nothing on."""

MAGNIFIED_ROUNDING = 1e4
"""If one rounding of X⁰ becomes more than this many roundings, the model magnifies rounding."""

MAP_NOISE = 1e-2
"""A map warns if rounding may be this share of it."""

SINGULAR_VALUE = 1e-4
"""Iterations on the operator stop at this change: each costs a push and a pull, and four digits are read."""

MATRIX_NORM = 1e-6
"""Iterations on matrices in memory stop at this change: they are cheap."""

SERVED_ON_AVERAGE, SERVED_AT_WORST = 0.05, 0.5
"""Absolute differences of log-probabilities: a server's bfloat16 gives about 0.01, now and then 0.2."""

TINY = 1e-300
"""Not a tolerance: keeps norms that are divisors from being zero."""


def repeated(dtype: torch.dtype, *, in_tf32: bool = False) -> float:
    """How far two results of one model may differ: a second pass, or the same sample in a batch.

    Kernels sum in a different order for each size: more than one rounding (eps), much less than a fault. Never below
    1e-6, since code may cast its norms to float32 for any type of states; products in tf32 have float16's digits.
    """
    accepted = max(1e-6, 100 * torch.finfo(dtype).eps ** 0.75)
    return max(accepted, CERTIFICATE[torch.float16]) if in_tf32 else min(0.1, accepted)


# How an error is measured ---------------------------------------------------------------------------------------------


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
