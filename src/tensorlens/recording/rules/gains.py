r"""Activation gains $\varphi(z)/z$ in closed form (Eq. 13).

No division by z: the forms below are finite everywhere and give the limit $\varphi'(0)$ at zero, so
a zero pre-activation is neither NaN nor wrong. Activations with $\varphi(0) \ne 0$ (sigmoid,
softplus, exp) have no finite ratio; `activations.activate_from` is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tensorlens.program.nodes import words
from tensorlens.recording.calculus import slope_of


def gelu(z: Tensor, approximate: str = "none") -> Tensor:
    r"""$\Phi(z)$, or its tanh approximation."""
    if approximate == "tanh":
        return gelu_tanh(z)
    return torch.erfc(z * -math.sqrt(0.5)).mul_(0.5)  # not 1 + erf, which loses the digits of a small gain


def gelu_tanh(z: Tensor) -> Tensor:
    r"""$\tfrac12\bigl(1 + \tanh(\sqrt{2/\pi}\,(z + 0.044715 z^3))\bigr)$."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def gelu_quick(z: Tensor) -> Tensor:
    r"""$\sigma(1.702 z)$."""
    return torch.sigmoid(1.702 * z)


def silu(z: Tensor, inplace: bool = False) -> Tensor:
    r"""$\sigma(z)$."""
    return torch.sigmoid(z)


def relu(z: Tensor, inplace: bool = False) -> Tensor:
    r"""$\mathbb{1}[z > 0]$."""
    return (z > 0).to(z.dtype)


def leaky_relu(z: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """1 for positive z, the slope elsewhere."""
    return torch.where(z > 0, torch.ones_like(z), negative_slope)  # of two numbers it would be float32


def mish(z: Tensor, inplace: bool = False) -> Tensor:
    r"""$\tanh(\mathrm{softplus}(z))$."""
    return torch.tanh(torch.nn.functional.softplus(z))


def hardswish(z: Tensor, inplace: bool = False) -> Tensor:
    r"""$\mathrm{clip}(z + 3, 0, 6)/6$."""
    return (z + 3).clamp(0, 6) / 6


def quotient(activation: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    r"""$\varphi(z)/z$ for an activation without a closed form here, $\varphi'(0)$ where z vanishes.

    Never adds ε to the denominator, which would be infinite at z = -ε and wrong by half at zero.
    """
    tiny = 4 * torch.finfo(z.dtype).tiny
    vanishing = z.abs() < tiny
    ratio = activation(z) / torch.where(vanishing, torch.ones_like(z), z)
    if z.is_cuda or vanishing.any():  # reading from a GPU waits for it
        ratio = torch.where(vanishing, _slope_at_zero(activation, z), ratio)
    return ratio


def _slope_at_zero(activation: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    return slope_of(activation, torch.zeros_like(z))


CLOSED_FORMS: dict[str, Callable[..., Tensor]] = {
    "gelu": gelu,
    "silu": silu,
    "relu": relu,
    "leaky_relu": leaky_relu,
    "mish": mish,
    "hardswish": hardswish,
}
"""Gains by the name of the torch function."""

ZERO_AT_ZERO = words(
    "tanh erf elu selu celu hardtanh relu6 softsign tanhshrink hardshrink softshrink threshold _threshold prelu rrelu "
    "atan asinh sinh sin expm1 log1p round trunc floor ceil tan asin atanh erfinv fake_quantize_per_tensor_affine "
    "fake_quantize_per_channel_affine"
)
"""Torch functions with φ(0) = 0 whose gain is taken by `quotient`."""

STEPS = words("round trunc floor ceil hardtanh relu6")
"""Those whose exact value matters to comparisons (`x.round() == 1`): z times its gain may miss it by a rounding."""

NONZERO_AT_ZERO = words(
    "sigmoid hardsigmoid logsigmoid log_sigmoid softplus exp exp2 cos cosh acos erfc ndtr log_ndtr sinc"
)
"""Torch functions with φ(0) ≠ 0, which `activations.activate_from` takes; in products they gate."""
