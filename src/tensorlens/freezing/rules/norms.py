"""Norms (Eq. 10, 11): the statistic is held, centring and gains stay linear; or all of it by its derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorlens.freezing.rules.activations import scale
from tensorlens.freezing.rules.choices import constants
from tensorlens.freezing.rules.linear import held
from tensorlens.freezing.rules.replacements import taylor
from tensorlens.freezing.rules.table import Rule, name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, is_live, mark, plain, raw
from tensorlens.models.precision import at_least_float32


@rules_for(
    "rsqrt sqrt reciprocal log log2 log10 var std norm vector_norm linalg_vector_norm linalg_norm frobenius_norm "
    "cosine_similarity log_softmax logsumexp softmin cdist quantile nanquantile rpow rdiv linalg_inv inverse pinverse "
    "cumprod prod hypot logaddexp logaddexp2 atan2 arctan2 xlogy xlog1py logit pairwise_distance dist "
    "logdet det linalg_det matrix_exp linalg_matrix_exp slogdet linalg_slogdet linalg_pinv linalg_matrix_norm "
    "linalg_cond linalg_svd svd linalg_svdvals linalg_qr qr linalg_eigh linalg_eigvalsh linalg_cholesky cholesky cov "
    "corrcoef angle "
    "mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits cosine_embedding_loss margin_ranking_loss triplet_margin_loss gaussian_nll_loss"
)
def statistic(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A number that the pass arrived at, by which others are scaled: held, or by its derivative."""
    name = name_of(function)
    if run.rules.norm == "hold":
        run.note_rule(f"held: {name}")
        return held(run, name, lambda: constants(raw(function, *args, **kwargs)))
    run.note_rule(f"derivative: {name}")
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    places = [place for place, value in given.items() if is_live(value)]

    def compute(*values: Tensor) -> Any:
        now = {place: plain(value) if isinstance(value, Tensor) else value for place, value in given.items()}
        now |= dict(zip(places, values, strict=True))
        named = {place: value for place, value in now.items() if isinstance(place, str)}
        return function(*(now[i] for i in range(len(args))), **named)

    return _as_statistics(taylor(run, name, compute, *(given[place] for place in places)))


def _as_statistics(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)([_as_statistics(part) for part in result])
    return mark(result, live=True, role="statistic")


def _by_derivative(run: Interpreter, name: str, x: Tensor, function: Callable[[Tensor], Tensor]) -> Traced:
    run.note_rule(f"norm: {name}, derivative")
    return mark(taylor(run, name, function, x), live=True)


