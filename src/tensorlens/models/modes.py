"""Modes of a model and of torch, for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout; afterwards each module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


class _Tf32:
    """torch's setting is one for all threads, so it is kept who is inside, and what the first one found."""

    lock = threading.Lock()
    n_inside = 0
    found = "none"


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Products of float32 matrices in tf32 where the device has it, or strictly not.

    Whatever threads do at the same time, the last one to leave puts back what the first one found.
    """
    # By torch's newer setting alone: reading the older one fails where a user has used the newer.
    settings = torch.backends.cuda.matmul
    with _Tf32.lock:
        before = str(settings.fp32_precision)
        if _Tf32.n_inside == 0:
            _Tf32.found = before
        _Tf32.n_inside += 1
        settings.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        with _Tf32.lock:
            _Tf32.n_inside -= 1
            settings.fp32_precision = before if _Tf32.n_inside else _Tf32.found


def tf32_allowed() -> bool:
    """Whether products of float32 matrices may be in tf32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def matmul_precision() -> str:
    """What torch calls the way float32 matrices are multiplied; by its newer setting where a user has used that."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)
