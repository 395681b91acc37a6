r"""`derivative`: any kernel of torch's own, by its derivative at X, as one step.

For functions that are rare, or that have no simple form: backwards by torch's backward pass, forwards by the
derivative of that. Only the name of the kernel is kept, so a program with such a step is data like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.program.nodes import Spec, mapped
from tensorlens.program.operations import operation


def kernel_named(name: str) -> Callable[..., Any]:
    """The kernel of a name such as ``aten.linalg_cross.default``."""
    found: Any = torch.ops
    parts = name.split(".")
    try:
        for part in parts:
            found = getattr(found, part)
    except AttributeError:
        found = None
    if parts[0] != "aten" or not isinstance(found, torch._ops.OpOverload):
        raise NotLinearError(f"Expected the name of a kernel of torch, such as `aten.hypot.default`; got `{name}`.")
    return found


def of_some(name: str, args: Any, places: Sequence[int], part: int | None) -> Callable[..., Any]:
    """A kernel as a function of some of its arguments alone.

    Args:
        name: The kernel's name.
        args: Its arguments, and named ones as pairs.
        places: Which of their leaves move, in order.
        part: Which of several results is meant; None for a kernel with one.
    """

    def function(*values: Tensor) -> Any:
        moving, count = dict(zip(places, values, strict=True)), iter(range(10**9))
        given, named = mapped(args, lambda leaf: moving.get(next(count), leaf))
        found = kernel_named(name)(*given, **dict(named))
        return found if part is None else found[part]

    return function


@operation(joint=(0, 1), optional=(1,))
def derivative(
    moved: tuple[Tensor, ...],
    given: Tensor | None,
    name: str,
    args: Any,
    places: tuple[int, ...],
    at: tuple[Tensor, ...],
    part: int | None,
    is_linear: bool,
) -> Tensor:
    """What a kernel gave at X and, by its derivative there, how that moves with some of its arguments.

    Args:
        moved: The arguments that move.
        given: What the kernel gave; None in the linear part, and for a kernel that is linear in them.
        name: The kernel's name.
        args: All its arguments at X, and named ones as pairs.
        places: Which of the leaves of these move.
        at: Those at X.
        part: Which of several results is meant.
        is_linear: Whether the kernel is linear in what moves.
    """
    function = of_some(name, args, places, part)
    if is_linear:
        return function(*moved)
    tangents = moved if given is None else tuple([x - x0 for x, x0 in zip(moved, at, strict=True)])
    value, pull = torch.func.vjp(function, *at)  # pyright: ignore[reportAssignmentType]
    try:
        # J v as the derivative of u ↦ Jᵀu: torch's own forward mode loads scripted functions first, and warns of them.
        found = torch.func.vjp(pull, torch.ones_like(value))[1](tangents)[0]
    except (RuntimeError, NotImplementedError) as error:
        raise NotLinearError(
            f"`T @ x` is unavailable: torch has only the backward derivative of `{name}`. Use maps, rows or "
            f"`T.T @ u`, which need nothing else."
        ) from error
    return found if given is None else given + found


@derivative.transposed_by
def _(
    u: Tensor,
    moved: tuple[Spec, ...],
    given: Any,
    name: str,
    args: Any,
    places: tuple[int, ...],
    at: tuple[Tensor, ...],
    part: int | None,
    is_linear: bool,
) -> tuple[Tensor, ...]:
    return torch.func.vjp(of_some(name, args, places, part), *at)[1](u)
