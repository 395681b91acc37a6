r"""Norms and singular values of blocks $T_{ij}$, of the whole operator and of matrices, and statistics of them.

Nothing here stores the tensor. Exact Frobenius norms stream the rows of T a few outputs at a time and keep only sums of
squares. Sketches pull a few random cotangents instead of all D. Spectral norms take one slice at a time.

The largest value of an operator that is never stored comes from Lanczos steps, one product with T and one with Tᵀ each;
several values with their vectors come from subspace iteration, which also serves stacks of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import TokenMatrix
from tensorlens.errors import InputError, check_whole
from tensorlens.models.inputs import as_tensor
from tensorlens.models.runner import own_modes
from tensorlens.operators.operator import Pulled, TensorOperator, check_token
from tensorlens.program.steps import at_least_float32
from tensorlens.tolerances import MATRIX_NORM, SINGULAR_VALUE, in_float64
from tensorlens.views.printing import Printed

MOST_STEPS = 60
"""Lanczos steps at most."""

EXTRA = 8
"""Extra vectors beside the requested ones: the last values converge with the gap to the first value left out."""


@dataclass(frozen=True, kw_only=True)
class Spectrum(Printed):
    r"""The leading part of a singular value decomposition: $T ≈ \sum_k σ_k\, u_k v_k^\top$.

    Attributes:
        values: σ, largest first.
        out_vectors: u, one for each value: (k, out_channel) for a block, (k, out_token, out_channel) for an operator.
        in_vectors: v, likewise.
        total: $\lVert T \rVert_F^2$, exact for a block and estimated from the probes for a whole operator.
    """

    values: Float[Tensor, " k"]
    out_vectors: Tensor
    in_vectors: Tensor
    total: float

    def __str__(self) -> str:
        """One line: how many values, and the first of them."""
        first = ", ".join(f"{value:.4g}" for value in self.values[:5].tolist())
        return f"Spectrum({len(self.values)} singular values: {first}{', …' if len(self.values) > 5 else ''})"

    @property
    def share(self) -> Float[Tensor, " k"]:
        """The part of the squared Frobenius norm that each value carries."""
        return self.values.square() / self.total

    @property
    def entropy(self) -> float:
        """Entropy of the shares, in nats: its exponential counts the directions that matter."""
        share = self.values.square() / self.values.square().sum()
        return float(torch.special.entr(share).sum())


@own_modes
def spectrum(
    T: TensorOperator,
    out_token: int | None = None,
    in_token: int | None = None,
    *,
    k: int = 16,
    seed: int = 0,
    tolerance: float = SINGULAR_VALUE,
    most: int = 100,
) -> Spectrum:
    r"""Leading singular triplets of $T_{ij}$, or of the whole T if no token is named.

    Args:
        T: The operator.
        out_token: i; needs `in_token` too.
        in_token: j.
        k: How many triplets.
        seed: Random seed for the start.
        tolerance: Relative change of the values at which to stop.
        most: Maximum number of iterations.
    """
    _check(T, "spectrum", tolerance)
    k = min(check_whole(k, "k", 1), T.shape[0] * T.shape[1], T.n_tokens * T.n_channels)
    if (out_token is None) != (in_token is None):
        raise InputError("`spectrum` expected both `out_token` and `in_token`, or neither; got one of them.")
    if out_token is not None and in_token is not None:
        return _block_spectrum(T, out_token, in_token, k)
    n_out, d_out, n_in, d_in = T.shape
    values, outs, ins, total = _iterate(
        lambda x: T.apply(x.T.reshape(-1, n_in, d_in)).reshape(x.shape[1], -1).T,
        lambda u: T.adjoint(u.T.reshape(-1, n_out, d_out)).reshape(u.shape[1], -1).T,
        _random(n_in * d_in, min(n_in * d_in, k + EXTRA), seed).to(T.device, T.dtype),
        k,
        tolerance,
        most,
    )
    return Spectrum(
        values=values,
        out_vectors=outs.T.reshape(-1, n_out, d_out),
        in_vectors=ins.T.reshape(-1, n_in, d_in),
        total=total,
    )


def _check(T: TensorOperator, name: str, tolerance: float) -> None:
    if not isinstance(T, TensorOperator):
        raise InputError(f"`{name}` expected an attention tensor; got {type(T).__name__}. Call a lens on an input.")
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not 0 < tolerance < 1:
        raise InputError(f"`tolerance` must be a number above 0 and below 1; got {tolerance!r:.60}.")


def _block_spectrum(T: TensorOperator, out_token: int, in_token: int, k: int) -> Spectrum:
    """A block is D×D, and forming it takes D cotangents in any case; its decomposition is then exact."""
    block = at_least_float32(T.rows(out_token)[:, check_token(in_token, T.n_tokens, "in_token")])
    u, values, v = torch.linalg.svd(block, full_matrices=False)
    return Spectrum(values=values[:k], out_vectors=u.T[:k], in_vectors=v[:k], total=float(values.square().sum()))


def _random(n: int, width: int, seed: int) -> Tensor:
    """Random columns (n, width), drawn on the CPU so that a seed gives the same numbers everywhere."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def _iterate(
    push: Callable[[Tensor], Tensor],
    pull: Callable[[Tensor], Tensor],
    start: Tensor,
    k: int,
    tolerance: float,
    most: int,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Subspace iteration on TᵀT, read off by Rayleigh and Ritz: k values, left and right vectors, about ‖T‖².

    `push` is T on columns (…, n_in, width), `pull` Tᵀ on columns (…, n_out, width).
    """
    pushed = push(start)
    total = float(pushed.square().sum(-2).mean())
    values = torch.zeros((), dtype=pushed.dtype, device=pushed.device)
    for _ in range(most):
        basis = torch.linalg.qr(pull(torch.linalg.qr(pushed)[0]))[0]
        pushed = push(basis)
        u, found, v = torch.linalg.svd(pushed, full_matrices=False)
        if bool(((found[..., :k] - values).abs() <= tolerance * found[..., :1]).all()):
            break
        values = found[..., :k]
    return found[..., :k], u[..., :k], (basis @ v.mT)[..., :k], total  # type: ignore[possibly-unbound]


# The largest alone ----------------------------------------------------------------------------------------------------


def largest_singular_values(matrices: Float[Tensor, "batch rows columns"]) -> Float[Tensor, " batch"]:
    """The largest singular value of each matrix, by subspace iteration on a few vectors."""
    matrices = at_least_float32(matrices)
    if min(matrices.shape[1:]) <= 4 * EXTRA:
        return torch.linalg.svdvals(matrices)[:, 0]
    start = _random(matrices.shape[2], EXTRA, 0).to(matrices)
    values, *_ = _iterate(lambda x: matrices @ x, lambda u: matrices.mT @ u, start, 1, MATRIX_NORM, 200)
    return values[:, 0]


@own_modes
def spectral_norm(T: TensorOperator, *, tolerance: float = SINGULAR_VALUE, seed: int = 0) -> float:
    r"""$\lVert T \rVert_2$, the largest singular value of the whole operator, from products with T and Tᵀ alone.

    By Lanczos steps on $T^\top T$, two passes per step. Every Ritz value is at most the true one, so the estimate never
    exceeds the norm.

    Args:
        T: The operator.
        tolerance: Relative change at which to stop.
        seed: Random seed for the first vector.
    """
    _check(T, "spectral_norm", tolerance)
    v = torch.randn(T.shape[2:], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v = v.to(in_float64(torch.empty(0, device=T.device)).device)
    basis, diagonal, beside = [v / v.norm()], [], []
    value = 0.0
    while len(diagonal) < MOST_STEPS:
        w = in_float64(T.adjoint(T.apply(basis[-1].to(T.device, T.dtype))))
        diagonal.append(float((w * basis[-1]).sum()))
        # Orthogonal to all earlier vectors, twice: otherwise rounding lets the top value appear again and again.
        for _ in range(2):
            stacked = torch.stack(basis)
            w = w - torch.einsum("k,kld->ld", torch.einsum("kld,ld->k", stacked, w), stacked)
        before, value = value, _largest_ritz_value(diagonal, beside)
        length = float(w.norm())
        if abs(value - before) < tolerance * value or length <= 1e-12 * value or not value:
            break
        beside.append(length)
        basis.append(w / length)
    return value


def _largest_ritz_value(diagonal: list[float], beside: list[float]) -> float:
    middle, upper = (torch.tensor(values, dtype=torch.float64) for values in (diagonal, beside))
    matrix = torch.diag(middle) + torch.diag(upper, 1) + torch.diag(upper, -1)
    return float(torch.linalg.eigvalsh(matrix)[-1].clamp_min(0).sqrt())


# Norms of blocks ------------------------------------------------------------------------------------------------------


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


def sketched_norms(
    T: TensorOperator,
    out_tokens: Sequence[int],
    n_probes: int = 16,
    seed: int = 0,
    at: Float[Tensor, "in_token in_channel"] | None = None,
) -> Sketch:
    r"""$\lVert T_{ij} \rVert_F^2 = E\lVert g^\top T_{ij} \rVert^2$ for standard normal g, by the mean over probes.

    With an input x, $\lVert T_{ij} x_j \rVert^2 = E(g^\top T_{ij} x_j)^2$.

    Args:
        T: The operator.
        out_tokens: The outputs.
        n_probes: How many probes for each output; the error falls with its square root.
        seed: Random seed for the probes.
        at: The input x; None for the norms of the blocks themselves.
    """
    n_probes = check_whole(n_probes, "probes", 1)
    probes = probe_vectors(n_probes, T.shape[1], seed, T.device, T.dtype)
    squares = _squares(T, out_tokens, probes.expand(len(out_tokens), -1, -1), at)
    if n_probes == 1:
        return Sketch(squares[:, 0].sqrt(), torch.full_like(squares[:, 0], torch.nan))
    variance, mean = torch.var_mean(squares, 1)
    # The error of a root: d√s = ds / 2√s. A norm of zero is exact: all probes gave zero.
    return Sketch(mean.sqrt(), (variance / (4 * n_probes * mean)).sqrt().nan_to_num(0))


@lru_cache(maxsize=8)
def probe_vectors(n: int, n_channels: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Probes drawn on the CPU, so that a seed gives the same everywhere; cached, since a copy waits for the device."""
    return torch.randn(n, n_channels, generator=torch.Generator().manual_seed(int(seed))).to(device, dtype)


