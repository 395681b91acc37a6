"""Singular values: the norm of an operator that is never stored, and what a set of singular values says.

The measured norm is what the bounds in `bounds.py` and `product_bound.py` are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.models.precision import in_float64
from tensorlens.operators.base import TensorOperator
from tensorlens.tolerances import SINGULAR_VALUE


@dataclass(frozen=True, kw_only=True)
class MeasuredNorm:
    r"""An estimate of $\Vert T\Vert_2$ from below.

    Attributes:
        value: The largest singular value found.
        change: Its relative change in the last step: how far it may still be off, roughly.
        n_steps: Applications of T and of its adjoint.
    """

    value: float
    change: float
    n_steps: int


def operator_norm(
    operator: TensorOperator, *, max_steps: int = 60, tolerance: float = SINGULAR_VALUE, seed: int = 0
) -> MeasuredNorm:
    r"""$\Vert T\Vert_2$ by Lanczos steps on $T^\top T$, two passes a step, nothing of size L·D·L·D.

    Every Ritz value is at most the true one, so that the estimate never exceeds the norm.

    Args:
        operator: T.
        max_steps: Steps at most.
        tolerance: Relative change at which to stop.
        seed: Of the first vector.
    """
    if max_steps < 1:
        raise InputError(f"`max_steps` must be at least 1; got {max_steps}.")
    generator = torch.Generator().manual_seed(seed)
    shape = operator.shape[2:]
    v = torch.randn(shape, generator=generator, dtype=torch.float64)
    v = v.to(in_float64(torch.empty(0, device=operator.device)).device)
    basis, diagonal, beside = [v / v.norm()], [], []
    value, change = 0.0, float("inf")
    while len(diagonal) < max_steps:
        w = in_float64(operator.adjoint(operator.apply(basis[-1].to(operator.device, operator.dtype))))
        diagonal.append(float((w * basis[-1]).sum()))
        # Against all earlier vectors, twice: rounding would let the top value appear again and again.
        for _ in range(2):
            stacked = torch.stack(basis)
            w = w - torch.einsum("k,kld->ld", torch.einsum("kld,ld->k", stacked, w), stacked)
        top = _largest_ritz_value(diagonal, beside)
        value, change = top, abs(top - value) / top if top else 0.0
        length = float(w.norm())
        if change < tolerance or length <= 1e-12 * top or not top:
            break
        beside.append(length)
        basis.append(w / length)
    return MeasuredNorm(value=value, change=change, n_steps=len(diagonal))


def _largest_ritz_value(diagonal: list[float], beside: list[float]) -> float:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, length in enumerate(beside):
        matrix[i, i + 1] = matrix[i + 1, i] = length
    return float(torch.linalg.eigvalsh(matrix)[-1].clamp_min(0).sqrt())


def singular_values(matrix: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch value"]:
    """Singular values in float64, by the smaller Gram matrix: exact to 1e-8 of the largest, and fast."""
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
