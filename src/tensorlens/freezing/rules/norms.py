"""Norms (Eq. 10, 11): the statistic is held, centring and gains stay linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorlens.freezing.rules.activations import scale
from tensorlens.freezing.rules.linear import held, linear
from tensorlens.freezing.rules.table import name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, mark, plain, raw
from tensorlens.models.precision import at_least_float32


@rules_for("layer_norm")
def layer_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """γ ⊙ (x - mean(x))/σ + β with 1/σ held. The mean is not held: centring is linear."""
    return _layer_norm(run, *args, **kwargs)


def _layer_norm(run: Interpreter, input: Tensor, normalized_shape: Any, weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Traced:  # fmt: skip
    run.note_rule("norm: layer_norm")
    dims = tuple(range(-len(normalized_shape), 0))
    inverse_std = run.keep_factor(
        "layer_norm", lambda: (at_least_float32(constant(input)).var(dims, correction=0, keepdim=True) + eps).rsqrt()
    )
    x = at_least_float32(plain(input))
    y = (x - x.mean(dims, keepdim=True)) * inverse_std
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return mark(y.to(input.dtype), live=True)


@rules_for("rms_norm")
def rms_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """W ⊙ x/rms(x) with 1/rms held; no centring."""
    return _rms_norm(run, *args, **kwargs)


def _rms_norm(run: Interpreter, input: Tensor, normalized_shape: Any, weight: Tensor | None = None,
              eps: float | None = None) -> Traced:  # fmt: skip
    run.note_rule("norm: rms_norm")
    dims = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    inverse_rms = run.keep_factor(
        "rms_norm", lambda: (at_least_float32(constant(input)).square().mean(dims, keepdim=True) + eps).rsqrt()
    )
    y = at_least_float32(plain(input)) * inverse_rms
    return mark((y if weight is None else y * weight).to(input.dtype), live=True)


@rules_for("group_norm")
def group_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """As `layer_norm` over the channels of a group and all positions."""
    return _group_norm(run, *args, **kwargs)


def _group_norm(run: Interpreter, input: Tensor, num_groups: int, weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5) -> Traced:  # fmt: skip
    run.note_rule("norm: group_norm")
    x = at_least_float32(plain(input))
    grouped = x.reshape(x.shape[0], num_groups, -1)
    inverse_std = run.keep_factor(
        "group_norm", lambda: (constant(grouped).var(-1, correction=0, keepdim=True) + eps).rsqrt()
    )
    y = ((grouped - grouped.mean(-1, keepdim=True)) * inverse_std).reshape(x.shape)
    channels = (1, -1) + (1,) * (x.dim() - 2)
    y = y if weight is None else y * weight.reshape(channels)
    y = y if bias is None else y + bias.reshape(channels)
    return mark(y.to(input.dtype), live=True)


@rules_for("normalize")
def normalize(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x/‖x‖ with the norm held."""
    run.note_rule("norm: normalize")
    x = args[0]
    inverse = run.keep_factor("normalize", lambda: _inverse_norm(constant(x), *args[1:], **kwargs))
    return mark(scale(x, inverse), live=True)


def _inverse_norm(x: Tensor, p: float | int = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    return 1 / x.norm(p, dim, keepdim=True).clamp_min(eps)


@rules_for("batch_norm")
def batch_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """At inference the statistics are constants, and the norm is linear."""
    return linear(run, function, args, kwargs)


@rules_for("var_mean std_mean")
def spread_and_mean(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple:
    """The spread is held, the mean is linear."""
    run.note_rule(f"held: {name_of(function)}")
    spread, mean = raw(function, *args, **kwargs)
    return held(run, name_of(function), lambda: constant(spread)), mark(mean, live=True)
