"""Products, powers and quotients of live tensors: which factor is held, and in which the result stays linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.freezing.rules.activations import scale
from tensorlens.freezing.rules.choices import frozen
from tensorlens.freezing.rules.linear import linear
from tensorlens.freezing.rules.table import name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, is_live, mark, plain, raw
from tensorlens.models.precision import at_least_float32


@rules_for("pow square float_power")
def power(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x^p as x ⊙ x^(p-1) with the second factor held, for p ≥ 1; any other power is held whole."""
    x: Any
    x, exponent = (*args, *kwargs.values(), 2)[:2]
    if not is_live(x) or isinstance(exponent, Tensor) and exponent.numel() != 1 or float(exponent) < 1:
        return frozen(run, function, args, kwargs)
    run.note_rule("product: power")
    base, rest = at_least_float32(constant(x)), float(exponent) - 1
    factor = run.keep_factor("pow", lambda: base if rest == 1 else base**rest)
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
    run.note_rule("product: half and half")
    result = 0.5 * (
        plain(first) * hold_value(run, "mul.second", second) + hold_value(run, "mul.first", first) * plain(second)
    )
    run.watch_product("half and half", result)
    return mark(result, live=True)


def gated_product(run: Interpreter, gate: Tensor, up: Tensor) -> Tensor:
    """φ(g) ⊙ u by the chosen gate rule; every choice gives the product once, not twice."""
    convention = run.rules.gate
    run.note_rule(f"gate: {convention}")
    by_up = plain(up) * hold_value(run, "gate", gate) if convention != "freeze_up" else None
    by_gate = plain(gate) * hold_value(run, "up", up) if convention != "freeze_gate" else None
    if by_up is None or by_gate is None:
        return by_gate if by_up is None else by_up  # type: ignore[return-value]
    return 0.5 * (by_up + by_gate)


def hold_value(run: Interpreter, operation: str, x: Tensor) -> Tensor:
    """The value of `x` in the recording."""
    return run.keep_factor(operation, lambda: constant(x))


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
        run.note_rule("product: left factor held")
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
        run.note_rule("product: weight held")
        args = (args[0], hold_value(run, f"{name_of(function)}.weight", args[1]), *args[2:])
    return linear(run, function, args, kwargs)


@rules_for("einsum")
def einstein_sum(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `matrix_product`: of several live operands, all but the last are held."""
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else list(args[1:])
    live = [i for i, operand in enumerate(operands) if is_live(operand)]
    for i in live[:-1]:
        run.note_rule("product: left factor held")
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
        run.note_rule("product: left factor held")
        factor = hold_value(run, f"{name}.held", right if name == "lerp" else left)
        left, right = (left, factor) if name == "lerp" else (factor, right)
    return linear(run, function, (base, left, right, *operands[3:]), kwargs)


@rules_for("linalg_solve_triangular linalg_solve")
def solve(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A⁻¹·b with A held."""
    matrix = args[0]
    if is_live(matrix):
        run.note_rule("product: left factor held")
        matrix = hold_value(run, name_of(function), matrix)
    return linear(run, function, (matrix, *args[1:]), kwargs)


@rules_for("div")
def divide(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A live denominator is a statistic: it is held."""
    numerator, denominator = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if kwargs.get("rounding_mode") or not (is_live(numerator) or is_live(denominator)):
        return frozen(run, function, args, kwargs) if is_live(numerator) else linear(run, function, args, kwargs)
    if is_live(denominator):
        run.note_rule("quotient: denominator held")
        denominator = hold_value(run, "div.denominator", denominator)
        if not is_live(numerator):
            return mark(raw(function, numerator, denominator), live=False)
    return linear(run, function, (numerator, denominator), {})
