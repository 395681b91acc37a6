"""Laws that any attention tensor must obey, each a number: the relative error.

Written against the public contract alone, so that they hold for any operator that claims it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tensorlens as tl

TOLERANCE = 1e-10
TOLERANCE_FLOAT32_INSIDE = 1e-6


def relative(difference: Tensor, scale: Tensor) -> float:
    return float(difference.norm() / scale.norm())


def states(T: tl.AttentionTensor, n: int, scale: float = 10.0, seed: int = 1) -> Tensor:
    """States far from the input: another direction, and `scale` times its size."""
    generator = torch.Generator().manual_seed(seed)
    size = scale * T.input.square().mean().sqrt()
    return size * torch.randn(n, T.n_tokens, T.n_channels, generator=generator, dtype=T.dtype)


def value(T: tl.AttentionTensor, expected: Tensor) -> float:
    """T·X + B is what the model gives."""
    return relative(T.apply(T.input) + T.bias - expected, expected)


def linearity(T: tl.AttentionTensor) -> float:
    """T(aU + bV) = a·T(U) + b·T(V), far from X."""
    u, v = states(T, 2)
    both = T.apply(2.5 * u - 0.5 * v)
    return relative(both - 2.5 * T.apply(u) + 0.5 * T.apply(v), both)


def adjoint(T: tl.AttentionTensor) -> float:
    """⟨u, T·v⟩ = ⟨Tᵀu, v⟩ for several u at once."""
    v = states(T, 1)[0]
    u = torch.randn(3, *T.shape[:2], generator=torch.Generator().manual_seed(2), dtype=T.dtype)
    y = T.apply(v)
    return relative((u * y).sum((1, 2)) - (T.adjoint(u) * v).sum((1, 2)), u.norm(dim=(1, 2)) * y.norm())


def composition(T: tl.AttentionTensor) -> float:
    """Blocks one after the other, bias and all, are the whole."""
    x = states(T, 1)[0]
    whole = T.apply(x) + T.bias
    for n in range(T.n_blocks):
        part = T.blocks(n, n + 1)
        x = part.apply(x) + part.bias
    return relative(x - whole, whole)


def homogeneity(T: tl.AttentionTensor, model: nn.Module) -> float:
    """F(X) = ∂F̃/∂X·X + Σ_b ∂F̃/∂b·b: every bias is found by its own gradient, none by subtraction."""
    biases = {name: p for name, p in model.named_parameters() if is_bias(name, p)}
    replay, span = T.operator.replay, T.operator.span
    u = torch.randn(3, *T.output.shape, dtype=T.dtype, generator=torch.Generator().manual_seed(3))
    errors = []
    with replay.graph(span) as (x, y, _):
        for probe in u:
            gradients = torch.autograd.grad(y[0], [x, *biases.values()], probe, retain_graph=True, allow_unused=True)
            of_biases = zip(gradients[1:], biases.values(), strict=True)
            total = (gradients[0][0] * T.input).sum()
            total = total + sum((g * b.detach()).sum() for g, b in of_biases if g is not None)
            errors.append((probe * T.output).sum() - total)
    return float(torch.stack(errors).square().mean().sqrt() / T.output.norm())


def is_bias(name: str, parameter: Tensor) -> bool:
    return name.endswith("bias") and parameter.dim() == 1


def bias_by_gradient(T: tl.AttentionTensor, model: nn.Module, probe: Tensor) -> Tensor:
    """⟨probe, B⟩ from the gradients of the biases alone."""
    biases = [p for name, p in model.named_parameters() if is_bias(name, p)]
    with T.operator.replay.graph(T.operator.span) as (_, y, _):
        gradients = torch.autograd.grad(y[0], biases, probe, allow_unused=True) if biases else []
    pairs = zip(gradients, biases, strict=True)
    return sum(((g * b.detach()).sum() for g, b in pairs if g is not None), torch.zeros((), dtype=T.dtype))


def above_diagonal(tensor: Tensor) -> float:
    """The largest entry of T[i, :, j, :] with j > i."""
    n = tensor.shape[0]
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    return float(tensor.permute(0, 2, 1, 3)[later].abs().max())