def _weights_apart(names: str, *, first: bool) -> Callable[[Rule], Rule]:
    """Let a norm whose gain or shift is live be two steps: the norm itself, and products that have their own rule.

    Args:
        names: Of the function's arguments, in order.
        first: Whether channels are the second axis, as of pictures; the last ones otherwise.
    """

    def around(rule: Rule) -> Rule:
        @functools.wraps(rule)
        def apart(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = dict(zip(names.split(), args, strict=False)) | kwargs
            if not (is_live(given.get("weight")) or is_live(given.get("bias"))):
                return rule(run, function, args, kwargs)
            weight, bias = given.pop("weight", None), given.pop("bias", None)
            y = function(**given)
            if not first:
                y = y if weight is None else y * weight
                return y if bias is None else y + bias
            return _affine(y, weight, bias)

        return apart

    return around


@rules_for("layer_norm")
@_weights_apart("input normalized_shape weight bias eps cudnn_enable", first=False)
def layer_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """γ ⊙ (x - mean(x))/σ + β with 1/σ held. The mean is not held: centring is linear."""
    return _layer_norm(run, *args, **kwargs)


def _layer_norm(run: Interpreter, input: Tensor, normalized_shape: Any, weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Traced:  # fmt: skip
    if run.rules.norm == "taylor":
        return _by_derivative(run, "layer_norm", input, lambda x: F.layer_norm(x, normalized_shape, weight, bias, eps))
    run.note_rule("norm: layer_norm")
    dims = tuple(range(-len(normalized_shape), 0))
    inverse_std = run.keep_factor(
        "layer_norm", lambda: (at_least_float32(constant(input)).var(dims, correction=0, keepdim=True) + eps).rsqrt()
    )
    x = at_least_float32(plain(input))
    # As two steps over all channels, where subtracting, scaling, weighing and shifting one by one would be four.
    y = torch.addcmul(-x.mean(dims, keepdim=True) * inverse_std, x, inverse_std)
    if weight is not None:
        y = y * weight if bias is None else torch.addcmul(bias.to(y), y, weight.to(y))
    elif bias is not None:
        y = y + bias
    return mark(y.to(input.dtype), live=True)


@rules_for("rms_norm")
@_weights_apart("input normalized_shape weight eps", first=False)
def rms_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """W ⊙ x/rms(x) with 1/rms held; no centring."""
    return _rms_norm(run, *args, **kwargs)


def _rms_norm(run: Interpreter, input: Tensor, normalized_shape: Any, weight: Tensor | None = None,
              eps: float | None = None) -> Traced:  # fmt: skip
    if run.rules.norm == "taylor":
        return _by_derivative(run, "rms_norm", input, lambda x: F.rms_norm(x, normalized_shape, weight, eps))
    run.note_rule("norm: rms_norm")
    dims = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    inverse_rms = run.keep_factor(
        "rms_norm", lambda: (at_least_float32(constant(input)).square().mean(dims, keepdim=True) + eps).rsqrt()
    )
    y = at_least_float32(plain(input)) * inverse_rms
    return mark((y if weight is None else y * weight).to(input.dtype), live=True)


@rules_for("group_norm")
@_weights_apart("input num_groups weight bias eps cudnn_enabled", first=True)
def group_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """As `layer_norm` over the channels of a group and all positions."""
    return _group_norm(run, *args, **kwargs)


def _group_norm(run: Interpreter, input: Tensor, num_groups: int, weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5) -> Traced:  # fmt: skip
    if run.rules.norm == "taylor":
        return _by_derivative(run, "group_norm", input, lambda x: F.group_norm(x, num_groups, weight, bias, eps))
    run.note_rule("norm: group_norm")
    x = at_least_float32(plain(input))
    grouped = x.reshape(x.shape[0], num_groups, -1)
    inverse_std = run.keep_factor(
        "group_norm", lambda: (constant(grouped).var(-1, correction=0, keepdim=True) + eps).rsqrt()
    )
    y = ((grouped - grouped.mean(-1, keepdim=True)) * inverse_std).reshape(x.shape)
    return mark(_affine(y, weight, bias).to(input.dtype), live=True)


@rules_for("normalize")
def normalize(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x/‖x‖ with the norm held."""
    x = args[0]
    if run.rules.norm == "taylor":
        return _by_derivative(run, "normalize", x, lambda x: F.normalize(x, *args[1:], **kwargs))
    run.note_rule("norm: normalize")
    inverse = run.keep_factor("normalize", lambda: _inverse_norm(constant(x), *args[1:], **kwargs))
    return mark(scale(x, inverse), live=True)


def _inverse_norm(x: Tensor, p: float | int = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    return 1 / x.norm(p, dim, keepdim=True).clamp_min(eps)


_BATCH_NORM = "input running_mean running_var weight bias training momentum eps"
_INSTANCE_NORM = "input running_mean running_var weight bias use_input_stats momentum eps"


@rules_for("batch_norm")
@_weights_apart(_BATCH_NORM, first=True)
def batch_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With statistics of its own the norm is linear; with those of the input they are held."""
    options = dict(zip(_BATCH_NORM.split(), args, strict=False)) | kwargs
    if options.get("running_mean") is not None and not options.get("training"):
        return _known_norm(options)
    return _channel_norm(run, "batch_norm", options, samples_apart=False)


@rules_for("instance_norm")
@_weights_apart(_INSTANCE_NORM, first=True)
def instance_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `group_norm` with one channel per group; linear where the statistics are the norm's own."""
    options = dict(zip(_INSTANCE_NORM.split(), args, strict=False)) | kwargs
    if not options.get("use_input_stats", True):
        return _known_norm(options)
    return _channel_norm(run, "instance_norm", options, samples_apart=True)


def _known_norm(options: dict[str, Any]) -> Traced:
    """An affine function of each channel, spelled out: the kernel's own derivative is wrong for some strides."""
    x, channels = options["input"], (1, -1) + (1,) * (options["input"].dim() - 2)
    mean, var = (at_least_float32(options[name]).reshape(channels) for name in ("running_mean", "running_var"))
    y = (at_least_float32(plain(x)) - mean) * (var + options.get("eps", 1e-5)).rsqrt()
    return mark(_affine(y, options.get("weight"), options.get("bias")).to(x.dtype), live=True)


def _channel_norm(run: Interpreter, name: str, options: dict[str, Any], *, samples_apart: bool) -> Traced:
    """One statistic per channel, over all positions and, unless `samples_apart`, over the rows of the recording."""
    x, eps = options["input"], options.get("eps", 1e-5)
    n_rows = 1 if samples_apart else run.keep_factor(f"{name}.rows", lambda: x.shape[0])

    def grouped(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        rows = at_least_float32(x).unflatten(0, (-1, n_rows))  # one group of rows for each state of a replay
        return rows, tuple(axis for axis in range(1, rows.dim()) if axis != 2)

    def inverse_std(x: Tensor) -> Tensor:
        rows, axes = grouped(x)
        return (rows.var(axes, correction=0, keepdim=True) + eps).rsqrt()

    def normalised(x: Tensor, factor: Tensor) -> Tensor:
        rows, axes = grouped(x)
        y = ((rows - rows.mean(axes, keepdim=True)) * factor).flatten(0, 1)
        return _affine(y, options.get("weight"), options.get("bias")).to(x.dtype)

    if run.rules.norm == "taylor":
        return _by_derivative(run, name, x, lambda x: normalised(x, inverse_std(x)))
    run.note_rule(f"norm: {name}")
    return mark(normalised(plain(x), run.keep_factor(name, lambda: inverse_std(constant(x)))), live=True)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    channels = (1, -1) + (1,) * (x.dim() - 2)
    x = x if weight is None else x * weight.reshape(channels)
    return x if bias is None else x + bias.reshape(channels)


@rules_for("var_mean std_mean")
def spread_and_mean(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple:
    """The spread is a statistic, the mean is linear."""
    of_spread = torch.var if name_of(function) == "var_mean" else torch.std
    if run.rules.norm == "taylor":
        spread = statistic(run, of_spread, args, kwargs)
        return spread, mark(raw(function, *args, **kwargs)[1], live=True)
    run.note_rule(f"held: {name_of(function)}")
    spread, mean = raw(function, *args, **kwargs)
    return held(run, name_of(function), lambda: constant(spread)), mark(mean, live=True)