def _squares(
    T: TensorOperator,
    out_tokens: Sequence[int],
    starts: Float[Tensor, "output cotangent out_channel"],
    at: Tensor | None = None,
) -> Float[Tensor, "output cotangent in_token"]:
    """Squares of every pulled cotangent at every token, or of its products with x, in float32 or better."""
    dtype = torch.float32 if T.dtype.itemsize < 4 else T.dtype
    squares: Tensor | None = None
    for piece in T.pull_outputs(out_tokens, starts):
        if piece.is_all(len(out_tokens), starts.shape[1], T.n_tokens):
            return _piece_squares(piece, dtype, at)
        if squares is None:
            squares = torch.zeros(len(out_tokens), starts.shape[1], T.n_tokens, dtype=dtype, device=T.device)
        squares[slice(*piece.outputs), slice(*piece.cotangents), slice(*piece.tokens)] = _piece_squares(
            piece, dtype, at
        )
    assert squares is not None, "there is at least one output"
    return squares


def _piece_squares(piece: Pulled, dtype: torch.dtype, at: Tensor | None) -> Tensor:
    # (token, output · cotangent) to (output, cotangent, token)
    if at is None:
        by_row = torch.linalg.vector_norm(piece.rows, dim=-1, dtype=dtype).square()
    else:
        by_row = (piece.rows.to(dtype) * at[slice(*piece.tokens), None].to(dtype)).sum(-1).square()
    return by_row.T.unflatten(0, (piece.outputs.size, piece.cotangents.size))


