"""Leading singular values and vectors, of a block T_ij or of the whole operator, by randomised subspace iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import InputError, check_whole
from tensorlens.models.modes import own_modes
from tensorlens.operators.base import TensorOperator, check_token
from tensorlens.tolerances import SINGULAR_VALUE


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    r"""The leading part of a singular value decomposition: $T ≈ \sum_k σ_k\, u_k v_k^\top$.

    Attributes:
        values: σ, largest first.
        out_vectors: u, one for each value: (k, out_channel) for a block, (k, out_token, out_channel) for an operator.
        in_vectors: v, likewise.
        total: $\\lVert T \\rVert_F^2$, exact for a block and estimated from the probes for a whole operator.
    """

    values: Float[Tensor, " k"]
    out_vectors: Tensor
    in_vectors: Tensor
    total: float

    @property
    def share(self) -> Float[Tensor, " k"]:
        """The part of the squared Frobenius norm that each value carries."""
        return self.values.square() / self.total

    @property
    def entropy(self) -> float:
        """Entropy of the shares found, in nats: its exponential counts the directions that matter."""
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
        seed: Of the random start.
        tolerance: Relative change of the values at which to stop.
        most: Iterations at which to stop all the same.
    """
    if not isinstance(T, TensorOperator):
        raise InputError(f"`spectrum` expected an attention tensor; got {type(T).__name__}. Call a lens on an input.")
    k = min(check_whole(k, "k", 1), T.shape[0] * T.shape[1], T.n_tokens * T.n_channels)
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not 0 < tolerance < 1:
        raise InputError(f"`tolerance` must be a number above 0 and below 1; got {tolerance!r:.60}.")
    if (out_token is None) != (in_token is None):
        raise InputError("`spectrum` expected both `out_token` and `in_token`, or neither; got one of them.")
    if out_token is not None and in_token is not None:
        return _block_spectrum(T, out_token, in_token, k)
    n_out, d_out, n_in, d_in = T.shape
    found = _iterate(
        lambda x: T.apply(x.T.reshape(-1, n_in, d_in)).reshape(x.shape[1], -1).T,
        lambda u: T.adjoint(u.T.reshape(-1, n_out, d_out)).reshape(u.shape[1], -1).T,
        _start(T, n_in * d_in, k, seed),
        k,
        tolerance,
        most,
    )
    values, outs, ins, total = found
    return Spectrum(
        values=values,
        out_vectors=outs.T.reshape(-1, n_out, d_out),
        in_vectors=ins.T.reshape(-1, n_in, d_in),
        total=total,
    )


def _block_spectrum(T: TensorOperator, out_token: int, in_token: int, k: int) -> Spectrum:
    """A block is D×D, and forming it takes D cotangents whatever is wanted of it; its decomposition is then exact."""
    block = T.rows(out_token)[:, check_token(in_token, T.n_tokens, "in_token")]
    block = block.float() if block.dtype.itemsize < 4 else block
    u, values, v = torch.linalg.svd(block, full_matrices=False)
    return Spectrum(values=values[:k], out_vectors=u.T[:k], in_vectors=v[:k], total=float(values.square().sum()))


def _start(T: TensorOperator, n: int, k: int, seed: int) -> Tensor:
    # A few vectors more than asked for: the last of the values converge with the gap to what was left out.
    width = min(n, k + 8)
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).to(T.device, T.dtype)


def _iterate(
    push: Callable[[Tensor], Tensor],
    pull: Callable[[Tensor], Tensor],
    start: Tensor,
    k: int,
    tolerance: float,
    most: int,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Subspace iteration on TᵀT, read off by Rayleigh and Ritz."""
    pushed = push(start)
    total = float(pushed.square().sum(0).mean())
    values = pushed.new_zeros(k)
    for _ in range(most):
        basis = torch.linalg.qr(pull(torch.linalg.qr(pushed)[0]))[0]
        pushed = push(basis)
        u, found, v = torch.linalg.svd(pushed, full_matrices=False)
        if bool(((found[:k] - values).abs() <= tolerance * found[0]).all()):
            break
        values = found[:k]
    return found[:k], u[:, :k], (basis @ v.T)[:, :k], total  # type: ignore[possibly-unbound]
