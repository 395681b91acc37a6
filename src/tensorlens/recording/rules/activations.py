"""Activations (Eq. 13): φ(z) as φ(0) + gain ⊙ z with the gain held, or by its derivative.

Where φ(0) = 0 the gain is φ(z)/z, and the result may be the gate of a gated feed-forward. Where φ(0) ≠ 0 (sigmoid,
softplus, exp) the gain is (φ(z) - φ(0))/z and φ(0) is part of B; the result is a factor: in a product with another live
tensor it is the gate, and is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorlens.program.nodes import at_least_float32, words
from tensorlens.recording.calculus import Elementwise, scaled, slope_of, tangent
from tensorlens.recording.live import Live, is_live, now, raw, value_of
from tensorlens.recording.roles import Role, is_factor, of_factors
from tensorlens.recording.table import family, rule
from tensorlens.recording.tape import Tape

# Gains φ(z)/z in closed form (Eq. 13). No division by z: they are finite everywhere and give the limit φ'(0) at zero.
# Activations with φ(0) ≠ 0 have no finite ratio; `activate_from` handles them.


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


def quotient(activation: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    r"""$\varphi(z)/z$ for an activation without a closed form here, $\varphi'(0)$ where z vanishes.

    Never adds ε to the denominator, which would be infinite at z = -ε and wrong by half at zero.
    """
    tiny = 4 * torch.finfo(z.dtype).tiny
    vanishing = z.abs() < tiny
    ratio = activation(z) / torch.where(vanishing, torch.ones_like(z), z)
    if z.is_cuda or vanishing.any():  # reading from a GPU waits for it
        ratio = torch.where(vanishing, slope_of(activation, torch.zeros_like(z)), ratio)
    return ratio


CLOSED_FORMS: dict[str, Callable[..., Tensor]] = {
    "gelu": gelu,
    "silu": silu,
    "relu": relu,
}
"""Gains by the name of the torch function."""

ZERO_AT_ZERO = words(
    "tanh erf elu selu celu hardtanh relu6 softsign tanhshrink hardshrink softshrink threshold _threshold prelu rrelu "
    "atan asinh sinh sin expm1 log1p round trunc floor ceil tan asin atanh erfinv fake_quantize_per_tensor_affine "
    "fake_quantize_per_channel_affine frac fmod remainder leaky_relu mish hardswish"
)
"""Torch functions with φ(0) = 0 whose gain is taken by `quotient`."""

STEPS = words("round trunc floor ceil hardtanh relu6")
"""Functions whose exact value matters to comparisons (`x.round() == 1`): z times the gain may be off by a rounding."""

NONZERO_AT_ZERO = words(
    "sigmoid hardsigmoid logsigmoid log_sigmoid softplus exp exp2 cos cosh acos erfc ndtr log_ndtr sinc"
)
"""Torch functions with φ(0) ≠ 0, which `activations.activate_from` handles; in products they are gates."""


# Rules ----------------------------------------------------------------------------------------------------------------


def activate(run: Any, name: str, z: Tensor, gain: Callable[[Tensor], Tensor], value: Elementwise | None = None) -> Any:
    """φ(z) as z ⊙ φ(z)/z with the gain held, or by its derivative where the rules say so.

    Args:
        run: The recording.
        name: Name of the activation, in certificates.
        z: Its argument.
        gain: φ(z)/z as a function of z.
        value: φ itself; z times its gain if None.
    """
    phi = value or (lambda v: (v * gain(at_least_float32(v))).to(v.dtype))
    if not is_live(z):
        return raw(phi, z)
    role = Role.FACTOR if is_factor(z.role, run.rules) else Role.ACTIVATED
    y = raw(phi, z)
    if run.rules.activation == "taylor":
        run.note(f"activation derivative: {name}")
        return tangent(z, phi, y, role)
    run.note(f"activation gain: {name}")
    return scaled(z, raw(lambda: gain(at_least_float32(value_of(z)))), y, role)


def activate_from(name: str, z: Live, phi: Elementwise, role: Role) -> Live:
    """φ(z) with φ(0) ≠ 0 as φ(0) + gain ⊙ z."""
    run, y = now.tape, raw(phi, z)
    if run.rules.activation == "taylor":
        run.note(f"activation derivative: {name}")
        return tangent(z, phi, y, role)
    run.note(f"activation gain from φ(0): {name}")

    def parts() -> tuple[Tensor, Any]:
        z0 = at_least_float32(value_of(z))
        at_zero = phi(torch.zeros((), dtype=z0.dtype, device=z0.device))
        found = quotient(lambda v: phi(v) - at_zero, z0)
        # Entries that a model set to −∞, such as experts that were not chosen, do not move.
        is_finite = z0.isfinite()
        return torch.where(is_finite, found, 0), torch.where(is_finite, at_zero, y)

    gain, added = raw(parts)
    return scaled(z, gain, y, role, raw(Tensor.to, added, y.dtype))


@family(" ".join(CLOSED_FORMS))
def closed_form(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Activations with φ(0) = 0 whose gain has a closed form."""
    phi, options = _value(function, name, args, kwargs), _options(kwargs)
    return activate(run, name, args[0], lambda z: CLOSED_FORMS[name](z, *args[1:], **options), phi)


@family(" ".join(ZERO_AT_ZERO))
def other(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Activations with φ(0) = 0, the gain as a quotient with its limit at zero; `threshold` may have another φ(0)."""
    phi, z = _value(function, name, args, kwargs), args[0]
    name = name.removeprefix("_")
    if name in STEPS:
        return activate_from(name, z, phi, Role.FACTOR if is_factor(z.role, run.rules) else Role.ACTIVATED)
    if name == "threshold" and bool(raw(lambda: phi(value_of(z).new_zeros(())).any())):
        return activate_from(name, z, phi, Role.ACTIVATED)
    return activate(run, name, z, lambda v: quotient(phi, v), phi)


@family(" ".join(NONZERO_AT_ZERO))
def factor(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Activations with φ(0) ≠ 0, in affine form."""
    z = args[0]
    fresh = name in ("sigmoid", "hardsigmoid", "ndtr") and not is_factor(z.role, run.rules)
    return activate_from(name, z, _value(function, name, args, kwargs), Role.GATE if fresh else Role.FACTOR)


def _value(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Elementwise:
    options = _options(kwargs)
    if not is_live(args[0]) or any(is_live(value) for value in (*args[1:], *options.values())):
        raise now.tape.refusal(f"{name} with a second live argument")
    return lambda z: function(z, *args[1:], **options)


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("input", "inplace")}


@rule("glu")
def glu(x: Live, dim: int = -1) -> Any:
    """A ⊙ σ(b), the product by its own rule."""
    value, gate = x.chunk(2, dim=dim)
    return value * torch.sigmoid(gate)


@rule("sign sgn")
def direction(z: Live) -> Any:
    """z/|z|, as an activation: in a product it is the factor that is held."""
    if z.dtype.is_complex:
        raise now.tape.refusal("sgn of complex numbers")
    return activate_from("sign", z, torch.sign, Role.STEP)


@rule("abs")
def absolute(z: Live) -> Any:
    """|x| as x ⊙ sign(x) with the sign held; of complex numbers, the real part of x ⊙ conj(x/|x|)."""
    run = now.tape
    run.note("sign: abs")
    role = of_factors([z.role], run.rules) or Role.SIZE
    if z.dtype.is_complex:
        turned = z * raw(lambda: value_of(z).sgn().conj().resolve_conj())
        found = turned.real
        found.role = role
        return found
    return scaled(z, raw(lambda: value_of(z).sgn()), raw(torch.abs, z), role)
