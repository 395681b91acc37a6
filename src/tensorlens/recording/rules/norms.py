"""Norms (Eq. 10, 11): the statistic is held, centring and gains stay linear; or the whole norm by its derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorlens.program.nodes import at_least_float32, words
from tensorlens.recording.calculus import by_derivative, tangent
from tensorlens.recording.live import Live, is_live, now, raw, value_of
from tensorlens.recording.roles import Role
from tensorlens.recording.table import family, rule
from tensorlens.recording.tape import Tape


@family(
    "rsqrt sqrt reciprocal log log2 log10 var std norm linalg_vector_norm linalg_norm frobenius_norm cosine_similarity "
    "log_softmax logsumexp softmin cdist quantile nanquantile rpow linalg_inv inverse cumprod prod hypot logaddexp "
    "logaddexp2 atan2 xlogy logit pairwise_distance dist logdet det linalg_det matrix_exp slogdet linalg_slogdet "
    "linalg_pinv linalg_matrix_norm linalg_svd svd linalg_svdvals linalg_qr linalg_eigh linalg_eigvalsh "
    "linalg_cholesky cov corrcoef angle logcumsumexp _cdist_forward _euclidean_dist mse_loss l1_loss smooth_l1_loss "
    "huber_loss cross_entropy nll_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits"
)
def statistic(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A statistic of the pass that scales other numbers: held, or followed by its derivative."""
    if run.rules.norm == "hold":
        run.note(f"held: {name}")
        if run.n_samples > 1:
            run.check_samples(name, args, kwargs)
        return raw(function, *args, **kwargs)
    run.note(f"derivative: {name}")
    value = raw(function, *args, **kwargs)
    if name in _ONE_BY_ONE and is_live(args[0]) and not any(map(is_live, (*args[1:], *kwargs.values()))):
        return tangent(args[0], lambda v: function(v, *args[1:], **kwargs), value, Role.STATISTIC)
    return _as_statistics(by_derivative(run, function, name, args, kwargs))


_ONE_BY_ONE = words("rsqrt sqrt reciprocal log log2 log10 pow rpow logit")
"""Statistics of single numbers."""


def _as_statistics(found: Any) -> Any:
    if isinstance(found, (tuple, list)):
        return type(found)([_as_statistics(part) for part in found])
    if is_live(found):
        found.role = Role.STATISTIC
    return found


# Whole norms ----------------------------------------------------------------------------------------------------------


def normalised(
    name: str,
    x: Live,
    inverse: Tensor,
    axes: tuple[int, ...],
    value: Tensor,
    *,
    centred: bool,
    weight: Any = None,
    bias: Any = None,
) -> Any:
    """One step for a whole norm: γ ⊙ (x - mean(x))/σ + β.

    Args:
        name: In certificates.
        x: The tensor to normalise.
        inverse: 1/σ, in float32 or better.
        axes: The axes to normalise over.
        value: The model's own value.
        centred: Whether the mean is subtracted.
        weight: γ.
        bias: β.
    """
    run = now.tape
    if is_live(weight) or is_live(bias):
        y = normalised(name, x, inverse, axes, raw(_value, x, inverse, axes, centred), centred=centred)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias
    if run.rules.norm == "hold":
        run.note(f"norm: {name}")
        return run.emit("norm", value, x, inverse, weight, bias, axes, centred)
    run.note(f"norm: {name}, derivative")

    def parts() -> tuple[Tensor, Tensor]:
        wide = at_least_float32(value_of(x))
        unit = _value(wide, inverse, axes, centred)
        added = unit * (unit * wide).mean(axes, keepdim=True) * inverse
        added = added if weight is None else added * weight
        return unit, (added if bias is None else added + bias).to(value.dtype)

    unit, added = raw(parts)
    return run.emit("norm", value, x, inverse, weight, added, axes, centred, unit)


def _value(x: Tensor, inverse: Tensor, axes: tuple[int, ...], centred: bool) -> Tensor:
    wide = at_least_float32(x)
    return ((wide - wide.mean(axes, keepdim=True) if centred else wide) * inverse).to(x.dtype)


