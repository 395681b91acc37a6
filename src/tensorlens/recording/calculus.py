r"""Building blocks of rules: held values, and affine functions that replace nonlinear steps.

Each has the model's value at X: a constant is added to achieve this, and it belongs to B. `by_derivative` serves
functions without a rule of their own, for rule sets that follow derivatives, and kernels that are linear in a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensorlens.program.composite import of_some
from tensorlens.program.nodes import at_least_float32, leaves, mapped
from tensorlens.recording.live import Live, is_live, now, raw, spec_of, value_of
from tensorlens.recording.roles import Role
from tensorlens.recording.table import family

Elementwise = Callable[[Tensor], Tensor]

WEIGHTS: dict[str, tuple[float, float]] = {
    "first held": (0.0, 1.0),
    "second held": (1.0, 0.0),
    "half": (0.5, 0.5),
    "taylor": (1.0, 1.0),
}
"""Shares of a product that follow its first and its second factor."""


def scaled(x: Live, factor: Tensor, value: Tensor, role: Role | None = None, added: Any = None) -> Live:
    """`x` ⊙ factor + added, with the model's own value."""
    run = now.tape
    factor = factor if factor.dtype == value.dtype else raw(Tensor.to, factor, value.dtype)
    if added is None:
        return run.emit("mul", value, x, factor, role=role)
    return run.emit("add", value, run.emit("gain", spec_of(value), x, factor), added, role=role)


def tangent(x: Live, function: Elementwise, value: Tensor, role: Role | None = None) -> Live:
    r"""An element-wise function by its derivative: $f(x^0) + f'(x^0)(x - x^0)$."""

    def parts() -> tuple[Tensor, Tensor]:
        x0 = at_least_float32(value_of(x))
        slope = slope_of(function, x0)
        # An entry that is masked by an infinity does not move.
        is_finite = x0.isfinite() & slope.isfinite()
        slope = torch.where(is_finite, slope, 0)
        return slope, value - torch.where(is_finite, slope * x0, 0).to(value.dtype)

    slope, added = raw(parts)
    return scaled(x, slope, value, role, added)


