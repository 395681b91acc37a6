"""What a run was made with: digests of data, inputs and weights, since a name may later refer to different ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.lens import Lens
from tensorlens.models.precision import matmul_precision

N_VALUES = 1024
"""Values of each weight that enter the digest, evenly spread: training changes all of them, a copy none."""


def digest_of(parts: Iterable[str | bytes]) -> str:
    """Digest of a sequence; ``["ab"]`` and ``["a", "b"]`` differ."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()[:16]


def tensor_digest(value: Tensor) -> str:
    """Digest of shape, type and all values; the same on every device."""
    return digest_of([f"{tuple(value.shape)} {value.dtype}", _bytes(value.detach().reshape(-1))])


def model_settings(lens: Lens) -> dict[str, Any]:
    """What a run's numbers depend on of the model: a different model in the same folder is refused."""
    return {
        "model": lens.name,
        "model_class": type(lens.model).__name__,
        "dtype": str(next(lens.model.parameters()).dtype).removeprefix("torch."),
        "weights": _weights_digest(lens.model),
        "rules": lens.rules.as_dict(),
        "matmul_precision": matmul_precision(),
    }


def _weights_digest(model: nn.Module) -> str:
    """Digest of names, shapes and some values of all weights; the same on every device."""
    return digest_of(
        f"{name} {tuple(value.shape)} {value.dtype}\0".encode() + _some_bytes(value)
        for name, value in sorted(model.state_dict().items())
        if isinstance(value, Tensor)
    )


def _some_bytes(value: Tensor) -> bytes:
    if value.is_meta or not value.numel():
        return b""
    try:
        flat = value.detach().reshape(-1)
        return _bytes(flat[:: -(-len(flat) // N_VALUES)])
    except (RuntimeError, NotImplementedError, TypeError):  # a packed type that cannot be sliced: by name and shape
        return b""


def _bytes(flat: Tensor) -> bytes:
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()
