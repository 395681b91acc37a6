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

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules import gains
from tensorlens.freezing.rules.replacements import taylor
from tensorlens.freezing.rules.table import name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, is_factor, is_live, mark, plain, raw
from tensorlens.models.precision import at_least_float32

Elementwise = Callable[[Tensor], Tensor]


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """X ⊙ factor in the wider of the two types, given back in the type of x."""
    x = plain(x)
    return (x * factor).to(x.dtype)


def activate(
    run: Interpreter, name: str, z: Tensor, gain: Callable[[Tensor], Tensor], value: Elementwise | None = None
) -> Traced:
    """φ(z) as z ⊙ φ(z)/z with the gain held, or by its derivative where the rules say so.

    Args:
        run: The running pass.
        name: Of the activation, in certificates.
        z: What it is applied to.
        gain: φ(z)/z as a function of z.
        value: φ itself; z times its gain if None.
    """
    role = "factor" if is_factor(run, z) else "activated"
    if run.rules.activation == "taylor":
        run.note_rule(f"activation derivative: {name}")
        return mark(taylor(run, name, value or (lambda v: v * gain(v)), z), live=True, role=role)
    run.note_rule(f"activation gain: {name}")
    factor = run.keep_factor(name, lambda: gain(at_least_float32(constant(z))))
    return mark(scale(z, factor), live=True, role=role)


def activate_from(run: Interpreter, name: str, z: Tensor, value: Elementwise, role: str) -> Traced:
    """φ(z) with φ(0) ≠ 0 as φ(z⁰) + gain ⊙ (z - z⁰), which is φ(0) + gain ⊙ z and exactly φ(z⁰) at X."""
    if run.rules.activation == "taylor":
        run.note_rule(f"activation derivative: {name}")
        return mark(taylor(run, name, value, z), live=True, role=role)
    run.note_rule(f"activation gain from φ(0): {name}")
    z0, z = run.keep_factor(name, lambda: constant(z).clone()), plain(z)
    y0 = raw(value, z0)
    if run.recording and not run.grad:
        return mark(y0, live=True, role=role)
    wide = at_least_float32(z0)
    # Where a model put −∞, such as at experts that were not chosen, nothing moves.
    is_finite, none = wide.isfinite(), wide.new_zeros(())
    moved = torch.where(is_finite, at_least_float32(z) - wide, none)
    y = at_least_float32(y0) + torch.where(is_finite, gains.secant(value, wide), none) * moved
    return mark(y.to(y0.dtype), live=True, role=role)


def coarsened(run: Interpreter, name: str, z: Tensor, result: Tensor) -> Traced:
    """A cast to whole numbers or 8-bit floats, held, with the live tensor of its values beside it: see `coarse`."""
    dtype, role = result.dtype, "factor" if is_factor(run, z) else "activated"

    def rounded(v: Tensor) -> Tensor:
        value = v.detach().to(dtype).to(v.dtype)
        return v + (value - v.detach()) if dtype.is_floating_point else value  # torch's derivative would be rounded too

    fine = activate_from(run, f"{name} {str(dtype).removeprefix('torch.')}", z, rounded, role)
    kept = run.keep_factor(name, lambda: constant(result))
    found = mark(kept.view_as(kept), live=False, role="coarse")
    found.fine = fine
    return found


@rules_for(" ".join(gains.CLOSED_FORMS))
def closed_form_activation(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Activations with φ(0) = 0 whose gain has a closed form."""
    name, value = name_of(function), _value(run, function, args, kwargs)
    z = args[0] if args else kwargs["input"]
    return activate(run, name, z, lambda z: gains.CLOSED_FORMS[name](z, *args[1:], **_options(kwargs)), value)


@rules_for(" ".join(gains.ODD_ACTIVATIONS))
def other_activation(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Activations with φ(0) = 0, the gain as a quotient with its limit at zero; `threshold` may have another φ(0)."""
    value, z = _value(run, function, args, kwargs), args[0] if args else kwargs["input"]
    name = name_of(function).removeprefix("_")
    if name in gains.STEPS:
        return activate_from(run, name, z, value, "factor" if is_factor(run, z) else "activated")
    if name == "threshold" and bool(raw(value, constant(z).new_zeros(())).any()):
        return activate_from(run, name, z, value, "activated")
    return activate(run, name, z, lambda z: gains.quotient(value, z), value)


@rules_for("frac fmod remainder")
def periodic(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The part of z that a period leaves, 0 at 0: an activation, unless the period is live."""
    period = (*args[1:], *kwargs.values())
    if not is_live(args[0]) or any(is_live(value) for value in period):
        raise NotLinearError(run.refusal(name_of(function)))
    value = _value(run, function, args, kwargs)
    return activate(run, name_of(function), args[0], lambda z: gains.quotient(value, z), value)


@rules_for(" ".join(gains.FACTORS))
def factor_activation(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Activations with φ(0) ≠ 0, in affine form."""
    name, z = name_of(function), args[0] if args else kwargs["input"]
    fresh = name in ("sigmoid", "hardsigmoid", "ndtr") and not is_factor(run, z)
    return activate_from(run, name, z, _value(run, function, args, kwargs), "gate" if fresh else "factor")


def _value(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Elementwise:
    options = _options(kwargs)
    if any(is_live(value) for value in (*args[1:], *options.values())):  # the slope of `prelu`
        raise NotLinearError(
            f"`{name_of(function)}` with a second live argument: write it out in plain torch functions, such as "
            f"`torch.where(x > 0, x, slope * x)`. {run.refusal(name_of(function))}"
        )
    return lambda z: function(z, *args[1:], **options)


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("input", "inplace")}


@rules_for("glu")
def glu(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A ⊙ σ(b), the product by its own rule."""
    value, gate = args[0].chunk(2, dim=kwargs.get("dim", args[1] if len(args) > 1 else -1))
    return value * torch.sigmoid(gate)
