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
    found = False


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Products of float32 matrices in tf32 where the device has it, or strictly not.

    Whatever threads do at the same time, the last one to leave puts back what the first one found.
    """
    settings = torch.backends.cuda.matmul
    with _Tf32.lock:
        before = bool(settings.allow_tf32)
        if _Tf32.n_inside == 0:
            _Tf32.found = before
        _Tf32.n_inside += 1
        settings.allow_tf32 = allowed
    try:
        yield
    finally:
        with _Tf32.lock:
            _Tf32.n_inside -= 1
            settings.allow_tf32 = before if _Tf32.n_inside else _Tf32.found
