"""Products, powers and quotients of live tensors: what is held, and in what the result stays linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.freezing.rules.activations import activate_from, scale
from tensorlens.freezing.rules.choices import frozen
from tensorlens.freezing.rules.linear import linear
from tensorlens.freezing.rules.norms import statistic
from tensorlens.freezing.rules.replacements import hold_value, product, taylor
from tensorlens.freezing.rules.table import name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, is_factor, is_live, mark, plain, raw
from tensorlens.models.precision import at_least_float32


@rules_for("pow square float_power")
def power(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x^p as x ⊙ x^(p-1) with the second factor held, for p ≥ 1; any other power is a statistic."""
    x: Any
    x, exponent = (*args, *kwargs.values(), 2)[:2]
    if not is_live(x) or isinstance(exponent, Tensor) and (exponent.numel() != 1 or is_live(exponent)):
        return statistic(run, function, args, kwargs)
    if float(exponent) < 1:
        return statistic(run, function, (x, exponent), {})
    if "taylor" in (run.rules.norm, run.rules.activation):
        run.note_rule("power: derivative")
        role = x.role if is_factor(run, x) else None
        return mark(taylor(run, "pow", lambda v: v**exponent, x), live=True, role=role)
    if is_factor(run, x):
        return activate_from(run, "pow", x, lambda v: v**exponent, "factor")
    run.note_rule("product: power")
    base, rest = at_least_float32(constant(x)), float(exponent) - 1
    factor = run.keep_factor("pow", lambda: base if rest == 1 else base**rest)
    return mark(scale(x, factor), live=True)


def _choice(run: Interpreter, first: Traced, second: Traced) -> str | None:
    """How a product that has a live factor in it is replaced, or None for the convention of other products."""
    roles = first.role, second.role
    if "statistic" in roles:
        return "taylor"  # alive only where `norm` says so
    if not (is_factor(run, first) or is_factor(run, second)):
        return None
    for role, is_held in (("scale", run.rules.gate not in ("half", "taylor")), ("step", True)):
        if is_held and role in roles and roles != (role, role):
            return "first held" if first.role == role else "second held"
    if run.rules.gate in ("half", "taylor"):
        return run.rules.gate
    return (
        "both held"
        if is_factor(run, first) and is_factor(run, second)
        else "first held"
        if is_factor(run, first)
        else "second held"
    )


def settle(run: Interpreter, name: str, value: Any) -> Any:
    """A live factor as what it was in the recording, held from here on."""
    if not is_factor(run, value):
        return value
    run.note_rule("factor: held")
    kept = run.keep_factor(f"{name}.factor", lambda: constant(value))
    return mark(kept.view_as(kept), live=False, role="gate" if value.role == "gate" else None)


