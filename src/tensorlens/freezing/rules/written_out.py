"""Functions written out in others that have rules, and those that are linear in one of their arguments alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules.linear import linear
from tensorlens.freezing.rules.norms import statistic
from tensorlens.freezing.rules.replacements import hold_value, taylor
from tensorlens.freezing.rules.table import name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, is_live, mark, plain, raw, traced_in


@rules_for("linalg_vecdot vdot")
def vector_product(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Products of vectors, as matrix products of one row and one column."""
    left, right = (*args, *(kwargs[name] for name in ("x", "y", "other") if name in kwargs))[:2]
    left, right = (value.movedim(kwargs.get("dim", -1), -1) for value in torch.broadcast_tensors(left, right))
    return (left.conj().unsqueeze(-2) @ right.unsqueeze(-1)).squeeze(-1).squeeze(-1)


@rules_for("linalg_cross cross")
def cross_product(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The products of its channels, each by its own rule."""
    given = dict(zip(("input", "other", "dim"), args, strict=False)) | kwargs
    left, right = torch.broadcast_tensors(given["input"], given["other"])
    first = next(axis for axis, size in enumerate(left.shape) if size == 3)
    default = first if name_of(function) == "cross" else -1
    dim = default if given.get("dim") is None else given["dim"]
    return left.roll(-1, dim) * right.roll(1, dim) - left.roll(1, dim) * right.roll(-1, dim)


@rules_for("linalg_multi_dot chain_matmul linalg_matrix_power matrix_power")
def several_products(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One matrix product after the other, from the left."""
    if "power" not in name_of(function):
        return functools.reduce(torch.matmul, args if len(args) > 1 else (*args, *kwargs.values())[0])
    matrix, n = (*args, *kwargs.values())[:2]
    if n == 0:
        return raw(function, matrix, 0)
    return functools.reduce(torch.matmul, [matrix if n > 0 else torch.linalg.inv(matrix)] * abs(n))


@rules_for("bilinear")
def bilinear(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """$y_o = a^T W_o b$ by the rule of sums of products."""
    names = ("input1", "input2", "weight", "bias")
    first, second, weight, bias = (dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs).values()
    result = torch.einsum("...i,oij,...j->...o", first, weight, second)
    return result if bias is None else result + bias


@rules_for("addr")
def added_outer_product(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """βC + α·a bᵀ."""
    base, left, right = (*args, *(kwargs[name] for name in ("vec1", "vec2") if name in kwargs))
    return kwargs.get("beta", 1) * base + kwargs.get("alpha", 1) * torch.outer(left, right)


@rules_for("polar")
def polar(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """|z|·exp(iφ) by its real and imaginary parts."""
    size, angle = (*args, *kwargs.values())[:2]
    return torch.complex(size * torch.cos(angle), size * torch.sin(angle))


@rules_for("copysign")
def signed_as_other(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """|x| with the sign of another held; a number has a sign at zero too."""
    size, other = (*args, *kwargs.values())[:2]
    other = other if isinstance(other, Tensor) else size.new_tensor(other)
    return torch.where(torch.signbit(other), -abs(size), abs(size))


@rules_for("embedding")
def rows_of_table(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a live table. What an embedding does to gradients alone (`padding_idx`) is no part of its value."""
    names = ("input", "weight", "padding_idx", "max_norm")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("max_norm") is not None:
        raise NotLinearError(run.refusal("embedding with max_norm"))
    return given["weight"][given["input"]]


@rules_for("new_tensor new_full full_like")
def filled(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy of a live tensor, which cuts the gradient alone; live numbers torch takes only where it follows none."""
    name, given = name_of(function), [*args[1:], *kwargs.values()]
    if not traced_in(given):
        return raw(function, *args, **kwargs)
    if name != "new_tensor" or not isinstance(given[0], Tensor):
        raise NotLinearError(
            f"{run.refusal(name)} Of a live number, `x.expand(shape)` makes a live tensor; of several, `torch.stack`."
        )
    like, value = args[0], given[0]
    dtype, device = kwargs.get("dtype") or value.dtype, kwargs.get("device") or like.device
    return value.to(device=device, dtype=dtype, copy=True)


@rules_for(
    "trapezoid trapz cumulative_trapezoid gradient ldexp stft istft max_unpool1d max_unpool2d max_unpool3d "
    "affine_grid segment_reduce put cholesky_solve linalg_lu_solve linalg_tensorsolve"
)
def linear_in_one(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear in what is summed, moved or solved for, while all else is held: steps, exponents, places, matrices."""
    name, sources = name_of(function), traced_in(args, kwargs)
    place = {"linalg_lu_solve": 2, "linalg_tensorsolve": 1}.get(name, 0)
    is_sum = name != "segment_reduce" or "sum" in (*args[1:], *kwargs.values())
    if len(args) <= place or any(source.live and source is not args[place] for source in sources) or not is_sum:
        raise NotLinearError(run.refusal(f"{name} with a second live argument" if is_sum else name))
    return linear(run, function, args, kwargs, sources)


@rules_for("grid_sample")
def sampled(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear in the picture. Where it is looked at is held like attention, or followed by the derivative."""
    given = dict(zip(("input", "grid"), args, strict=False)) | kwargs
    picture, grid, rest = given.pop("input"), given.pop("grid"), args[2:]
    if not is_live(grid):
        return linear(run, function, (picture, grid, *rest), given)
    if run.rules.attention == "taylor":
        run.note_rule("derivative: grid_sample")
        live = [value for value in (picture, grid) if is_live(value)]

        def look(*values: Tensor) -> Tensor:
            found = values if len(values) == 2 else (plain(picture), *values)
            return function(*found, *rest, **given)

        return mark(taylor(run, "grid_sample", look, *live), live=True)
    run.note_rule("held: grid_sample")
    grid = mark(hold_value(run, "grid_sample", grid).clone(), live=False)
    return linear(run, function, (picture, grid, *rest), given)


@rules_for("logcumsumexp")
def running_log_sum(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A statistic; where those are live its steps, since torch's second derivative of it is not finite."""
    x, dim = (*args, *kwargs.values())[:2]
    if run.rules.norm != "taylor":
        return statistic(run, function, (x, dim), {})
    top = hold_value(run, "logcumsumexp", x).amax(dim, keepdim=True)
    return (x - top).exp().cumsum(dim).log() + top


@rules_for("msort")
def sorted_rows(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """By the rule of `sort`."""
    return args[0].sort(0).values


@rules_for("grad backward _make_dual")
def refuse_derivatives(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A derivative of live values inside the model: what it is made of has rules, the derivative has none."""
    raise NotLinearError(
        "The model differentiates live values inside its own forward (`torch.autograd.grad`, `backward` or "
        "`torch.func`), and no rule says what the operator carries through a derivative. Write the derivative out in "
        f"plain torch functions. {run.refusal(name_of(function))}"
    )
