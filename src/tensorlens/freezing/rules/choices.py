"""Decisions held as they are, and choices held while the chosen values stay live."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules.activations import activate_from, scale
from tensorlens.freezing.rules.linear import held, role_of_factors, role_of_reduced
from tensorlens.freezing.rules.table import name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, is_live, mark, plain, raw, type_of


@rules_for(
    "heaviside signbit "
    "eq ne lt le gt ge isnan isinf isfinite isclose allclose equal any all logical_not logical_and logical_or "
    "logical_xor "
    "bitwise_not bitwise_and bitwise_or bool argmax argmin argsort nonzero count_nonzero unique bincount "
    "histc bucketize searchsorted multinomial one_hot isin isreal linalg_matrix_rank"
)
def frozen(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result is a decision that the pass arrived at. It is held."""
    name = name_of(function)
    run.note_rule(f"held: {name}")
    return held(run, name, lambda: constants(raw(function, *args, **kwargs)))


def constants(value: Any) -> Any:
    """The values alone, in nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        return type(value)([constants(part) for part in value])
    return constant(value) if isinstance(value, Tensor) else value


@rules_for("sign sgn")
def direction(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """z/|z|: of real numbers an activation, which is what is held in a product."""
    if not type_of(args[0]).is_complex:
        return activate_from(run, "sign", args[0], torch.sign, "step")
    size = args[0].abs()
    return args[0] / torch.where(size == 0, 1, size)


FEW = 8
"""So many values of one tensor may decide something one by one; more, and most of it, are the tensor itself."""


@rules_for("item python_value")
def escape(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One value that leaves for Python, to decide something: always the recorded one."""
    run.note_rule(f"held: {name_of(function)}")
    if run.recording and type_of(args[0]).is_floating_point:
        n_left, n_values = run.count_left(args[0])
        if n_left >= FEW and 2 * n_left > n_values >= FEW:
            _refuse_leaving(name_of(function), n_left)
    return raw(function, run.keep_factor(name_of(function), lambda: constant(args[0])), *args[1:], **kwargs)


