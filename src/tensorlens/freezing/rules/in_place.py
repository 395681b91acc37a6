"""Writes in place: linear in the target and what is written together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorlens.freezing.rules.linear import linear
from tensorlens.freezing.rules.table import IN_PLACE, RULES, name_of, rules_for
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
        result = RULES[name](run, getattr(Tensor, name, None) or getattr(torch, name), args, kwargs)
        raw(Tensor.copy_, target, result)
        live = is_live(result)
    return _spread(target, live=live)


@rules_for("fill zero copy")
def overwrite(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Known for their in-place forms `fill_`, `zero_` and `copy_`."""
    return linear(run, function, args, kwargs)


def _own(target: Tensor) -> Tensor:
    """Before a write, a frozen tensor gets memory of its own: it may be a view of a factor on the tape."""
    if isinstance(target, Traced) and not target.live:
        raw(Tensor.set_, target, raw(Tensor.clone, target))
    return target


def _spread(target: Tensor, *, live: bool) -> Tensor:
    """After a write, the target is live, and so is the tensor that it is a view of."""
    if live:
        base = raw(getattr, target, "_base")
        for tensor in (target, base):
            if tensor is not None and not is_live(tensor):
                mark(tensor, live=True)
    return target
