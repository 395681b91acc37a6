"""Kernels by their derivative: for rule sets that follow derivatives, functions without a rule of their own.

Also kernels that are linear in each of two factors, and functions that are linear in one argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorlens.program.derivative_step import of_some
from tensorlens.program.nodes import leaves, mapped
from tensorlens.recording.calculus import differentiable, leaf
from tensorlens.recording.live import is_live, now, raw, spec_of, value_of
from tensorlens.recording.table import family


def by_derivative(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function by its derivative in everything live; a function of several kernels is taken kernel by kernel."""
    run = now.tape
    if not isinstance(function, torch._ops.OpOverload):
        return run.by_kernels(function, args, kwargs)
    if function._schema.is_mutable or torch.Tag.nondeterministic_seeded in function.tags:
        raise run.refusal(name)
    run.note(f"derivative: {name}")
    value = raw(function, *args, **kwargs)
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
def in_the_first(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that is linear in its first argument; its other arguments are held where factors of products are."""
    run = now.tape
    if not isinstance(function, torch._ops.OpOverload) or run.rules.name == "jacobian":
        return by_derivative(function, name, args, kwargs)
    value = raw(function, *args, **kwargs)
    if not is_live(args[0]):
        run.note(f"held: {name}")
        return value
    others = tuple(range(1, len(args)))
    return _moving(function, name, args, kwargs, value, held=others, is_linear=True)
