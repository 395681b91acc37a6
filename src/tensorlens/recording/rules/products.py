"""Products, powers and quotients of live tensors: which factor is held, and in which the result stays linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.program.steps import at_least_float32
from tensorlens.recording.conventions import Role, is_factor, of_matrix_product, of_product
from tensorlens.recording.live import (
    FOLLOWED,
    Live,
    is_live,
    no_kernels,
    now,
    quiet,
    raw,
    role_of,
    spec_of,
    value_of,
)
from tensorlens.recording.rules.attention import without_sink
from tensorlens.recording.rules.linear import role_after
from tensorlens.recording.rules.modules import parts_of
from tensorlens.recording.rules.nonlinear import activate_from, by_derivative, moving, scaled, statistic, tangent
from tensorlens.recording.tape import Tape, family, of_value, rule

WEIGHTS: dict[str, tuple[float, float]] = {
    "first held": (0.0, 1.0),
    "second held": (1.0, 0.0),
    "half": (0.5, 0.5),
    "taylor": (1.0, 1.0),
}
"""Shares of a product that follow its first and its second factor."""


def settled(value: Any) -> Any:
    """The value of a live factor, held from here on; anything else unchanged."""
    if not (is_live(value) and is_factor(value.role, now.tape.rules)):
        return value
    now.tape.note("factor: held")
    plain = value_of(value)
    return now.tape.held(plain, Role.GATE) if value.role is Role.GATE else plain


@of_value("mul")
def multiply(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear with one live factor; with two, roles and the gate rule decide which one is held."""
    a, b = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if type(a) is not Live or type(b) is not Live:
        x, factor = (a, b) if type(a) is Live else (b, a)
        role = x.role and role_after("mul", x)
        if type(factor) in FOLLOWED:
            if factor.role is Role.GATE and not is_factor(role, run.rules):
                role = Role.ACTIVATED  # z ⊙ σ(z): a swish, spelled out
            factor = value_of(factor)
        return run.emit("mul", value, x if x.spec.dtype is value.dtype else x.to(value.dtype), factor, role=role)
    if a is b or run.slot_of(a) == run.slot_of(b) and a.shape == b.shape:
        return power(run, torch.square, "square", (a,), {})
    how = of_product(a.role, b.role, run.rules)
    if how in ("both held", "first held", "second held"):
        a = settled(a) if how != "second held" else a
        b = settled(b) if how != "first held" else b
        return torch.mul(a, b) if is_live(a) or is_live(b) else value
    if how is None and Role.ACTIVATED in (a.role, b.role) and a.role is not b.role:
        gate, up = (a, b) if a.role is Role.ACTIVATED else (b, a)
        return gated(gate, up, value)
    return _by_convention(a, b, how, value)


def _by_convention(a: Live, b: Live, how: str | None, value: Tensor) -> Live:
    """A product of two live tensors without a role, or with a factor that the rules keep live."""
    run = now.tape
    kind = how or ("taylor" if run.rules.gate == "taylor" else "half")
    run.note("product: half and half" if kind == "half" else f"product: {kind}")
    note = "half and half" if how is None and run.rules.gate not in ("half", "taylor") else None
    of_norm = Role.STATISTIC in (a.role, b.role) and all(is_factor(x.role, run.rules) for x in (a, b))
    return product(value, "mul", a, b, kind, role=Role.STATISTIC if of_norm else None, note=note)


def gated(gate: Live, up: Live, value: Tensor) -> Live:
    """φ(g) ⊙ u by the chosen gate rule; every choice gives the product once, not twice."""
    convention = now.tape.rules.gate
    now.tape.note(f"gate: {convention}")
    how = {"freeze_gate": "second held", "freeze_up": "first held"}.get(convention) or convention
    return product(value, "mul", up, gate, how)


def product(
    value: Tensor,
    operation: str,
    a: Live,
    b: Live,
    how: str,
    *,
    role: Role | None = None,
    note: str | None = None,
) -> Live:
    r"""$w_a\, a b^0 + w_b\, a^0 b + (1 - w_a - w_b)\, a^0 b^0$: a bilinear operation, with the weights of `WEIGHTS`."""
    run = now.tape
    of_a, of_b = WEIGHTS[how]
    if not of_a:
        return run.emit(operation, value, value_of(a), b, role=role, note=note)
    if not of_b:
        return run.emit(operation, value, a, value_of(b), role=role, note=note)
    spec = spec_of(value)
    first, second = (raw(torch.mul, x, w) if w != 1 else value_of(x) for x, w in ((a, of_b), (b, of_a)))
    parts = (
        run.emit(operation, spec, a, second, note=note),
        run.emit(operation, spec, first, b, note=note),
    )
    if of_a + of_b == 1:
        return run.emit("add", value, *parts, role=role, note=note)
    both = run.emit("add", spec, *parts, note=note)
    return run.emit("sub", value, both, raw(Tensor.clone, value), role=role, note=note)


