"""Rules for the nonlinear torch functions: what is held, and in which argument the result stays linear.

Each rule is the function's definition with a `run.hold(...)` around the factor that the paper fixes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.freezing import gains
from tensorlens.freezing.functions import held, linear, name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, is_live, mark, plain, raw


def at_least_float32(x: Tensor) -> Tensor:
    """Factors are computed in float32 or better, whatever the storage."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """X ⊙ factor in the wider of the two types, given back in the type of x."""
    x = plain(x)
    return (x * factor).to(x.dtype)


# Activations (Eq. 13) ------------------------------------------------------------------------------------------------


def activate(run: Interpreter, name: str, z: Tensor, gain: Callable[[Tensor], Tensor]) -> Traced:
    """φ(z) as z ⊙ φ(z)/z with the gain held."""
    run.fire(f"activation gain: {name}")
    factor = run.hold(name, lambda: gain(at_least_float32(constant(z))))
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


# Values held as they are ---------------------------------------------------------------------------------------------


@rules_for(
    "sigmoid logsigmoid log_sigmoid softplus exp exp2 log log2 log10 cos tan acos asin cosh hardsigmoid erfc erfinv "
    "rsqrt sqrt reciprocal var std norm vector_norm linalg_vector_norm linalg_norm frobenius_norm cosine_similarity "
    "log_softmax logsumexp sign sgn floor ceil frac floor_divide remainder fmod rpow rdiv "
    "eq ne lt le gt ge isnan isinf isfinite isclose allclose equal any all logical_not logical_and logical_or "
    "logical_xor "
    "bitwise_not bitwise_and bitwise_or bool int long argmax argmin argsort nonzero count_nonzero unique bincount "
    "histc bucketize searchsorted amax amin aminmax cdist multinomial one_hot softmin "
    "quantile nanquantile isin isreal linalg_inv inverse pinverse cumprod prod"
)
def frozen(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result is a number the pass arrived at: a statistic, a gate with φ(0) ≠ 0, a decision. It is held."""
    name = name_of(function)
    run.fire(f"held: {name}")
    role = "gate" if name in ("sigmoid", "hardsigmoid") else None
    return held(run, name, lambda: _constants(raw(function, *args, **kwargs)), role=role)


def _constants(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_constants(part) for part in value])
    return constant(value) if isinstance(value, Tensor) else value


