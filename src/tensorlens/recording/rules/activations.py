"""Activations (Eq. 13): φ(z) as φ(0) + gain ⊙ z with the gain held, or by its derivative.

Where φ(0) = 0 the gain is φ(z)/z, and the result may be the gate of a gated feed-forward. Where φ(0) ≠ 0 (sigmoid,
softplus, exp) the gain is (φ(z) - φ(0))/z and φ(0) is part of B; the result is a factor: wherever it meets another live
tensor in a product, it is what gates, and is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorlens.program.nodes import at_least_float32
from tensorlens.recording.calculus import Elementwise, scaled, tangent
from tensorlens.recording.live import Live, is_live, raw, tape, value_of
from tensorlens.recording.roles import Role, is_factor
from tensorlens.recording.rules import gains
from tensorlens.recording.table import family, rule


def activate(run: Any, name: str, z: Tensor, gain: Callable[[Tensor], Tensor], value: Elementwise | None = None) -> Any:
    """φ(z) as z ⊙ φ(z)/z with the gain held, or by its derivative where the rules say so.

    Args:
        run: The recording.
        name: Name of the activation, in certificates.
        z: What it is applied to.
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
    run, y = tape(), raw(phi, z)
    if run.rules.activation == "taylor":
        run.note(f"activation derivative: {name}")
        return tangent(z, phi, y, role)
    run.note(f"activation gain from φ(0): {name}")

    def parts() -> tuple[Tensor, Any]:
        z0 = at_least_float32(value_of(z))
        at_zero = phi(torch.zeros((), dtype=z0.dtype, device=z0.device))
        found = gains.quotient(lambda v: phi(v) - at_zero, z0)
        # Where a model put −∞, such as at experts that were not chosen, nothing moves.
        is_finite = z0.isfinite()
        return torch.where(is_finite, found, 0), torch.where(is_finite, at_zero, y)

    gain, added = raw(parts)
    return scaled(z, gain, y, role, raw(Tensor.to, added, y.dtype))


@family(" ".join(gains.CLOSED_FORMS))
def closed_form(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Activations with φ(0) = 0 whose gain has a closed form."""
    phi, options = _value(function, name, args, kwargs), _options(kwargs)
    return activate(tape(), name, args[0], lambda z: gains.CLOSED_FORMS[name](z, *args[1:], **options), phi)


@family(" ".join(gains.ZERO_AT_ZERO))
def other(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Activations with φ(0) = 0, the gain as a quotient with its limit at zero; `threshold` may have another φ(0)."""
    phi, z = _value(function, name, args, kwargs), args[0]
    name = name.removeprefix("_")
    if name in gains.STEPS:
        return activate_from(name, z, phi, Role.FACTOR if is_factor(z.role, tape().rules) else Role.ACTIVATED)
    if name == "threshold" and bool(raw(lambda: phi(value_of(z).new_zeros(())).any())):
        return activate_from(name, z, phi, Role.ACTIVATED)
    return activate(tape(), name, z, lambda v: gains.quotient(phi, v), phi)


@family(" ".join(gains.NONZERO_AT_ZERO))
def factor(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Activations with φ(0) ≠ 0, in affine form."""
    z = args[0]
    fresh = name in ("sigmoid", "hardsigmoid", "ndtr") and not is_factor(z.role, tape().rules)
    return activate_from(name, z, _value(function, name, args, kwargs), Role.GATE if fresh else Role.FACTOR)


def _value(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Elementwise:
    options = _options(kwargs)
    if not is_live(args[0]) or any(is_live(value) for value in (*args[1:], *options.values())):
        raise tape().refusal(f"{name} with a second live argument")
    return lambda z: function(z, *args[1:], **options)


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("input", "inplace")}


@rule("glu")
def glu(x: Live, dim: int = -1) -> Any:
    """A ⊙ σ(b), the product by its own rule."""
    value, gate = x.chunk(2, dim=dim)
    return value * torch.sigmoid(gate)


@family("sign sgn")
def direction(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """z/|z|: of real numbers an activation, which is what is held in a product."""
    z = args[0]
    if not z.dtype.is_complex:
        return activate_from("sign", z, torch.sign, Role.STEP)
    size = z.abs()
    return z / torch.where(size == 0, 1, size)


@rule("abs")
def absolute(z: Live) -> Any:
    """|x| as x ⊙ sign(x) with the sign held; of complex numbers, the real part of x ⊙ conj(x/|x|)."""
    run = tape()
    run.note("sign: abs")
    from tensorlens.recording.roles import of_factors

    role = of_factors([z.role], run.rules) or Role.SIZE
    if z.dtype.is_complex:
        turned = z * raw(lambda: value_of(z).sgn().conj().resolve_conj())
        found = turned.real
        found.role = role
        return found
    return scaled(z, raw(lambda: value_of(z).sgn()), raw(torch.abs, z), role)
