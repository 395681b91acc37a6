r"""Norms of the D×D blocks $T_{ij}$, exact and sketched. No tensor is stored.

Exact Frobenius norms stream the rows of T a few outputs at a time and keep only sums of squares. Sketches pull a few
random cotangents instead of all D. Spectral norms take one slice at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import TokenMatrix
from tensorlens.errors import check_whole
from tensorlens.operators.operator import Pulled, TensorOperator
from tensorlens.operators.spectrum import largest_singular_values


class Sketch(NamedTuple):
    """Norms from random probes.

    Attributes:
        norms: The estimates.
        standard_error: The standard error of each, from the spread of the probes.
    """

    norms: TokenMatrix
    standard_error: TokenMatrix


def frobenius_norms(T: TensorOperator, out_tokens: Sequence[int]) -> TokenMatrix:
    r"""$\lVert T_{ij} \rVert_F$ for the given outputs and all inputs, exact."""
    units = torch.eye(T.shape[1], dtype=T.dtype, device=T.device).expand(len(out_tokens), -1, -1)
    return _squares(T, out_tokens, units).sum(1).sqrt()


def sketched_norms(T: TensorOperator, out_tokens: Sequence[int], n_probes: int = 16, seed: int = 0) -> Sketch:
    r"""$\lVert T_{ij} \rVert_F^2 = E\lVert g^\top T_{ij} \rVert^2$ for standard normal g, by the mean over probes.

    Args:
        T: The operator.
        out_tokens: The outputs.
        n_probes: How many probes for each output; the error falls with its square root.
        seed: Random seed for the probes.
    """
    n_probes = check_whole(n_probes, "probes", 1)
    probes = probe_vectors(n_probes, T.shape[1], seed, T.device, T.dtype)
    squares = _squares(T, out_tokens, probes.expand(len(out_tokens), -1, -1))
    if n_probes == 1:
        return Sketch(squares[:, 0].sqrt(), torch.full_like(squares[:, 0], torch.nan))
    variance, mean = torch.var_mean(squares, 1)
    # The error of a root: d√s = ds / 2√s. A norm of zero is exact: no probe found anything.
    return Sketch(mean.sqrt(), (variance / (4 * n_probes * mean)).sqrt().nan_to_num(0))


@lru_cache(maxsize=8)
def probe_vectors(n: int, n_channels: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Drawn on the CPU, so a seed means the same everywhere; kept, since the copy would wait for the device."""
    return torch.randn(n, n_channels, generator=torch.Generator().manual_seed(int(seed))).to(device, dtype)


def _squares(
    T: TensorOperator, out_tokens: Sequence[int], starts: Float[Tensor, "output cotangent out_channel"]
) -> Float[Tensor, "output cotangent in_token"]:
    """Sums of squares over input channels of every cotangent, in float32 or better."""
    dtype = torch.float32 if T.dtype.itemsize < 4 else T.dtype
    squares: Tensor | None = None
    for piece in T.pull_outputs(out_tokens, starts):
        if piece.is_all(len(out_tokens), starts.shape[1], T.n_tokens):
            return _piece_squares(piece, dtype)
        if squares is None:
            squares = torch.zeros(len(out_tokens), starts.shape[1], T.n_tokens, dtype=dtype, device=T.device)
        squares[slice(*piece.outputs), slice(*piece.cotangents), slice(*piece.tokens)] = _piece_squares(piece, dtype)
    assert squares is not None, "there is at least one output"
    return squares


def _piece_squares(piece: Pulled, dtype: torch.dtype) -> Tensor:
    # (token, output · cotangent) to (output, cotangent, token)
    by_row = torch.linalg.vector_norm(piece.rows, dim=-1, dtype=dtype).square()
    return by_row.T.unflatten(0, (piece.outputs.size, piece.cotangents.size))


def spectral_norms(T: TensorOperator, out_tokens: Sequence[int]) -> TokenMatrix:
    r"""$\lVert T_{ij} \rVert_2$ for the given outputs and all inputs, one dense slice at a time."""
    return torch.stack([largest_singular_values(T.rows(i).transpose(0, 1)) for i in out_tokens])
