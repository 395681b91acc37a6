"""Which model a run was made with: its name, and a digest of its weights, since a name may come to mean other ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.lens import Lens
from tensorlens.studies.digests import digest_of

N_VALUES = 1024
"""Values of each tensor that enter the digest, evenly spread: training changes all of them, a copy none."""


def model_settings(lens: Lens) -> dict[str, Any]:
    """What a run's numbers depend on of the model: another model in the same folder is refused."""
    return {
        "model": lens.name,
        "model_class": type(lens.model).__name__,
        "dtype": str(next(lens.model.parameters()).dtype).removeprefix("torch."),
        "weights": weights_digest(lens.model),
        "rules": lens.rules.as_dict(),
    }


def weights_digest(model: nn.Module) -> str:
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
        return flat[:: -(-len(flat) // N_VALUES)].contiguous().cpu().view(torch.uint8).numpy().tobytes()
    except (RuntimeError, NotImplementedError, TypeError):  # a packed type that cannot be sliced: by name and shape
        return b""
