"""Whole numbers and 8-bit floats made of live values: indices and decisions are held, numbers stay live beside them.

A cast to such a type is a rounding, and what it rounds may be a place in a table, or the value itself (quantisation).
Only its use tells. So the coarse tensor is held, and carries along the live tensor `fine` of the same values: the
rounding as an activation (Eq. 13). Wherever it is used as a number, `fine` is used too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules.activations import activate_from
from tensorlens.freezing.rules.choices import constants, escape, frozen, write
from tensorlens.freezing.rules.in_place import own, refuse_coarse
from tensorlens.freezing.rules.linear import COARSE, CONTRACTIONS, FIRST_ONLY
from tensorlens.freezing.rules.replacements import hold_value
from tensorlens.freezing.rules.table import RULES, Rule, name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, is_factor, is_live, mark, raw

_PLACES = {
    "embedding": 0, "getitem": 1, "setitem": 1, "take": 1, "take_along_dim": 1, "index_put": 1, "repeat_interleave": 1,
    "gather": 2, "index_select": 2, "scatter": 2, "scatter_add": 2, "scatter_reduce": 2, "index_add": 2,
    "index_copy": 2, "index_fill": 2, "index_reduce": 2, "split": 1, "split_with_sizes": 1, "tensor_split": 1,
    "roll": 1, "narrow": 2,
}  # fmt: skip
"""Which argument of a function says where, and is no number that passes on."""
_NAMED_PLACES = frozenset(["index", "indices", "repeats", "split_size_or_sections", "shifts"])
_BITS = frozenset(["bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "and", "or", "xor"])


@rules_for("fake_quantize_per_tensor_affine fake_quantize_per_channel_affine")
def fake_quantised(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Rounding to a grid, as an activation; a step or an origin that is live is held."""
    name, shape = name_of(function), args[0].shape
    rest = [hold_value(run, f"{name}.{i}", value) if is_live(value) else value for i, value in enumerate(args[1:])]

    def rounded(v: Tensor) -> Tensor:
        return function(v if v.dim() else v.expand(shape), *rest, **kwargs)

    return activate_from(run, name, args[0], rounded, "factor" if is_factor(run, args[0]) else "activated")


def call_on_coarse(
    run: Interpreter, rule: Rule | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A function that takes a coarse tensor: `NotImplemented` where it takes it for a place or a decision."""
    name = name_of(function)
    if name in _BITS:
        raise NotLinearError(run.refusal(f"{name} of a live tensor cast to whole numbers"))
    if rule in (frozen, escape, write):
        return NotImplemented
    place = _PLACES.get(name.removesuffix("_"))
    numbers = tuple(value if i == place or (i and name in FIRST_ONLY) else _fine(value) for i, value in enumerate(args))
    named = {key: value if key in _NAMED_PLACES else _fine(value) for key, value in kwargs.items()}
    if all(a is b for a, b in zip((*args, *kwargs.values()), (*numbers, *named.values()), strict=True)):
        return NotImplemented
    if name == "setitem" or name.endswith("_") and name[:-1] in RULES:
        return _write(run, function, (args, kwargs), numbers, named)
    if name in CONTRACTIONS or name == "_int_mm":
        numbers = _as_floats(numbers)
    result = run.call(torch.mm if name == "_int_mm" else function, numbers, named)
    return _beside(run, name, run.keep_factor(name, lambda: constants(raw(function, *args, **kwargs))), result)


def _fine(value: Any) -> Any:
    """The live tensors in place of coarse ones; the same object where there are none."""
    if isinstance(value, (tuple, list)):
        found = [_fine(part) for part in value]
        return type(value)(found) if any(a is not b for a, b in zip(found, value, strict=True)) else value
    return value.fine if isinstance(value, Traced) and value.role == "coarse" else value


def _as_floats(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Whole weights as numbers of the type of what they meet."""
    dtype = next(raw(getattr, value, "dtype") for value in args if is_live(value))
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and not is_live(value) and value.dtype in COARSE else value
        for value in args
    )


def _write(run: Interpreter, function: Any, given: Any, numbers: Any, named: dict[str, Any]) -> Any:
    """A write of coarse numbers, or into them: what they carry along is written too."""
    args, kwargs = given
    target = args[0]
    if numbers[0] is target:
        refuse_coarse(run, name_of(function), target)
        return run.call(function, numbers, named)
    fine = numbers[0].clone()
    run.call(function, (fine, *numbers[1:]), named)
    raw(function, own(run, target), *args[1:], **kwargs)
    target.fine = _checked(run, name_of(function), constant(target), fine)
    return target


def _beside(run: Interpreter, name: str, exact: Any, result: Any) -> Any:
    """What came out coarse, with the live tensor that it is; what came out fine, live."""
    if isinstance(exact, (tuple, list)):
        return type(exact)([_beside(run, name, *pair) for pair in zip(exact, result, strict=True)])
    if not isinstance(exact, Tensor) or not is_live(result):
        return result
    if exact.dtype not in COARSE:
        return _checked(run, name, exact, result).to(exact.dtype)
    kept = mark(exact.view_as(exact), live=False, role="coarse")
    kept.fine = _checked(run, name, exact, result)
    return kept


def _checked(run: Interpreter, name: str, exact: Tensor, fine: Traced) -> Traced:
    """Whole numbers may overflow, where others do not."""
    if run.recording and not torch.allclose(constant(fine).double(), exact.double(), rtol=1e-5):
        raise NotLinearError(run.refusal(f"{name} of a live tensor cast to {exact.dtype}, which overflows or rounds"))
    return fine