@rules_for("tolist numpy array")
def leave(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values that leave torch: what comes back from there would be taken for constants."""
    if type_of(args[0]).is_floating_point and args[0].numel() > 1:
        _refuse_leaving(name_of(function), args[0].numel())
    return escape(run, function, args, kwargs)


def _refuse_leaving(name: str, n_values: int) -> NoReturn:
    raise NotLinearError(
        f"`{name}` takes {n_values} values that depend on the input out of torch, where no rule sees what becomes of "
        "them. Expected torch functions all the way; write the step in torch, or register an adapter for the module's "
        "class with `tensorlens.adapter`."
    )


@rules_for("format", also_held=True)
def write(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A value that a model writes into a string, such as the name of an expert: always the recorded one."""
    value = run.keep_factor("format", lambda: constant(args[0])) if is_live(args[0]) else args[0]
    return raw(format, plain(value), *args[1:])


@rules_for("abs")
def absolute(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """|x| as x ⊙ sign(x) with the sign held; of complex numbers, the real part of x ⊙ conj(x/|x|)."""
    run.note_rule("sign: abs")
    aligned = scale(args[0], run.keep_factor("abs", lambda: constant(args[0]).sgn().conj().resolve_conj()))
    return mark(
        aligned.real.clone() if aligned.is_complex() else aligned,
        live=True,
        role=role_of_factors(run, args[0]) or "size",
    )


@rules_for("clamp clamp_min clamp_max")
def clamp(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Linear where the value passed, constant where it was cut."""
    if any(is_live(bound) for bound in (*args[1:], *kwargs.values())):
        return _between(name_of(function), *args, **kwargs)
    run.note_rule("piece: clamp")
    x = plain(args[0])
    cut = raw(function, *args, **kwargs)
    passed = run.keep_factor("clamp.passed", lambda: constant(cut) == constant(x))
    bound = run.keep_factor("clamp.bound", lambda: constant(cut))
    return mark(torch.where(passed, x, bound), live=True, role=role_of_factors(run, args[0]) or args[0].role)


def _between(name: str, x: Tensor, *bounds: Any, **named: Any) -> Any:
    """A clamp whose bounds are live: the larger, then the smaller of two."""
    names = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(name, ("min", "max"))
    given = dict(zip(names, bounds, strict=False)) | named
    for key, choose_one in (("min", torch.maximum), ("max", torch.minimum)):
        bound = given.get(key)
        if bound is not None:
            x = choose_one(x, bound if isinstance(bound, Tensor) else x.new_tensor(bound))
    return x


@rules_for("maximum minimum fmax fmin")
def choose(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """The larger or smaller of two, the choice held."""
    run.note_rule(f"piece: {name_of(function)}")
    both = (*args, *kwargs.values())[:2]
    first, second = (plain(value) for value in both)
    chosen = run.keep_factor(
        name_of(function), lambda: raw(function, constant(first), constant(second)) == constant(first)
    )
    return mark(torch.where(chosen, first, second), live=True, role=role_of_factors(run, *both))


@rules_for("sort topk kthvalue max min median mode cummax cummin")
def select(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values gathered at the recorded places."""
    name = name_of(function)
    if name in ("max", "min") and isinstance((*args, *kwargs.values(), None)[1], Tensor):
        return choose(run, torch.maximum if name == "max" else torch.minimum, args, kwargs)
    x, rest = (args[0], args[1:]) if args else (kwargs["input"], ())
    if name in ("max", "min", "median") and not rest and "dim" not in kwargs:
        return _of_all(run, function, x)
    run.note_rule(f"decision: {name}")
    result = raw(function, *args, **kwargs)
    places = run.keep_factor(name, lambda: constant(result[1]))
    dim = _dimension(name, args, kwargs)
    keeps_dim = places.dim() == x.dim()
    values = raw(torch.take_along_dim, x, places if keeps_dim else places.unsqueeze(dim), dim)
    values = values if keeps_dim else values.squeeze(dim)
    return type(result)((mark(values, live=True, role=role_of_reduced(run, x)), places))


def _dimension(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The `dim` of a selection; topk and kthvalue take k before it."""
    position = 2 if name in ("topk", "kthvalue") else 1
    return kwargs.get("dim", args[position] if len(args) > position else -1)


def _of_all(run: Interpreter, function: Any, x: Tensor) -> Traced:
    """The one value that a function chooses of all, by its recorded place."""
    run.note_rule(f"decision: {name_of(function)}")
    place, size = run.keep_factor(
        name_of(function), lambda: (raw(function, constant(x).reshape(-1), 0)[1], constant(x).numel())
    )
    samples = plain(x).reshape(-1, size)[:, place]
    # Of a batch of states each has its own, which must meet the others sample by sample.
    shape = () if len(samples) == 1 else (-1,) + (1,) * (x.dim() - 1)
    return mark(samples.reshape(shape), live=True, role=role_of_reduced(run, x))


@rules_for("amax amin aminmax")
def extreme(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest or smallest value over dimensions, gathered at its recorded place; the first one of equals."""
    name = name_of(function)
    if name == "aminmax":
        pair = (extreme(run, which, args, kwargs) for which in (torch.amin, torch.amax))
        return torch.return_types.aminmax(tuple(pair))  # type: ignore[attr-defined]
    x, rest = args[0], args[1:]
    dims = kwargs.get("dim", rest[0] if rest else ())
    keepdim = kwargs.get("keepdim", rest[1] if len(rest) > 1 else False)
    dims = (dims,) if isinstance(dims, int) else () if dims is None else tuple(dims)
    chosen = sorted(dim % x.dim() for dim in dims) or list(range(x.dim()))
    if len(chosen) == x.dim():
        value = _of_all(run, torch.max if name == "amax" else torch.min, x)
        return value.reshape((1,) * x.dim()) if keepdim and value.dim() == 0 else value
    run.note_rule(f"decision: {name}")
    kept = [dim for dim in range(x.dim()) if dim not in chosen]
    rows = plain(x).permute(*kept, *chosen).flatten(len(kept))
    places = run.keep_factor(name, lambda: (constant(rows) if name == "amax" else -constant(rows)).argmax(-1, True))
    values = torch.take_along_dim(rows, places, -1)[..., 0]
    for dim in chosen if keepdim else ():
        values = values.unsqueeze(dim)
    return mark(values, live=True, role=role_of_reduced(run, x))


@rules_for("max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d")
def max_pool(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest value of each window, gathered at its recorded place."""
    name = name_of(function)
    run.note_rule(f"decision: {name}")
    x, n_axes = args[0] if args else kwargs["input"], int(name[-2])
    gives_places = kwargs.get("return_indices", False) or "indices" in function.__name__
    options = {key: value for key, value in kwargs.items() if key not in ("input", "return_indices")}
    rest = args[1:2] if name.startswith("adaptive") else args[1:6]  # kernel, stride, padding, dilation, ceil_mode
    pool = getattr(F, f"{name}_with_indices")
    places = run.keep_factor(name, lambda: raw(pool, constant(x), *rest, **options)[1])
    values = torch.take_along_dim(plain(x).flatten(-n_axes), places.flatten(-n_axes), -1)
    values = mark(values.unflatten(-1, places.shape[-n_axes:]), live=True, role=role_of_factors(run, x))
    return (values, places) if gives_places else values