@rules_for("mul")
def multiply(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear with one live factor; with two, roles and the gate rule decide what is held."""
    first, second = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if not (is_live(first) and is_live(second)):
        result = linear(run, function, (first, second), {})
        if (
            is_live(result)
            and not is_factor(run, result)
            and "gate" in [getattr(x, "role", None) for x in (first, second) if not is_live(x)]
        ):
            result.role = "activated"  # z ⊙ σ(z): a swish, spelled out
        return result
    if first is second:
        return power(run, torch.square, (first,), {})
    choice = _choice(run, first, second)
    if choice in ("both held", "first held", "second held"):
        sides = {"both held": (True, True), "first held": (True, False), "second held": (False, True)}[choice]
        held = (settle(run, "mul", x) if side else x for x, side in zip((first, second), sides, strict=True))
        return multiply(run, function, tuple(held), {})
    if choice is None and "activated" in (first.role, second.role) and first.role != second.role:
        gate, up = (first, second) if first.role == "activated" else (second, first)
        return mark(gated_product(run, gate, up), live=True)
    return _by_convention(run, first, second, choice)


def _by_convention(run: Interpreter, first: Traced, second: Traced, choice: str | None) -> Traced:
    """Two live tensors without a role, or whose factor the rules keep alive."""
    kind = choice or ("taylor" if run.rules.gate == "taylor" else "half")
    run.note_rule("product: half and half" if kind == "half" else f"product: {kind}")
    names = ("mul.first", "mul.second")
    result = product(run, names, torch.mul, first, second, kind)
    if choice is None and run.rules.gate not in ("half", "taylor"):
        run.watch_product("half and half", result)
    of_norm = "statistic" in (first.role, second.role) and is_factor(run, first) and is_factor(run, second)
    return mark(result, live=True, role="statistic" if of_norm else None)


def gated_product(run: Interpreter, gate: Tensor, up: Tensor) -> Tensor:
    """φ(g) ⊙ u by the chosen gate rule; every choice gives the product once, not twice."""
    convention = run.rules.gate
    run.note_rule(f"gate: {convention}")
    choice = {"freeze_gate": "second held", "freeze_up": "first held"}.get(convention, convention)
    return product(run, ("up", "gate"), torch.mul, up, gate, choice)


@rules_for("matmul bmm mm mv dot inner outer ger tensordot kron rmatmul _sparse_mm")
def matrix_product(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear with one live factor. With two, the left one mixes and is held, the right one is carried.

    q·kᵀ comes this way too, where holding is void because the softmax holds the result. With attention live both follow
    `Rules.attention`.
    """
    left, right = (*args, *kwargs.values())[:2]
    if name_of(function) == "rmatmul":
        function, left, right = torch.matmul, right, left
    rest = (*args, *(value for key, value in kwargs.items() if key != "out"))[2:]
    is_attention = isinstance(left, Traced) and left.role == "attention"
    result = _matrix_product(run, function, left, right, rest)
    if is_attention and is_live(result) and result.dim() == 4:
        return mark(run.mix_heads(plain(result)), live=True)
    return result


def _matrix_product(run: Interpreter, function: Any, left: Any, right: Any, rest: tuple[Any, ...]) -> Any:
    name = name_of(function)
    if not (is_live(left) and is_live(right)):
        return linear(run, function, (left, right, *rest), {})
    choice = _matrix_choice(run, left, right)
    if choice == "both held":
        return linear(run, function, (settle(run, name, left), settle(run, name, right), *rest), {})
    run.note_rule({"first held": "product: left factor held"}.get(choice, f"product: {choice}"))
    names = f"{name}.left", f"{name}.right"
    result = mark(product(run, names, lambda a, b: raw(function, a, b, *rest), left, right, choice), live=True)
    if not (is_factor(run, left) or is_factor(run, right)) and choice == "first held":
        run.watch_product("left factor held", result)
    return result


def _matrix_choice(run: Interpreter, left: Traced, right: Traced) -> str:
    """Attention and what has no role follow `attention`; a gate or a statistic has a rule of its own."""
    if "attention" in (left.role, right.role) and run.rules.attention != "hold":
        return run.rules.attention
    choice = _choice(run, left, right)
    return choice or ("first held" if run.rules.attention == "hold" else run.rules.attention)


@rules_for("linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d grouped_mm _grouped_mm")
def weighted(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear layer, convolution or group of experts; a weight that is live as its input is gets held."""
    named = next((key for key in ("weight", "mat2", "mat_b") if key in kwargs), None)
    if named is not None:
        args, kwargs = (*args, kwargs[named]), {key: value for key, value in kwargs.items() if key != named}
    x, weight = args[:2]
    if is_live(x) and isinstance(weight, Tensor) and type(weight) not in (Tensor, nn.Parameter, Traced):
        # A quantised weight is a tensor type of its own, which must see the call.
        return mark(function(plain(x), *args[1:], **kwargs), live=True)
    if is_live(x) and is_live(weight):
        if run.rules.gate in ("half", "taylor"):
            run.note_rule(f"product: {run.rules.gate}")
            names = f"{name_of(function)}.input", f"{name_of(function)}.weight"
            both = product(run, names, lambda a, b: raw(function, a, b, *args[2:], **kwargs), x, weight, run.rules.gate)
            return mark(both, live=True)
        run.note_rule("product: weight held")
        args = (x, hold_value(run, f"{name_of(function)}.weight", weight), *args[2:])
    return linear(run, function, args, kwargs)


@rules_for("einsum")
def einstein_sum(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `matrix_product`, two live operands at a time; of several live ones that are held, all but the last."""
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else list(args[1:])
    live = [i for i, operand in enumerate(operands) if is_live(operand)]
    if len(live) > 1 and all(not is_factor(run, operands[i]) for i in live[:-1]) and is_factor(run, operands[live[-1]]):
        live = [live[-1], *live[:-1]]  # the factor is what is held
    if len(live) > 1 and _einsum_choice(run, operands, live) in ("half", "taylor"):
        return _live_einsum(run, args[0], operands, live)
    if len(live) > 1 and all(is_factor(run, operands[i]) for i in live):
        return linear(run, function, (args[0], *(settle(run, "einsum", operand) for operand in operands)), kwargs)
    has_factor = any(is_factor(run, operands[i]) for i in live)
    for i in live[:-1]:
        run.note_rule("product: left factor held")
        operands[i] = hold_value(run, f"einsum.{i}", operands[i])
    result = linear(run, function, (args[0], *operands), kwargs)
    if len(live) > 1 and not has_factor:
        run.watch_product("left factor held", result)
    return result


def _einsum_choice(run: Interpreter, operands: list[Any], live: list[int]) -> str:
    choices = {_matrix_choice(run, operands[i], operands[live[-1]]) for i in live[:-1]}
    return next((choice for choice in ("taylor", "half") if choice in choices), "first held")


def _live_einsum(run: Interpreter, equation: Any, operands: list[Any], live: list[int]) -> Traced:
    choice = _einsum_choice(run, operands, live)
    run.note_rule(f"product: {choice}")

    def multiply(*factors: Tensor) -> Tensor:
        given = [plain(value) for value in operands]
        for i, factor in zip(live, factors, strict=True):
            given[i] = factor
        return torch.einsum(equation, *given)

    if len(live) == 2:
        names = f"einsum.{live[0]}", f"einsum.{live[1]}"
        found = product(run, names, multiply, operands[live[0]], operands[live[1]], choice)
    else:  # of more than two, each follows with weight one
        found = taylor(run, "einsum", multiply, *(operands[i] for i in live))
    return mark(found, live=True)


_FACTORS = ("mat1", "batch1", "tensor1", "mat", "end"), ("mat2", "batch2", "tensor2", "vec", "weight")


@rules_for("addmm baddbmm addbmm addmv addcmul addcdiv lerp")
def added_product(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """C + a·b: linear if at most one of the factors is live, and otherwise taken apart for the rules of its parts."""
    name, operands, kwargs = name_of(function), list(args), dict(kwargs)
    for names in (("input",), *_FACTORS):
        operands += [kwargs.pop(key) for key in names if key in kwargs]
    base, left, right = operands[:3]
    if is_live(right) and (is_live(left) or name in ("addcdiv", "lerp")):
        if name == "addcmul" or _added_choice(run, name, left, right) in ("half", "taylor"):
            return _taken_apart(name, base, left, right, kwargs)
        if name in ("addcdiv", "lerp") or is_factor(run, right) and not is_factor(run, left):
            right = hold_value(run, f"{name}.held", right)
        else:
            left = hold_value(run, f"{name}.held", left)
            right = settle(run, name, right)
        run.note_rule("product: left factor held")
    return linear(run, function, (base, left, right, *operands[3:]), kwargs)


def _added_choice(run: Interpreter, name: str, left: Any, right: Traced) -> str:
    if name in ("addcmul", "lerp"):
        return run.rules.gate
    return run.rules.norm if name == "addcdiv" else _matrix_choice(run, left, right)


def _taken_apart(name: str, base: Any, left: Any, right: Any, options: dict[str, Any]) -> Any:
    """The same as several functions, each with its own rule."""
    beta, alpha = options.get("beta", 1), options.get("alpha", options.get("value", 1))
    if name == "lerp":
        return base + right * (left - base)
    if name in ("addcmul", "addcdiv"):
        return base + alpha * (left * right if name == "addcmul" else left / right)
    mixed = torch.matmul(left, right)
    return beta * base + alpha * (mixed.sum(0) if name == "addbmm" else mixed)


@rules_for("linalg_solve_triangular linalg_solve")
def solve(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A⁻¹·b with A held, or by its derivative where gates are."""
    matrix = args[0]
    if is_live(matrix):
        if run.rules.gate == "taylor" and is_live(args[1]):
            return mark(
                taylor(run, name_of(function), lambda a, b: function(a, b, *args[2:], **kwargs), *args[:2]), live=True
            )
        run.note_rule("product: left factor held")
        matrix = hold_value(run, name_of(function), matrix)
    return linear(run, function, (matrix, *args[1:]), kwargs)


@rules_for("div")
def divide(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A live denominator is a statistic: held, or by its derivative where norms are."""
    numerator, denominator = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if kwargs.get("rounding_mode"):
        return whole_quotient(run, function, args, kwargs)
    if not is_live(denominator):
        return linear(run, function, (numerator, denominator), {})
    if run.rules.norm == "taylor":
        return _live_quotient(run, numerator, denominator)
    run.note_rule("quotient: denominator held")
    denominator.role = denominator.role or "scale"
    denominator = hold_value(run, "div.denominator", denominator)
    if not is_live(numerator):
        return mark(raw(function, numerator, denominator), live=False)
    return linear(run, function, (numerator, denominator), {})


@rules_for("floor_divide")
def whole_quotient(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A quotient rounded to a whole number: an activation of the numerator, as `floor` is."""
    numerator, denominator = args[0], args[1] if len(args) > 1 else kwargs["other"]
    options = {key: value for key, value in kwargs.items() if key != "other"}
    if not is_live(numerator):
        return frozen(run, function, args, kwargs)
    if is_live(denominator):
        denominator = hold_value(run, "div.denominator", denominator)
    role = "factor" if is_factor(run, numerator) else "activated"
    return activate_from(run, name_of(function), numerator, lambda v: function(v, denominator, **options), role)


def _live_quotient(run: Interpreter, numerator: Any, denominator: Traced) -> Traced:
    run.note_rule("quotient: derivative")
    if is_live(numerator):
        role = numerator.role if is_factor(run, numerator) else None
        return mark(taylor(run, "div", torch.div, numerator, denominator), live=True, role=role)
    value = plain(numerator) if isinstance(numerator, Tensor) else numerator
    return mark(taylor(run, "div", lambda d: torch.div(value, d), denominator), live=True, role="statistic")
