"""Subspaces of a state: the projector on some directions, and what a split along it gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tensorlens.errors import InputError


class Split(NamedTuple):
    """What came through a subspace and what did not, each (out_token, out_channel)."""

    through: Tensor
    beside: Tensor


def projector(basis: Tensor, x: Tensor) -> Tensor:
    """The orthogonal projector (channel, channel) on what some directions span, in the type of x (…, channel)."""
    width = x.shape[-1]
    rows = torch.atleast_2d(torch.as_tensor(basis)).to(device=x.device, dtype=torch.float64)
    rows = rows if rows.shape[-1] == width else rows.mT
    if rows.dim() != 2 or rows.shape[-1] != width or not bool(rows.isfinite().all()):
        raise InputError(
            f"`basis` must be finite directions of {width} channels, (direction, channel); got shape "
            f"{tuple(torch.as_tensor(basis).shape)}."
        )
    _, sizes, vectors = torch.linalg.svd(rows, full_matrices=False)
    vectors = vectors[sizes > sizes.max() * torch.finfo(torch.float64).eps * max(rows.shape)]
    return (vectors.mT @ vectors).to(x)