def spectral_norms(T: TensorOperator, out_tokens: Sequence[int]) -> TokenMatrix:
    r"""$\lVert T_{ij} \rVert_2$ for the given outputs and all inputs, one dense slice at a time."""
    return torch.stack([largest_singular_values(T.rows(i).transpose(0, 1)) for i in out_tokens])


# What a set of singular values says ----------------------------------------------------------------------------------


def singular_values(matrix: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch value"]:
    """Singular values in float64, from the smaller Gram matrix: exact to 1e-8 of the largest, and fast."""
    wide = in_float64(matrix)
    gram = wide @ wide.mT if wide.shape[-2] <= wide.shape[-1] else wide.mT @ wide
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(-1)


def stable_rank(values: Float[Tensor, "*batch value"]) -> Float[Tensor, "*batch"]:
    r"""$\Vert T\Vert_F^2 / \Vert T\Vert_2^2$: how many directions of the largest size weigh as much; 0 for zero."""
    total, top = values.square().sum(-1), values.amax(-1).square()
    return torch.where(top > 0, total / top.clamp_min(torch.finfo(values.dtype).tiny), torch.zeros_like(top))


def effective_rank(values: Float[Tensor, "*batch value"]) -> Float[Tensor, "*batch"]:
    r"""$\exp H(p)$, $p = \sigma / \sum\sigma$ (Roy and Vetterli 2007): the entropy of the spectrum as a count."""
    return perplexity(values)


def perplexity(weights: Float[Tensor, "*batch item"]) -> Float[Tensor, "*batch"]:
    """The exponential of the entropy of non-negative weights: how many items share them; 0 if all are zero."""
    total = weights.sum(-1, keepdim=True)
    shares = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), torch.zeros_like(entropy))