def _inverse_std(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    return (at_least_float32(x).var(axes, correction=0, keepdim=True) + eps).rsqrt()


@rule("layer_norm")
def layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """γ ⊙ (x - mean(x))/σ + β with 1/σ held. The mean is not held: centring is linear."""
    if not is_live(input):
        y = raw(torch.layer_norm, input, normalized_shape, None, None, eps)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias
    axes = tuple(range(-len(normalized_shape), 0))
    value, _, inverse = raw(torch.native_layer_norm, input, normalized_shape, value_of(weight), value_of(bias), eps)
    if inverse.dtype in (torch.float16, torch.bfloat16):
        inverse = raw(_inverse_std, value_of(input), axes, eps)
    return normalised("layer_norm", input, inverse, axes, value, centred=True, weight=weight, bias=bias)


@rule("native_layer_norm")
def layer_norm_kernel(x: Live, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """The kernel of a layer norm."""
    return layer_norm(x, shape, weight, bias, eps), None, None


@rule("rms_norm")
def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """W ⊙ x/rms(x) with 1/rms held; no centring."""
    if not is_live(input):
        return raw(torch.rms_norm, input, normalized_shape, None, eps) * weight
    axes = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    value = raw(torch.rms_norm, input, normalized_shape, value_of(weight), eps)
    inverse = raw(lambda: (at_least_float32(value_of(input)).square().mean(axes, keepdim=True) + eps).rsqrt())
    return normalised("rms_norm", input, inverse, axes, value, centred=False, weight=weight)


@rule("_fused_rms_norm")
def rms_norm_kernel(x: Live, shape: Any, weight: Any, eps: float | None) -> Any:
    """The kernel of an RMS norm."""
    return rms_norm(x, shape, weight, eps), None


@rule("group_norm")
def group_norm(
    input: Live, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """As `layer_norm` over the channels of a group and all positions."""
    grouped: Any = input.reshape(input.shape[0], num_groups, -1)
    inverse = raw(_inverse_std, value_of(grouped), (-1,), eps)
    value = raw(_value, value_of(grouped), inverse, (-1,), True)
    y = normalised("group_norm", grouped, inverse, (-1,), value, centred=True).reshape(input.shape)
    return _by_channel(y, weight, bias)


@rule("native_group_norm")
def group_norm_kernel(x: Live, weight: Any, bias: Any, n: int, c: int, hw: int, group: int, eps: float) -> Any:
    """The kernel of a group norm."""
    return group_norm(x, group, weight, bias, eps), None, None


def _by_channel(x: Any, weight: Any, bias: Any) -> Any:
    channels = (1, -1) + (1,) * (x.dim() - 2)
    x = x if weight is None else x * weight.reshape(channels)
    return x if bias is None else x + bias.reshape(channels)


@rule("normalize")
def normalize(input: Live, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Any:
    """x/‖x‖ with the norm held."""
    if now.tape.rules.norm == "taylor":
        size = input.norm(p, dim, keepdim=True)
        return input / size.clamp_min(eps)
    now.tape.note("norm: normalize")
    inverse = raw(lambda: 1 / value_of(input).norm(p, dim, keepdim=True).clamp_min(eps))
    value = raw(torch.nn.functional.normalize, input, p, dim, eps)
    return now.tape.emit("mul", value, input, inverse)


@family("batch_norm instance_norm")
def channel_norm(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One statistic per channel: known ones are linear, those of the input are held."""
    last = "training" if name == "batch_norm" else "use_input_stats"
    names = ("input", "running_mean", "running_var", "weight", "bias", last, "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, eps = given["input"], given.get("eps", 1e-5)
    channels = (1, -1) + (1,) * (x.dim() - 2)
    of_input = given.get(last, name == "instance_norm") or given.get("running_mean") is None
    if not of_input:
        mean, var = (raw(lambda key=key: at_least_float32(given[key]).reshape(channels)) for key in names[1:3])
        y = (x - mean.to(x.dtype)) * raw(lambda: (var + eps).rsqrt().to(x.dtype))
        return _by_channel(y, given.get("weight"), given.get("bias"))
    axes = tuple(axis for axis in range(x.dim()) if axis != 1 and (name == "batch_norm" or axis != 0))
    if name == "batch_norm":
        run.note_mixing(name)
    inverse = raw(_inverse_std, value_of(x), axes, eps)
    y = normalised(name, x, inverse, axes, raw(_value, value_of(x), inverse, axes, True), centred=True)
    return _by_channel(y, given.get("weight"), given.get("bias"))


@family("var_mean std_mean")
def spread_and_mean(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple:
    """The spread is a statistic, the mean is linear."""
    spread = torch.var if name == "var_mean" else torch.std
    options = {key: value for key, value in kwargs.items() if key not in ("correction", "unbiased")}
    dims = [arg for arg in args[1:] if not isinstance(arg, bool)] or [options.pop("dim", None)]
    mean = torch.mean(args[0], dims[0], **options) if dims[0] is not None else torch.mean(args[0])
    return spread(*args, **kwargs), mean
