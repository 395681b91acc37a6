r"""Functions of one live tensor that are not linear, and the affine functions that replace them.

Each has the model's value at X: a constant is added to achieve this, and it belongs to B. `by_derivative` serves
functions without a rule of their own, for rule sets that follow derivatives, and kernels that are linear in a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import words
from tensorlens.program.steps import at_least_float32, leaves, mapped, of_some
from tensorlens.recording.conventions import Role, is_factor, of_factors
from tensorlens.recording.live import Live, is_live, now, raw, spec_of, value_of
from tensorlens.recording.tape import ANY_KERNEL, Tape, family, rule

Elementwise = Callable[[Tensor], Tensor]


def scaled(x: Live, factor: Tensor, value: Tensor, role: Role | None = None, added: Any = None) -> Live:
    """`x` ⊙ factor + added, with the model's own value."""
    run = now.tape
    factor = factor if factor.dtype == value.dtype else raw(Tensor.to, factor, value.dtype)
    if added is None:
        return run.emit("mul", value, x, factor, role=role)
    return run.emit("add", value, run.emit("gain", spec_of(value), x, factor), added, role=role)


def tangent(x: Live, function: Elementwise, value: Tensor, role: Role | None = None) -> Live:
    r"""An element-wise function by its derivative: $f(x^0) + f'(x^0)(x - x^0)$."""

    def parts() -> tuple[Tensor, Tensor]:
        x0 = at_least_float32(value_of(x)).expand(value.shape)
        slope = slope_of(function, x0)
        # An entry that is masked by an infinity does not move.
        is_finite = x0.isfinite() & slope.isfinite()
        slope = torch.where(is_finite, slope, 0)
        return slope, value - torch.where(is_finite, slope * x0, 0).to(value.dtype)

    slope, added = raw(parts)
    return scaled(x, slope, value, role, added)