@rules_for("item tolist python_value numpy")
def escape(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A value that leaves for Python: always the recorded one."""
    run.fire(f"held: {name_of(function)}")
    return raw(function, run.hold(name_of(function), lambda: constant(args[0])), *args[1:], **kwargs)


@rules_for("format")
def write(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A value that a model writes into a string, such as the name of an expert: always the recorded one."""
    value = run.hold("format", lambda: constant(args[0])) if is_live(args[0]) else args[0]
    return raw(format, plain(value), *args[1:])


@rules_for("softmax")
def softmax(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The attention matrix A (Eq. 7), held."""
    run.fire("attention: softmax")
    return held(run, "softmax", lambda: constant(raw(function, *args, **kwargs)), role="attention")


# Choices and pieces --------------------------------------------------------------------------------------------------


@rules_for("abs")
def absolute(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """|x| as x ⊙ sign(x) with the sign held; of complex numbers, the real part of x ⊙ conj(x/|x|)."""
    run.fire("sign: abs")
    aligned = scale(args[0], run.hold("abs", lambda: constant(args[0]).sgn().conj().resolve_conj()))
    return mark(aligned.real.clone() if aligned.is_complex() else aligned, live=True)


@rules_for("clamp clamp_min clamp_max")
def clamp(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Linear where the value passed, constant where it was cut."""
    run.fire("piece: clamp")
    x = plain(args[0])
    cut = raw(function, *args, **kwargs)
    passed = run.hold("clamp.passed", lambda: constant(cut) == constant(x))
    bound = run.hold("clamp.bound", lambda: constant(cut))
    return mark(torch.where(passed, x, bound), live=True, role=args[0].role)


@rules_for("maximum minimum")
def choose(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """The larger or smaller of two, the choice held."""
    run.fire(f"piece: {name_of(function)}")
    first, second = (plain(value) for value in (*args, *kwargs.values())[:2])
    chosen = run.hold(name_of(function), lambda: raw(function, constant(first), constant(second)) == constant(first))
    return mark(torch.where(chosen, first, second), live=True)


@rules_for("sort topk kthvalue max min median mode cummax cummin")
def select(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values gathered at the recorded places; without a dimension, the extreme value is held."""
    name = name_of(function)
    run.fire(f"decision: {name}")
    if name in ("max", "min") and isinstance((*args, *kwargs.values(), None)[1], Tensor):
        return choose(run, torch.maximum if name == "max" else torch.minimum, args, kwargs)
    result = raw(function, *args, **kwargs)
    if isinstance(result, Tensor):
        return held(run, name, lambda: constant(result))
    places = run.hold(name, lambda: constant(result[1]))
    dim = _dimension(name, args, kwargs)
    index = places if places.dim() == args[0].dim() else places.unsqueeze(dim)
    values = raw(torch.gather, args[0], dim, index).reshape(places.shape)
    return type(result)((mark(values, live=True), places))


def _dimension(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The `dim` of a selection; topk and kthvalue take k before it."""
    position = 2 if name in ("topk", "kthvalue") else 1
    return kwargs.get("dim", args[position] if len(args) > position else -1)


# Powers, products, quotients -----------------------------------------------------------------------------------------


@rules_for("pow square float_power")
def power(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x^p as x ⊙ x^(p-1) with the second factor held, for p ≥ 1; any other power is held whole."""
    x: Any
    x, exponent = (*args, *kwargs.values(), 2)[:2]
    if not is_live(x) or isinstance(exponent, Tensor) and exponent.numel() != 1 or float(exponent) < 1:
        return frozen(run, function, args, kwargs)
    run.fire("product: power")
    base, rest = at_least_float32(constant(x)), float(exponent) - 1
    factor = run.hold("pow", lambda: base if rest == 1 else base**rest)
    return mark(scale(x, factor), live=True)


@rules_for("mul")
def multiply(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear with one live factor; with two, the gate rule or a convention decides what is held."""
    first, second = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if not (is_live(first) and is_live(second)):
        result = linear(run, function, args, kwargs)
        if is_live(result) and "gate" in (getattr(first, "role", None), getattr(second, "role", None)):
            result.role = "activated"  # z ⊙ σ(z): a swish, spelled out
        return result
    if first is second:
        return power(run, torch.square, (first,), {})
    if "activated" in (first.role, second.role) and first.role != second.role:
        gate, up = (first, second) if first.role == "activated" else (second, first)
        return mark(gated_product(run, gate, up), live=True)
    run.fire("product: half and half")
    result = 0.5 * (
        plain(first) * hold_value(run, "mul.second", second) + hold_value(run, "mul.first", first) * plain(second)
    )
    run.watch_product("half and half", result)
    return mark(result, live=True)


def gated_product(run: Interpreter, gate: Tensor, up: Tensor) -> Tensor:
    """φ(g) ⊙ u by the chosen gate rule; every choice gives the product once, not twice."""
    convention = run.rules.gate
    run.fire(f"gate: {convention}")
    by_up = plain(up) * hold_value(run, "gate", gate) if convention != "freeze_up" else None
    by_gate = plain(gate) * hold_value(run, "up", up) if convention != "freeze_gate" else None
    if by_up is None or by_gate is None:
        return by_gate if by_up is None else by_up  # type: ignore[return-value]
    return 0.5 * (by_up + by_gate)


def hold_value(run: Interpreter, operation: str, x: Tensor) -> Tensor:
    """The value of `x` in the recording."""
    return run.hold(operation, lambda: constant(x))


@rules_for("matmul bmm mm mv dot inner outer ger tensordot kron rmatmul")
def matrix_product(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear with one live factor. With two, the left one mixes and is held, the right one is carried.

    q·kᵀ comes this way too, where the choice is void because the softmax holds the result.
    """
    left, right = (*args, *kwargs.values())[:2]
    if name_of(function) == "rmatmul":
        function, left, right = torch.matmul, right, left
    rest = args[2:]
    if is_live(left) and is_live(right):
        run.fire("product: left factor held")
        result = mark(raw(function, hold_value(run, f"{name_of(function)}.left", left), right, *rest), live=True)
        run.watch_product("left factor held", result)
        return result
    result = linear(run, function, (left, right, *rest), {})
    if isinstance(left, Traced) and left.role == "attention" and is_live(right) and result.dim() == 4:
        return mark(run.mix_heads(plain(result)), live=True)
    return result


@rules_for("linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d grouped_mm _grouped_mm")
def weighted(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear layer, convolution or group of experts; a weight that is itself live is held."""
    x, weight = (*args, *kwargs.values())[:2]
    if is_live(x) and isinstance(weight, Tensor) and type(weight) not in (Tensor, nn.Parameter, Traced):
        # A quantised weight is a tensor type of its own, which must see the call.
        there = plain(x)
        named = {name: there if value is x else value for name, value in kwargs.items()}
        return mark(function(*(there if value is x else value for value in args), **named), live=True)
    if len(args) > 1 and is_live(args[1]):
        run.fire("product: weight held")
        args = (args[0], hold_value(run, f"{name_of(function)}.weight", args[1]), *args[2:])
    return linear(run, function, args, kwargs)


@rules_for("einsum")
def einstein_sum(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `matrix_product`: of several live operands, all but the last are held."""
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else list(args[1:])
    live = [i for i, operand in enumerate(operands) if is_live(operand)]
    for i in live[:-1]:
        run.fire("product: left factor held")
        operands[i] = hold_value(run, f"einsum.{i}", operands[i])
    result = linear(run, function, (args[0], *operands), kwargs)
    if len(live) > 1:
        run.watch_product("left factor held", result)
    return result


_FACTORS = ("mat1", "batch1", "tensor1", "mat", "end"), ("mat2", "batch2", "tensor2", "vec", "weight")


@rules_for("addmm baddbmm addbmm addmv addcmul addcdiv lerp")
def added_product(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """C + a·b: as `matrix_product`, with the quotient's denominator held."""
    name, operands, kwargs = name_of(function), list(args), dict(kwargs)
    for names in (("input",), *_FACTORS):
        operands += [kwargs.pop(key) for key in names if key in kwargs]
    base, left, right = operands[:3]
    if name == "addcdiv" and is_live(right):
        right = hold_value(run, f"{name}.denominator", right)
    elif is_live(left) and is_live(right) or name == "lerp" and is_live(right):
        run.fire("product: left factor held")
        factor = hold_value(run, f"{name}.held", right if name == "lerp" else left)
        left, right = (left, factor) if name == "lerp" else (factor, right)
    return linear(run, function, (base, left, right, *operands[3:]), kwargs)


@rules_for("linalg_solve_triangular linalg_solve")
def solve(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A⁻¹·b with A held."""
    matrix = args[0]
    if is_live(matrix):
        run.fire("product: left factor held")
        matrix = hold_value(run, name_of(function), matrix)
    return linear(run, function, (matrix, *args[1:]), kwargs)


@rules_for("div")
def divide(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A live denominator is a statistic: it is held."""
    numerator, denominator = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if kwargs.get("rounding_mode") or not (is_live(numerator) or is_live(denominator)):
        return frozen(run, function, args, kwargs) if is_live(numerator) else linear(run, function, args, kwargs)
    if is_live(denominator):
        run.fire("quotient: denominator held")
        denominator = hold_value(run, "div.denominator", denominator)
        if not is_live(numerator):
            return mark(raw(function, numerator, denominator), live=False)
    return linear(run, function, (numerator, denominator), {})


# Norms (Eq. 10, 11) --------------------------------------------------------------------------------------------------


@rules_for("layer_norm")
def layer_norm(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """γ ⊙ (x - mean(x))/σ + β with 1/σ held. The mean is not held: centring is linear."""
    return _layer_norm(run, *args, **kwargs)


def _layer_norm(run: Interpreter, input: Tensor, normalized_shape: Any, weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Traced:  # fmt: skip
    run.fire("norm: layer_norm")
    dims = tuple(range(-len(normalized_shape), 0))
    inverse_std = run.hold(
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
    run.fire("norm: rms_norm")
    dims = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    inverse_rms = run.hold(
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
    run.fire("norm: group_norm")
    x = at_least_float32(plain(input))
    grouped = x.reshape(x.shape[0], num_groups, -1)
    inverse_std = run.hold("group_norm", lambda: (constant(grouped).var(-1, correction=0, keepdim=True) + eps).rsqrt())
    y = ((grouped - grouped.mean(-1, keepdim=True)) * inverse_std).reshape(x.shape)
    channels = (1, -1) + (1,) * (x.dim() - 2)
    y = y if weight is None else y * weight.reshape(channels)
    y = y if bias is None else y + bias.reshape(channels)
    return mark(y.to(input.dtype), live=True)


@rules_for("normalize")
def normalize(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x/‖x‖ with the norm held."""
    run.fire("norm: normalize")
    x = args[0]
    inverse = run.hold("normalize", lambda: _inverse_norm(constant(x), *args[1:], **kwargs))
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
    run.fire(f"held: {name_of(function)}")
    spread, mean = raw(function, *args, **kwargs)
    return held(run, name_of(function), lambda: constant(spread)), mark(mean, live=True)
