"""Activations (Eq. 13): φ(z) as z ⊙ φ(z)/z with the gain held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorlens.freezing.rules import gains
from tensorlens.freezing.rules.table import name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, mark, plain
from tensorlens.models.precision import at_least_float32


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """X ⊙ factor in the wider of the two types, given back in the type of x."""
    x = plain(x)
    return (x * factor).to(x.dtype)


def activate(run: Interpreter, name: str, z: Tensor, gain: Callable[[Tensor], Tensor]) -> Traced:
    """φ(z) as z ⊙ φ(z)/z with the gain held."""
    run.note_rule(f"activation gain: {name}")
    factor = run.keep_factor(name, lambda: gain(at_least_float32(constant(z))))
    return mark(scale(z, factor), live=True, role="activated")


@rules_for(" ".join(gains.CLOSED_FORMS))
def closed_form_activation(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Activations with φ(0) = 0 whose gain has a closed form."""
    name = name_of(function)
    z = args[0] if args else kwargs["input"]
    return activate(run, name, z, lambda z: gains.CLOSED_FORMS[name](z, *args[1:], **_options(kwargs)))


@rules_for(" ".join(gains.ODD_ACTIVATIONS))
def other_activation(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Activations with φ(0) = 0, the gain as a quotient with its limit at zero."""
    options = _options(kwargs)
    return activate(
        run, name_of(function), args[0], lambda z: gains.quotient(lambda v: function(v, *args[1:], **options), z)
    )


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("input", "inplace")}


@rules_for("glu")
def glu(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A ⊙ σ(b) with σ(b) held."""
    value, gate = args[0].chunk(2, dim=kwargs.get("dim", args[1] if len(args) > 1 else -1))
    return value * torch.sigmoid(gate)
