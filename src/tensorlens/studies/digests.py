"""Digests by which a run tells whether it is continued on what it began with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digest_of(parts: Iterable[str | bytes]) -> str:
    """Digest of a sequence; ``["ab"]`` and ``["a", "b"]`` differ."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()[:16]


def tensor_digest(value: Tensor) -> str:
    """Digest of shape, type and all values; the same on every device."""
    content = value.detach().cpu().contiguous().reshape(-1)
    return digest_of([f"{tuple(value.shape)} {value.dtype}", content.view(torch.uint8).numpy().tobytes()])