def hoyer_sparsity(weights: Float[Tensor, "*batch item"]) -> Float[Tensor, "*batch"]:
    r"""$(\sqrt n - \Vert w\Vert_1/\Vert w\Vert_2)/(\sqrt n - 1)$ (Hoyer 2004): 0 for equal sizes, 1 for only one."""
    n = weights.shape[-1]
    if n == 1:
        return torch.ones_like(weights[..., 0])
    ratio = weights.abs().sum(-1) / weights.norm(dim=-1).clamp_min(torch.finfo(weights.dtype).tiny)
    return (n**0.5 - ratio) / (n**0.5 - 1)


# Subspaces ------------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """The contributions through a subspace and outside it, each (out_token, out_channel)."""

    through: Tensor
    beside: Tensor


def projector(basis: Tensor, x: Tensor) -> Tensor:
    """The orthogonal projector (channel, channel) on what some directions span, in the type of x (…, channel)."""
    width = x.shape[-1]
    basis = as_tensor(basis, "basis")
    rows = torch.atleast_2d(basis).to(device=x.device, dtype=torch.float64)
    rows = rows if rows.shape[-1] == width else rows.mT
    if rows.dim() != 2 or rows.shape[-1] != width or not len(rows) or not bool(rows.isfinite().all()):
        raise InputError(
            f"`basis` must be finite directions of {width} channels, (direction, channel); got shape "
            f"{tuple(basis.shape)}."
        )
    _, sizes, vectors = torch.linalg.svd(rows, full_matrices=False)
    vectors = vectors[sizes > sizes.max() * torch.finfo(torch.float64).eps * max(rows.shape)]
    return (vectors.mT @ vectors).to(x)
