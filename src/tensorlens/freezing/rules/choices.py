"""Values held as they are, and choices held while the chosen values stay live."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorlens.freezing.rules.activations import scale
from tensorlens.freezing.rules.linear import held
from tensorlens.freezing.rules.table import name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, is_live, mark, plain, raw


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
    run.note_rule(f"held: {name}")
    role = "gate" if name in ("sigmoid", "hardsigmoid") else None
    return held(run, name, lambda: _constants(raw(function, *args, **kwargs)), role=role)


def _constants(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_constants(part) for part in value])
    return constant(value) if isinstance(value, Tensor) else value


@rules_for("item tolist python_value numpy")
def escape(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A value that leaves for Python: always the recorded one."""
    run.note_rule(f"held: {name_of(function)}")
    return raw(function, run.keep_factor(name_of(function), lambda: constant(args[0])), *args[1:], **kwargs)


@rules_for("format", also_held=True)
def write(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A value that a model writes into a string, such as the name of an expert: always the recorded one."""
    value = run.keep_factor("format", lambda: constant(args[0])) if is_live(args[0]) else args[0]
    return raw(format, plain(value), *args[1:])


@rules_for("softmax")
def softmax(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The attention matrix A (Eq. 7), held."""
    run.note_rule("attention: softmax")
    return held(run, "softmax", lambda: constant(raw(function, *args, **kwargs)), role="attention")


@rules_for("abs")
def absolute(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """|x| as x ⊙ sign(x) with the sign held; of complex numbers, the real part of x ⊙ conj(x/|x|)."""
    run.note_rule("sign: abs")
    aligned = scale(args[0], run.keep_factor("abs", lambda: constant(args[0]).sgn().conj().resolve_conj()))
    return mark(aligned.real.clone() if aligned.is_complex() else aligned, live=True)


@rules_for("clamp clamp_min clamp_max")
def clamp(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Linear where the value passed, constant where it was cut."""
    run.note_rule("piece: clamp")
    x = plain(args[0])
    cut = raw(function, *args, **kwargs)
    passed = run.keep_factor("clamp.passed", lambda: constant(cut) == constant(x))
    bound = run.keep_factor("clamp.bound", lambda: constant(cut))
    return mark(torch.where(passed, x, bound), live=True, role=args[0].role)


@rules_for("maximum minimum")
def choose(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """The larger or smaller of two, the choice held."""
    run.note_rule(f"piece: {name_of(function)}")
    first, second = (plain(value) for value in (*args, *kwargs.values())[:2])
    chosen = run.keep_factor(
        name_of(function), lambda: raw(function, constant(first), constant(second)) == constant(first)
    )
    return mark(torch.where(chosen, first, second), live=True)


@rules_for("sort topk kthvalue max min median mode cummax cummin")
def select(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values gathered at the recorded places; without a dimension, the extreme value is held."""
    name = name_of(function)
    run.note_rule(f"decision: {name}")
    if name in ("max", "min") and isinstance((*args, *kwargs.values(), None)[1], Tensor):
        return choose(run, torch.maximum if name == "max" else torch.minimum, args, kwargs)
    result = raw(function, *args, **kwargs)
    if isinstance(result, Tensor):
        return held(run, name, lambda: constant(result))
    places = run.keep_factor(name, lambda: constant(result[1]))
    dim = _dimension(name, args, kwargs)
    index = places if places.dim() == args[0].dim() else places.unsqueeze(dim)
    values = raw(torch.gather, args[0], dim, index).reshape(places.shape)
    return type(result)((mark(values, live=True), places))


def _dimension(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The `dim` of a selection; topk and kthvalue take k before it."""
    position = 2 if name in ("topk", "kthvalue") else 1
    return kwargs.get("dim", args[position] if len(args) > position else -1)