def product_by_kernel(
    function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], factors: tuple[int, int], how: str
) -> Any:
    """A kernel that is linear in each of two arguments; `how` both are treated as in `WEIGHTS`, or ``"both held"``."""
    value = raw(function, *args, **kwargs)
    if not all(is_live(args[place]) for place in factors):
        return moving(function, name, args, kwargs, value, is_linear=True)
    if how == "both held":
        return value
    if how in ("half", "taylor"):
        is_half = how == "half"
        return moving(function, name, args, kwargs, value, is_linear=is_half, share=0.5 if is_half else 1)
    held = (factors[how == "second held"],)
    return moving(function, name, args, kwargs, value, held=held, is_linear=True)


@family("pow square float_power")
def power(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x^p as x ⊙ x^(p-1) with the second factor held, for p ≥ 1; any other power is a statistic."""
    x: Any
    x, exponent = (*args, *kwargs.values(), 2)[:2]
    if not is_live(x) or isinstance(exponent, Tensor) and (exponent.numel() != 1 or is_live(exponent)):
        return statistic(run, function, name, args, kwargs)
    if float(exponent) < 1:
        return statistic(run, torch.pow, "pow", (x, exponent), {})
    value = raw(function, *args, **kwargs)
    if "taylor" in (run.rules.norm, run.rules.activation):
        run.note("power: derivative")
        return tangent(x, lambda v: v**exponent, value, x.role if is_factor(x.role, run.rules) else None)
    if is_factor(x.role, run.rules):
        return activate_from("pow", x, lambda v: v**exponent, Role.FACTOR)
    run.note("product: power")
    rest = float(exponent) - 1
    x0 = value_of(x)
    x0 = raw(at_least_float32, x0) if x.spec.dtype.itemsize < 4 else x0
    return scaled(x, x0 if rest == 1 else raw(torch.pow, x0, rest), value)


@family("matmul bmm mm rmatmul mv dot")
def matrix_product(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear with one live factor. With two, the left one mixes and is held, and the right one is carried.

    q·kᵀ is such a product too; there holding has no effect: the softmax holds the result. With live attention both use
    `Rules.attention`.
    """
    left, right = (*args, *kwargs.values())[:2]
    if name == "rmatmul":
        function, left, right = torch.matmul, right, left
    mixes = role_of(left) is Role.ATTENTION
    right = without_sink(right) if mixes else right
    found = _matrix_product(function, name, left, right)
    if is_live(found) and mixes:
        run.note_mixture(found, left, right)
    return found


def _matrix_product(function: Any, name: str, left: Any, right: Any) -> Any:
    run = now.tape
    if not (is_live(left) and is_live(right)):
        role = role_after(name, left, right)
        value = raw(function, left, right)
        return run.emit("matmul", value, _operand(left), _operand(right), role=role)
    how = of_matrix_product(left.role, right.role, run.rules)
    if how == "both held":
        return raw(function, left, right)
    run.note({"first held": "product: left factor held"}.get(how, f"product: {how}"))
    is_free = not (is_factor(left.role, run.rules) or is_factor(right.role, run.rules))
    note = "left factor held" if is_free and how == "first held" else None
    found = product(raw(function, left, right), "matmul", left, right, how, note=note)
    run.note_scores(found, left, right)
    return found


def _operand(x: Any) -> Any:
    return x if is_live(x) else value_of(x)


@family("linear")
def linear_layer(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear layer. If input and weight are both live, the weight is held."""
    x, weight, bias, *_ = (*args, None, None)
    weight, bias = (kwargs.get("weight", weight), kwargs.get("bias", bias)) if kwargs else (weight, bias)
    if type(weight) is Live:
        if is_live(x):
            return _live_weight(x, weight, bias)
        found = torch.matmul(x, weight.mT) if weight.dim() > 1 else torch.matmul(x, weight)
        return found if bias is None else found + bias
    if type(weight) in (Tensor, nn.Parameter) or type(weight) in FOLLOWED:
        packed = None
        with quiet(), no_kernels():
            value = function(x, weight, bias)
    else:  # quantised weights have code of their own for products
        packed, value = parts_of(run, weight), function(value_of(x), weight, bias)
    role = role_after("linear", x, weight) if x.role or type(weight) in FOLLOWED else None
    return run.emit("linear", value, x, packed or weight, bias, role=role)


def _live_weight(x: Live, weight: Any, bias: Any) -> Any:
    run, how = now.tape, now.tape.rules.gate
    run.note(f"product: {how}" if how in ("half", "taylor") else "product: weight held")
    how = how if how in ("half", "taylor") else "second held"
    turned = weight.mT if weight.dim() > 1 else weight
    found = product(raw(torch.matmul, x, turned), "matmul", x, turned, how)
    return found if bias is None else found + bias


ADDED_PRODUCT = (
    *("input", "self", "batch1", "mat1", "vec1", "tensor1", "end"),
    *("batch2", "mat2", "vec2", "vec", "tensor2", "weight"),
)
"""Torch's names for the summand and the two factors, in the order of the arguments."""


@family("addmm baddbmm addbmm addmv addcmul addcdiv lerp")
def added_product(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum that contains a product, split up: each part has its own rule."""
    base, left, right = (*args, *(kwargs[key] for key in ADDED_PRODUCT if key in kwargs))[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", kwargs.get("value", 1))
    if name == "lerp":
        return base + right * (left - base)
    if name in ("addcmul", "addcdiv"):
        inner = left * right if name == "addcmul" else left / right
        return base + (inner if alpha == 1 else alpha * inner)
    if name == "addmm" and beta == alpha == 1 and is_live(left) and not is_live(right) and not is_live(base):
        # a linear layer with a transposed weight
        weight = raw(getattr, right, "mT")
        value = raw(function, *args, **kwargs)
        return run.emit("linear", value, left, weight, base, role=role_after("linear", left, weight))
    mixed = torch.matmul(left, right)
    mixed = mixed.sum(0) if name == "addbmm" else mixed
    return (base if beta == 1 else beta * base) + (mixed if alpha == 1 else alpha * mixed)


@family(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution "
    "convolution_overrideable"
)
def convolved(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A convolution. If input and weight are both live, the weight is held."""
    if not isinstance(function, torch._ops.OpOverload):
        return run.by_kernels(function, args, kwargs)  # with explicit padding and strides
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    if is_live(weight):
        how = run.rules.gate if run.rules.gate in ("half", "taylor") else "second held"
        if is_live(x):
            run.note(f"product: {how}" if how in ("half", "taylor") else "product: weight held")
        found = product_by_kernel(function, name, (x, weight, None, *args[3:]), kwargs, (0, 1), how)
        return found if bias is None else found + bias.reshape(-1, *[1] * len(stride))
    value = raw(function, *args, **kwargs)
    geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
    return run.emit("convolution", value, x, weight, bias, *geometry, role=role_after("convolution", x, weight))


@of_value("grouped_mm _grouped_mm")
def grouped_product(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Matrix products of groups of rows: the experts of a router."""
    names = ("mat2", "mat_b", "offs", "bias", "out_dtype")
    given = dict(zip(("a", "b", "offs", "bias", "out_dtype"), args, strict=False)) | {
        {"mat2": "b", "mat_b": "b"}.get(key, key): one for key, one in kwargs.items() if key in names
    }
    a, b, bias = given["a"], given["b"], given.get("bias")
    if bias is not None:
        raise run.refusal(f"{name} with a bias")
    if is_live(a) and is_live(b):
        run.note("product: weight held")
        b = value_of(b)
    offsets = given.get("offs")
    return run.emit(
        "grouped_mm",
        value,
        _operand(a),
        _operand(b),
        None if offsets is None else value_of(offsets),
        given.get("out_dtype"),
        role=role_after(name, a, b),
    )


@rule("einsum")
def einstein_sum(equation: str, *operands: Any) -> Any:
    """As in `matrix_product`: all live operands but the last are held, or all follow `Rules.attention`."""
    run = now.tape
    given = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else list(operands)
    live = [i for i, operand in enumerate(given) if is_live(operand)]
    factors = [i for i in live if is_factor(given[i].role, run.rules)]
    if len(live) > 1 and factors == live[-1:]:
        live = [live[-1], *live[:-1]]  # the factor is what is held
    hows = {of_matrix_product(given[i].role, given[live[-1]].role, run.rules) for i in live[:-1]}
    how = next((one for one in ("taylor", "half") if one in hows), "first held")
    if len(live) > 1 and how != "first held":
        return _live_einsum(equation, given, live, how)
    if len(live) > 1 and factors and set(factors) == set(live):
        for _ in live:
            run.note("factor: held")
        return raw(torch.einsum, equation, *given)
    note = "left factor held" if len(live) > 1 and not factors else None
    for _ in live[:-1]:
        run.note("product: left factor held")
    given[live[-1]] = _mixed(equation, given, live[-1])
    role = role_after("einsum", *given) if len(live) == 1 else None
    value = raw(torch.einsum, equation, *given)
    kept = [x if i == live[-1] else value_of(x) for i, x in enumerate(given)]
    return run.emit("einsum", value, equation, *kept, role=role, note=note)


def _mixed(equation: str, given: list[Any], place: int) -> Any:
    """An operand; where attention mixes it, along the last letter of the attention matrix, without a held sink."""
    letters = equation.replace(" ", "").partition("->")[0].split(",")
    weights = next((n for n, x in enumerate(given) if n != place and role_of(x) is Role.ATTENTION), None)
    if weights is None or "." in equation or letters[weights][-1] not in letters[place]:
        return given[place]
    return without_sink(given[place], letters[place].index(letters[weights][-1]))


def _live_einsum(equation: str, given: list[Any], live: list[int], how: str) -> Any:
    """w·Σ_i (sum with operand i live and the others held), and the constant that restores the value."""
    run = now.tape
    run.note(f"product: {how}")
    if len(live) > 2 and how == "half":
        how = "taylor"
    value = raw(torch.einsum, equation, *given)
    spec = spec_of(value)
    weight = 0.5 if how == "half" else 1.0
    total: Any = None
    for i in live:
        part = run.emit("einsum", spec, equation, *[x if n == i else value_of(x) for n, x in enumerate(given)])
        part = part if weight == 1 else run.emit("mul", spec, part, weight)
        total = part if total is None else run.emit("add", spec, total, part)
    if how == "half":
        return run.live(value, total.index)
    return run.emit("add", value, total, raw(torch.mul, value, 1 - len(live)))


@family("div rdiv")
def divide(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A live denominator is a statistic: held, or by its derivative where norms are."""
    above, below = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if name == "rdiv":
        above, below = below, above
    if kwargs.get("rounding_mode"):
        return rounded_quotient(above, below, kwargs["rounding_mode"])
    value = raw(torch.div, above, below)
    if is_live(below):
        if run.rules.norm == "taylor":
            return _live_quotient(above, below, value)
        run.note("quotient: denominator held")
        below.role = below.role or Role.SCALE
        if not is_live(above):
            return value
    above = above.to(value.dtype) if above.dtype != value.dtype else above
    return run.emit("div", value, above, value_of(below), role=role_after("div", above))


def _live_quotient(above: Any, below: Live, value: Tensor) -> Live:
    """a/b by its derivative: da/b⁰ - (y⁰/b⁰) db, and the constant that restores the value: y⁰."""
    run = now.tape
    run.note("quotient: derivative")
    spec = spec_of(value)
    slope = raw(lambda: -value / value_of(below))
    of_below = run.emit("mul", spec, below, slope)
    if not is_live(above):
        return run.emit("add", value, of_below, raw(lambda: 2 * value), role=Role.STATISTIC)
    role = above.role if is_factor(above.role, run.rules) else None
    of_above = run.emit("div", spec, above, value_of(below))
    return run.emit("add", value, run.emit("add", spec, of_above, of_below), raw(Tensor.clone, value), role=role)


@rule("floor_divide")
def floor_divide(above: Any, below: Any) -> Any:
    """A quotient rounded to a whole number."""
    return rounded_quotient(above, below, "floor")


def rounded_quotient(above: Any, below: Any, mode: str) -> Any:
    """An activation of the numerator, as `floor` is."""
    if not is_live(above):
        now.tape.note("held: floor_divide")
        return raw(torch.div, above, below, rounding_mode=mode)
    role = Role.FACTOR if is_factor(above.role, now.tape.rules) else Role.ACTIVATED
    below = value_of(below)
    return activate_from("floor_divide", above, lambda v: torch.div(v, below, rounding_mode=mode), role)


@family("linalg_solve_triangular")
def solve_rule(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A⁻¹ b with A held."""
    matrix, b = args[:2]
    if is_live(matrix):
        if run.rules.gate == "taylor":
            return by_derivative(run, function, name, args, kwargs)
        run.note("product: left factor held")
    if not is_live(b):
        return raw(function, *args, **kwargs)
    options = (kwargs.get("upper"), kwargs.get("left", True), kwargs.get("unitriangular", False))
    return run.emit("solve", raw(function, *args, **kwargs), value_of(matrix), b, *options)
