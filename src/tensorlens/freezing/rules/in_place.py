"""Writes: linear in the target and what is written together, and seen by all who look at the same memory."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules.linear import linear
from tensorlens.freezing.rules.table import IN_PLACE, RULES, find_rule, name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, is_live, mark, raw, traced_in


@rules_for("setitem", also_held=True)
def assign(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x[index] = y`: linear in x and y together."""
    _own(args[0])
    raw(function, *args, **kwargs)
    _spread(args[0], live=any(is_live(value) for value in (args[0], args[-1])))


@rules_for(IN_PLACE, also_held=True)
def in_place(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`x.f_(y)`: linear functions as they are; the rest as `x.copy_(f(x, y))` by the rule of f."""
    name = name_of(function)[:-1]
    target = _own(args[0])
    live = any(source.live for source in traced_in(args, kwargs))
    if RULES[name] in (linear, overwrite):
        raw(function, *args, **kwargs)
        live = live and name != "zero"
    else:
        # Of a copy: what the rule keeps of the target must not be written over.
        args = (_copy(target), *args[1:]) if is_live(target) else args
        result = RULES[name](run, getattr(Tensor, name, None) or getattr(torch, name), args, kwargs)
        raw(Tensor.copy_, target, result)
        live = is_live(result)
    return _spread(target, live=live)


@rules_for("fill zero copy")
def overwrite(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Known for their in-place forms `fill_`, `zero_` and `copy_`."""
    return linear(run, function, args, kwargs)


def write_out(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`f(…, out=y)` as `y.copy_(f(…))` by the rule of f."""
    target = kwargs["out"]
    rule = find_rule(name_of(function))
    if not isinstance(target, Tensor) or rule is None:
        raise NotLinearError(
            f"`{name_of(function)}` writes into `out=`, which no rule can follow here. Expected one tensor and a "
            "function with a rule; take the function's result instead."
        )
    rest = {key: value for key, value in kwargs.items() if key != "out"}
    live = any(source.live for source in traced_in(args, rest))
    result = rule(run, function, args, rest) if live else raw(function, *args, **rest)
    _own(target)
    if target.shape != result.shape:
        raw(Tensor.resize_, target, result.shape)
    raw(Tensor.copy_, target, result)
    return _spread(target, live=is_live(result))


def _copy(target: Any) -> Traced:
    return mark(raw(Tensor.clone, target), live=True, role=target.role)


def _own(target: Tensor) -> Tensor:
    """Before a write, a frozen tensor gets memory of its own: it may be a view of a factor on the tape."""
    if isinstance(target, Traced) and not target.live:
        raw(Tensor.set_, target, raw(Tensor.clone, target))
    return target


def _spread(target: Tensor, *, live: bool) -> Tensor:
    """After a write, the target is live, and so is every tensor that looks at the same memory."""
    if live and not is_live(target):
        base = raw(getattr, target, "_base")
        known = [target] if base is None else [target, base]
        for tensor in known if _n_sharing(target) <= len(known) else (*known, *_sharing(target)):
            if not is_live(tensor):
                mark(tensor, live=True)
    elif live:
        base = raw(getattr, target, "_base")
        if base is not None and not is_live(base):
            mark(base, live=True)
    return target


def _n_sharing(tensor: Tensor) -> int:
    """How many tensors share the memory, less the handle that asks."""
    storage = raw(Tensor.untyped_storage, tensor)
    return torch._C._storage_Use_Count(storage._cdata) - 1


def _sharing(tensor: Tensor) -> list[Tensor]:
    """Views that were made before the write: nobody keeps a list of them, so they are looked for."""
    address = raw(Tensor.untyped_storage, tensor).data_ptr()
    return [
        one
        for one in gc.get_objects()
        if type(one) in (Tensor, Traced)
        and raw(getattr, one, "layout") is torch.strided
        and raw(Tensor.untyped_storage, one).data_ptr() == address
    ]