@contextmanager
def differentiable() -> Iterator[None]:
    """Enable autograd in this context: torch switches it off at the level of kernels and in inference mode."""
    kept, left_out = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("ADInplaceOrView", "AutogradOther", "AutogradFunctionality"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(kept, left_out), torch.inference_mode(False), torch.enable_grad():
        yield


def leaf(x: Tensor) -> Tensor:
    """A leaf tensor for derivatives."""
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()


def slope_of(function: Elementwise, x: Tensor) -> Tensor:
    """The derivative of an element-wise function; zero if torch has none."""
    with differentiable():
        x = leaf(x)
        y = function(x)
        return torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros_like(x)


# Kernels by their derivative ------------------------------------------------------------------------------------------


@family(ANY_KERNEL)
def by_derivative(run: Any, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace a function with its derivative in all live arguments; a function of several kernels, kernel by kernel."""
    if not isinstance(function, torch._ops.OpOverload):
        return run.by_kernels(function, args, kwargs)
    if function._schema.is_mutable or torch.Tag.nondeterministic_seeded in function.tags:
        raise run.refusal(name)
    value = raw(function, *args, **kwargs)
    if function.namespace != "aten" or isinstance(value, Tensor) and value.layout is not torch.strided:
        raise run.refusal(name)
    run.note(f"derivative: {name}")
    if isinstance(value, Tensor):
        return moving(function, name, args, kwargs, value)
    parts = [moving(function, name, args, kwargs, one, part) for part, one in enumerate(value)]
    return tuple(parts) if type(value) in (tuple, list) else type(value)(parts)


def moving(
    function: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: Tensor,
    part: int | None = None,
    *,
    held: tuple[int, ...] = (),
    is_linear: bool = False,
    share: float = 1,
) -> Any:
    """A result of a kernel as a step.

    `part` says which of several results it is; `held` are places of arguments that are held though they are live. A
    kernel that is linear in what moves needs nothing added; `share` is how much of it follows what moves.
    """
    run = now.tape
    args = tuple([value_of(arg) if place in held else arg for place, arg in enumerate(args)])
    packed = (args, tuple(kwargs.items()))
    met = [(place, leaf) for place, leaf in enumerate(leaves(packed)) if is_live(leaf)]
    places, moved = tuple([place for place, _ in met]), tuple([leaf for _, leaf in met])
    plain = {id(leaf): value_of(leaf) for leaf in moved}
    at = tuple([plain[id(leaf)] for leaf in moved])
    packed = mapped(packed, lambda leaf: plain[id(leaf)] if id(leaf) in plain else value_of(leaf))
    if not _is_known(function, packed, places, part):
        if part:
            return value  # a kernel may also return counts and places
        raise run.refusal(f"the derivative of {name}")
    given = None if is_linear else raw(Tensor.clone, value)
    arguments = (moved, given, str(function), packed, places, at, part, is_linear and share == 1)
    if share == 1:
        return run.emit("derivative", value, *arguments)
    return run.emit("mul", value, run.emit("derivative", spec_of(value), *arguments), share)


def _is_known(function: Any, packed: Any, places: tuple[int, ...], part: int | None) -> bool:
    """Whether torch has a derivative of a kernel; without one it returns a constant, or raises."""

    def known() -> bool:
        with differentiable():
            at = [leaf(x) for place, x in enumerate(leaves(packed)) if place in places]
            found = of_some(str(function), packed, places, part)(*at)
            if not isinstance(found, Tensor) or not found.requires_grad:
                return False
            try:
                torch.autograd.grad(found, at, torch.ones_like(found), allow_unused=True)
            except RuntimeError:
                return False
            return True

    return raw(known)


@family("max_unpool2d max_unpool3d grid_sampler_2d grid_sampler_3d")
def in_the_first(run: Any, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that is linear in its first argument; its other arguments are held where factors of products are."""
    if not isinstance(function, torch._ops.OpOverload) or run.rules.name == "jacobian":
        return by_derivative(run, function, name, args, kwargs)
    value = raw(function, *args, **kwargs)
    if not is_live(args[0]):
        run.note(f"held: {name}")
        return value
    others = tuple(range(1, len(args)))
    return moving(function, name, args, kwargs, value, held=others, is_linear=True)


# Activations (Eq. 13): φ(z) as φ(0) + gain ⊙ z with the gain held, or by its derivative -------------------------------
#
# Where φ(0) = 0 the gain is φ(z)/z, and the result may be the gate of a gated feed-forward. Where φ(0) ≠ 0 (sigmoid,
# softplus, exp) the gain is (φ(z) - φ(0))/z and φ(0) is part of B; the result is a factor: in a product with another
# live tensor it is the gate, and is held.

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
        ratio = torch.where(vanishing, slope_of(activation, torch.zeros_like(ratio)), ratio)
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
"""Torch functions with φ(0) ≠ 0, which `activate_from` handles; in products they are gates."""


# Rules of activations -------------------------------------------------------------------------------------------------


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
    phi, options = _function_of(function, name, args, kwargs), _options(kwargs)
    return activate(run, name, args[0], lambda z: CLOSED_FORMS[name](z, *args[1:], **options), phi)


@family(" ".join(ZERO_AT_ZERO))
def other(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Activations with φ(0) = 0, the gain as a quotient with its limit at zero; `threshold` may have another φ(0)."""
    phi, z = _function_of(function, name, args, kwargs), args[0]
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
    return activate_from(name, z, _function_of(function, name, args, kwargs), Role.GATE if fresh else Role.FACTOR)


def _function_of(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Elementwise:
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


@rule("copysign")
def signed(x: Any, other: Any) -> Any:
    """|x| with the sign of another, as x ⊙ its change of sign, which is held."""
    return x * raw(lambda: value_of(x).sgn() * torch.copysign(torch.ones_like(x), value_of(other)))


# Statistics (Eq. 10, 11): held, while centring and gains stay linear; or the whole norm by its derivative -------------


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
        run.check_samples(name, args, kwargs)
        return run.decided(raw(function, *args, **kwargs))
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
        y = normalised(name, x, inverse, axes, raw(_normed, x, inverse, axes, centred), centred=centred)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias
    if run.rules.norm == "hold":
        run.note(f"norm: {name}")
        return run.emit("norm", value, x, inverse, weight, bias, axes, centred)
    run.note(f"norm: {name}, derivative")

    def parts() -> tuple[Tensor, Tensor]:
        wide = at_least_float32(value_of(x))
        unit = _normed(wide, inverse, axes, centred)
        added = unit * (unit * wide).mean(axes, keepdim=True) * inverse
        added = added if weight is None else added * weight
        return unit, (added if bias is None else added + bias).to(value.dtype)

    unit, added = raw(parts)
    return run.emit("norm", value, x, inverse, weight, added, axes, centred, unit)


def _normed(x: Tensor, inverse: Tensor, axes: tuple[int, ...], centred: bool) -> Tensor:
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
    value, _, inverse = raw(torch.native_layer_norm, input, normalized_shape, weight, bias, eps)
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
    value = raw(torch.rms_norm, input, normalized_shape, weight, eps)
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
    value = raw(_normed, value_of(grouped), inverse, (-1,), True)
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
    y = normalised(name, x, inverse, axes, raw(_normed, value_of(x), inverse, axes, True), centred=True)
    return _by_channel(y, given.get("weight"), given.get("bias"))


@family("var_mean std_mean")
def spread_and_mean(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple:
    """The spread is a statistic, the mean is linear."""
    spread = torch.var if name == "var_mean" else torch.std
    options = {key: value for key, value in kwargs.items() if key not in ("correction", "unbiased")}
    dims = [arg for arg in args[1:] if not isinstance(arg, bool)] or [options.pop("dim", None)]
    mean = torch.mean(args[0], dims[0], **options) if dims[0] is not None else torch.mean(args[0])
    return spread(*args, **kwargs), mean
