r"""Norms of the D×D blocks $T_{ij}$, exact and sketched, and the spectral norm of an operator. No tensor is stored.

Exact Frobenius norms stream the rows of T a few outputs at a time and keep only sums of squares. Sketches pull a few
random cotangents instead of all D. Spectral norms come from iterating on products with T and its transpose.
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
from tensorlens.models.modes import own_modes
from tensorlens.operators.base import Pulled, TensorOperator
from tensorlens.tolerances import MATRIX_NORM, SINGULAR_VALUE


class Sketch(NamedTuple):
    """Norms from random probes.

    Attributes:
        norms: The estimates.
        standard_error: Of each estimate, from the spread of the probes.
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
        n_probes: How many probes for each output; the error goes down with the root.
        seed: Of the probes.
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
    """Drawn on the CPU, so that a seed means the same everywhere; kept, since the copy would wait for the device."""
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


# Spectral ------------------------------------------------------------------------------------------------------------


def spectral_norms(T: TensorOperator, out_tokens: Sequence[int]) -> TokenMatrix:
    r"""$\lVert T_{ij} \rVert_2$ for the given outputs and all inputs, one dense slice at a time."""
    return torch.stack([largest_singular_values(T.rows(i).transpose(0, 1)) for i in out_tokens])


def largest_singular_values(
    matrices: Float[Tensor, "batch rows columns"], *, width: int = 8, tolerance: float = MATRIX_NORM, most: int = 200
) -> Float[Tensor, " batch"]:
    """The largest singular value of each matrix, by subspace iteration on a few vectors.

    Args:
        matrices: The matrices.
        width: Vectors carried; more converge faster where the largest values lie close together.
        tolerance: Relative change at which to stop.
        most: Iterations at which to stop all the same.
    """
    matrices = matrices.float() if matrices.dtype.itemsize < 4 else matrices
    if min(matrices.shape[1:]) <= 4 * width:
        return torch.linalg.svdvals(matrices)[:, 0]
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(matrices.shape[2], width, generator=generator).to(matrices)
    pushed = matrices @ vectors
    before = torch.zeros(len(matrices), dtype=matrices.dtype, device=matrices.device)
    for _ in range(most):
        basis = torch.linalg.qr(matrices.mT @ torch.linalg.qr(pushed)[0])[0]
        pushed = matrices @ basis
        found = torch.linalg.svdvals(pushed)[:, 0]
        if bool(((found - before) <= tolerance * found).all()):
            return found
        before = found
    return before


@own_modes
def spectral_norm(T: TensorOperator, *, tolerance: float = SINGULAR_VALUE, seed: int = 0) -> float:
    r"""$\lVert T \rVert_2$, the largest singular value of the whole operator, from products with T and Tᵀ alone."""
    from tensorlens.operators.spectrum import spectrum

    return float(spectrum(T, k=1, tolerance=tolerance, seed=seed).values[0])
