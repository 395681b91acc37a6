"""Writes: linear in the target and what is written together, and seen by all who look at the same memory."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules.linear import COARSE, linear
from tensorlens.freezing.rules.table import IN_PLACE, RULES, Rule, find_rule, name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, address_of, is_live, mark, raw, traced_in


@rules_for("setitem", also_held=True)
def assign(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x[index] = y`: linear in x and y together."""
    if is_live(args[-1]):
        refuse_coarse(run, "setitem", args[0])
    own(run, args[0])
    _write(function, *args, **kwargs)
    _spread(args[0], live=any(is_live(value) for value in (args[0], args[-1])))


@rules_for(IN_PLACE, also_held=True)
def in_place(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`x.f_(y)`: linear functions as they are; the rest as `x.copy_(f(x, y))` by the rule of f."""
    name = name_of(function)[:-1]
    target = own(run, args[0])
    live = any(source.live for source in traced_in(args, kwargs))
    if live:
        refuse_coarse(run, name, target)
    if RULES[name] in (linear, overwrite):
        _write(function, *args, **kwargs)
        live = live and name != "zero"
    else:
        function = next(getattr(place, name) for place in (Tensor, torch, F) if hasattr(place, name))
        return write_back(run, RULES[name], function, args, kwargs)
    return _spread(target, live=live)


def write_back(run: Interpreter, rule: Rule, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`f(x, inplace=True)` as `x.copy_(f(x))` by the rule of f: others may look at x."""
    target = own(run, args[0])
    # Of a copy: what the rule keeps of the target must not be written over.
    result = rule(
        run, function, (_copy(target), *args[1:]), {key: value for key, value in kwargs.items() if key != "inplace"}
    )
    _write(Tensor.copy_, target, result)
    target = _spread(target, live=is_live(result))
    if isinstance(target, Traced):
        target.role = getattr(result, "role", None)
    return target


@rules_for("set:data set")
def refuse_other_memory(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x.data = y` lets x look at other memory, which no derivative follows."""
    raise NotLinearError(
        f"`x.data = y`, or `x.set_(y)`, with a live tensor in `{getattr(run, 'module', '')}`: what was computed from x "
        "before and what it holds now cannot be told apart. Write `x = y`, or `x.copy_(y)`."
    )


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
    if is_live(result):
        refuse_coarse(run, name_of(function), target)
    own(run, target)
    if target.shape != result.shape:
        raw(Tensor.resize_, target, result.shape)
    _write(Tensor.copy_, target, result)
    return _spread(target, live=is_live(result))


def refuse_coarse(run: Interpreter, name: str, target: Tensor) -> None:
    """Whole numbers and 8-bit floats that live values are written into: nothing written there is linear."""
    dtype = raw(getattr, target, "dtype")
    if dtype in COARSE or dtype == torch.bool:
        raise NotLinearError(
            f"`{name}` writes live values into a tensor of {dtype} in `{getattr(run, 'module', '')}`, which rounds "
            "them unseen. Make the tensor by a cast of what it is to hold, `x.to(dtype)`, which has a rule."
        )


def _write(function: Any, *args: Any, **kwargs: Any) -> None:
    try:
        raw(function, *args, **kwargs)
    except RuntimeError as error:
        if "multiple views" not in str(error):
            raise
        raise NotLinearError(
            f"`{name_of(function)}` writes into a part that `chunk`, `split` or `unbind` gave, through which torch "
            "takes no derivative. Write to a `.clone()` of the part, or out of place."
        ) from error


def _copy(target: Tensor) -> Tensor:
    copied = raw(Tensor.clone, target)
    return mark(copied, live=target.live, role=target.role) if isinstance(target, Traced) else copied


def own(run: Interpreter, target: Tensor) -> Tensor:
    """Before a write, the target gets memory apart from factors on the tape, and so does all that looks at it."""
    if is_live(target):
        if _n_sharing(target) > 1:
            run.protect_factors(target)
    elif isinstance(target, Traced) and _n_sharing(target) > 1:
        sharing = _sharing(target)
        if any(type(one) is Tensor for one in sharing):  # the tape's; what the model has is traced
            _move([one for one in sharing if isinstance(one, Traced) and not one.live])
    return target


def _move(tensors: list[Traced]) -> None:
    """Copy the memory that tensors share, and let them look at the copy as they looked at the first."""
    memory = raw(Tensor.untyped_storage, tensors[0]).clone()
    for one in tensors:
        look = (raw(getattr, one, name)() for name in ("storage_offset", "size", "stride"))
        raw(Tensor.set_, one, memory, *look)


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
    address = address_of(tensor)
    return [one for one in gc.get_objects() if type(one) in (Tensor, Traced) and address_of(one) == address]