@contextmanager
def differentiable() -> Iterator[None]:
    """Enable autograd in this context: torch switches it off at the level of kernels and in inference mode."""
    kept, left_out = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("ADInplaceOrView", "AutogradOther", "AutogradFunctionality"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(kept, left_out), torch.inference_mode(False), torch.enable_grad():
        yield


def leaf(x: Tensor) -> Tensor:
    """A leaf tensor for derivatives."""
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()


def slope_of(function: Elementwise, x: Tensor) -> Tensor:
    """The derivative of an element-wise function; zero if torch has none."""
    with differentiable():
        x = leaf(x)
        y = function(x)
        return torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros_like(x)


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
    r"""$w_a\, a b^0 + w_b\, a^0 b + (1 - w_a - w_b)\, a^0 b^0$: a bilinear function of two live tensors.

    Args:
        value: The result of the bilinear function.
        operation: Its name in programs; it takes the two factors.
        a: The first factor.
        b: The second factor.
        how: A key of `WEIGHTS`.
        role: Role of the result.
        note: The convention behind it.
    """
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


def is_same_tensor(a: Any, b: Any) -> bool:
    """Whether two arguments are one live value."""
    return a is b or is_live(a) and is_live(b) and now.tape.slot_of(a) == now.tape.slot_of(b) and a.shape == b.shape


# Kernels by their derivative ------------------------------------------------------------------------------------------


def by_derivative(run: Any, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace a function by its derivative in all live arguments; a function of several kernels, kernel by kernel."""
    if not isinstance(function, torch._ops.OpOverload):
        return run.by_kernels(function, args, kwargs)
    if function._schema.is_mutable or torch.Tag.nondeterministic_seeded in function.tags:
        raise run.refusal(name)
    value = raw(function, *args, **kwargs)
    if function.namespace != "aten" or isinstance(value, Tensor) and value.layout is not torch.strided:
        raise run.refusal(name)
    run.note(f"derivative: {name}")
    if isinstance(value, Tensor):
        return _moving(function, name, args, kwargs, value)
    parts = [_moving(function, name, args, kwargs, one, part) for part, one in enumerate(value)]
    return tuple(parts) if type(value) in (tuple, list) else type(value)(parts)


def _moving(
    function: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: Tensor,
    part: int | None = None,
    *,
    held: tuple[int, ...] = (),
    is_linear: bool = False,
    share: float = 1,
) -> Any:
    """One result of a kernel as a step.

    Args:
        function: The kernel.
        name: Its name in refusals.
        args: Its arguments.
        kwargs: Its named arguments.
        value: What it gave.
        part: Which of its results this is; None for its only one.
        held: Places of arguments that are held though they are live.
        is_linear: Whether it is linear in what moves, so that nothing is added.
        share: How much of it follows what moves.
    """
    run = now.tape
    args = tuple([value_of(arg) if place in held else arg for place, arg in enumerate(args)])
    packed = (args, tuple(kwargs.items()))
    met = [(place, leaf) for place, leaf in enumerate(leaves(packed)) if is_live(leaf)]
    places, moved = tuple([place for place, _ in met]), tuple([leaf for _, leaf in met])
    plain = {id(leaf): value_of(leaf) for leaf in moved}
    at = tuple([plain[id(leaf)] for leaf in moved])
    packed = mapped(packed, lambda leaf: plain[id(leaf)] if id(leaf) in plain else value_of(leaf))
    if not _is_known(function, packed, places, part):
        if part:
            return value  # a kernel may also return counts and places
        raise run.refusal(f"the derivative of {name}")
    given = None if is_linear else raw(Tensor.clone, value)
    arguments = (moved, given, str(function), packed, places, at, part, is_linear and share == 1)
    if share == 1:
        return run.emit("derivative", value, *arguments)
    return run.emit("mul", value, run.emit("derivative", spec_of(value), *arguments), share)


def _is_known(function: Any, packed: Any, places: tuple[int, ...], part: int | None) -> bool:
    """Whether torch has a derivative of a kernel; without one it returns a constant, or raises."""

    def known() -> bool:
        at = [leaf for place, leaf in enumerate(leaves(packed)) if place in places]
        with differentiable():
            found = of_some(str(function), packed, places, part)(*map(leaf, at))
        return (
            isinstance(found, Tensor) and found.requires_grad and "NotImplemented" not in type(found.grad_fn).__name__
        )

    return raw(known)


def product_by_kernel(
    function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], factors: tuple[int, int], how: str
) -> Any:
    """A kernel that is linear in each of two arguments.

    Args:
        function: The kernel.
        name: Its name in refusals.
        args: Its arguments.
        kwargs: Its named arguments.
        factors: Places of the two.
        how: What is held where both are live, as in `calculus.WEIGHTS`, or ``"both held"``.
    """
    value = raw(function, *args, **kwargs)
    if not all(is_live(args[place]) for place in factors):
        return _moving(function, name, args, kwargs, value, is_linear=True)
    if how == "both held":
        return value
    if how in ("half", "taylor"):
        is_half = how == "half"
        return _moving(function, name, args, kwargs, value, is_linear=is_half, share=0.5 if is_half else 1)
    held = (factors[how == "second held"],)
    return _moving(function, name, args, kwargs, value, held=held, is_linear=True)


@family("max_unpool2d max_unpool3d copysign grid_sampler_2d grid_sampler_3d")
def in_the_first(run: Any, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that is linear in its first argument; its other arguments are held where factors of products are."""
    if not isinstance(function, torch._ops.OpOverload) or run.rules.name == "jacobian":
        return by_derivative(run, function, name, args, kwargs)
    value = raw(function, *args, **kwargs)
    if not is_live(args[0]):
        run.note(f"held: {name}")
        return value
    others = tuple(range(1, len(args)))
    return _moving(function, name, args, kwargs, value, held=others, is_linear=True)
