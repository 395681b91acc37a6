"""Decisions, which are held, and choices, which are held while the chosen values stay live."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorlens.errors import NotLinearError
from tensorlens.recording.conventions import of_factors, of_largest
from tensorlens.recording.live import is_live, raw, role_of
from tensorlens.recording.tape import Tape, family, of_value


@of_value(
    "heaviside signbit eq ne lt le gt ge isnan isinf isneginf isposinf isfinite isclose allclose equal any all "
    "logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or argmax argmin argsort nonzero "
    "count_nonzero unique bincount histc bucketize searchsorted multinomial one_hot isin isreal linalg_matrix_rank "
    "_unique2 unique_dim is_nonzero"
)
def frozen(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result is a decision that the pass arrived at. It is held."""
    run.note(f"held: {name}")
    run.check_samples(name, args, kwargs)
    return run.decided(value)


MOST_ITEMS = 64
"""How many numbers of one module Python may read: a few are decisions, many mean that a tensor is being copied out."""


@family("item")
def escape(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One value read by Python for a decision: always the recorded one."""
    run.note("held: item")
    run.note_mixing("item")
    n_left = run.rules_applied["held: item", run.module]
    if n_left > MOST_ITEMS and args[0].dtype.is_floating_point:
        _refuse_leaving("item", n_left)
    return raw(function, *args, **kwargs)


@family("tolist numpy array dlpack dlpack_device data_ptr untyped_storage storage get:__cuda_array_interface__")
def leave(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse values that leave torch: the results would count as constants."""
    if args[0].dtype.is_floating_point and args[0].numel() > 1 and "device" not in name:
        _refuse_leaving(name, args[0].numel())
    return raw(function, *args, **kwargs)


def _refuse_leaving(name: str, n_values: int) -> NoReturn:
    raise NotLinearError(
        f"`{name}` takes {n_values} values that depend on the input out of torch, where no rule can follow "
        f"them. Expected torch functions throughout; write the step in torch, or register an adapter for the module's "
        "class with `tensorlens.adapter`."
    )


@of_value("clamp clamp_min clamp_max")
def clamp(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear where the value passed, constant where it was cut."""
    x = args[0]
    names = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(name, ("min", "max"))
    bounds = dict(zip(names, args[1:], strict=False)) | kwargs
    if any(is_live(bound) for bound in bounds.values()) or not is_live(x):
        return _between(x, bounds)
    run.note("piece: clamp")
    passed = raw(torch.eq, value, x)
    role = of_factors([x.role], run.rules) or x.role
    return run.emit("where", value, passed, x, raw(Tensor.clone, value), role=role)


def _between(x: Any, bounds: dict[str, Any]) -> Any:
    """A clamp with live bounds: the larger, then the smaller of two."""
    like = next(value for value in (x, *bounds.values()) if isinstance(value, Tensor))
    for key, choose_one in (("min", torch.maximum), ("max", torch.minimum)):
        bound = bounds.get(key)
        if bound is not None:
            bound = bound if isinstance(bound, Tensor) else raw(like.new_tensor, bound)
            x = choose_one(x, bound)
    return x


@of_value("maximum minimum fmax fmin")
def choose(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The larger or smaller of two, the choice held."""
    run.note(f"piece: {name}")
    first, second = (*args, *kwargs.values())[:2]
    is_first = raw(torch.eq, value, first)
    role = of_factors([x.role for x in (first, second) if is_live(x)], run.rules)
    return run.emit("where", value, is_first, first, second, role=role)


@of_value("sort topk kthvalue max min median mode cummax cummin")
def select_rule(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values gathered at the recorded places."""
    rest = (*args[1:], *kwargs.values())
    if name in ("max", "min") and rest and isinstance(rest[0], Tensor):
        return choose(run, f"{name}imum", value, args, kwargs)
    x = args[0]
    if name in ("max", "min", "median") and len(args) == 1 and "dim" not in kwargs:
        run.note_mixing(name)
        return getattr(torch, name)(x.reshape(-1), 0)[0]
    run.note(f"decision: {name}")
    run.check_samples(name, args, kwargs)
    values, places = value
    position = 2 if name in ("topk", "kthvalue") else 1
    dim = kwargs.get("dim", args[position] if len(args) > position and type(args[position]) is int else -1)
    role = of_largest(x.role, run.rules)
    if places.dim() == x.dim():
        found = run.emit("gather", values, x, dim, places, role=role)
    else:
        column = raw(torch.unsqueeze, places, dim)
        found = x.gather(dim, column).squeeze(dim)
        found.role = role
    return type(value)((found, run.decided(places)))


@family("amax amin")
def extreme(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest or smallest value over dimensions, gathered at its recorded place; the first one of equals."""
    x, rest = args[0], args[1:]
    dims = kwargs.get("dim", rest[0] if rest else ())
    keepdim = kwargs.get("keepdim", rest[1] if len(rest) > 1 else False)
    dims = (dims,) if isinstance(dims, int) else () if dims is None else tuple(dims)
    over = sorted(dim % x.dim() for dim in dims) or list(range(x.dim()))
    run.check_samples(name, args, {"dim": over})
    kept = [dim for dim in range(x.dim()) if dim not in over]
    rows = x.permute(*kept, *over).flatten(len(kept)) if kept else x.reshape(1, -1)
    values: Any = (torch.max if name == "amax" else torch.min)(rows, -1)[0]
    values = values if kept else values[0]
    for dim in over if keepdim else ():
        values = values.unsqueeze(dim)
    values.role = of_largest(x.role, run.rules)
    return values


@family("max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d")
def max_pool(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest value of each window, gathered at its recorded place."""
    run.note(f"decision: {name}")
    x, n_axes = args[0], int(name[-2])
    gives_places = kwargs.get("return_indices", False) or "indices" in str(function)
    options = {key: value for key, value in kwargs.items() if key != "return_indices"}
    rest = args[1:2] if name.startswith("adaptive") else args[1:6]  # kernel, stride, padding, dilation, ceil_mode
    _, places = raw(getattr(F, f"{name}_with_indices"), x, *rest, **options)
    values = x.flatten(-n_axes).gather(-1, raw(Tensor.flatten, places, -n_axes)).unflatten(-1, places.shape[-n_axes:])
    values.role = of_factors([role_of(x)], run.rules)
    return (values, places) if gives_places else values
