"""Modes of a model and of torch, for a while."""

from __future__ import annotations

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


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Products of float32 matrices in tf32 where the device has it, or strictly not."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    settings.allow_tf32 = allowed
    try:
        yield
    finally:
        settings.allow_tf32 = before
