r"""The operations that steps are made of, each with its transpose.

An operation is affine *jointly* in the arguments at its `joint` places, where a constant is added and therefore left
out of the linear part, or it is a product, linear in *one* argument while the others are constant factors. Its
transpose takes a cotangent u of the result and the same arguments, with a `Spec` in the place of each live tensor, and
gives a cotangent for each live argument. Operations without a transpose of their own are differentiated, one step
alone. Most are one function of torch: they stand in one table. Others are written out before it, or in `composite`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorlens.program.nodes import Axes, Spec, leaves, mapped


@dataclass(eq=False, slots=True)
class Operation:
    """One operation: how it runs, in which arguments it is affine, and its transpose.

    Attributes:
        run: The function itself.
        transpose: Gives a cotangent, or a tuple of one for each live argument; `NotImplemented` where it has no form.
        joint: Places of arguments in which it is affine together; none for a product.
        optional: Joint places at which None means that nothing is added.
    """

    run: Callable[..., Tensor]
    transpose: Callable[..., Any] | None = None
    joint: Axes = (0,)
    optional: Axes = ()

    def transposed_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the transpose, as a decorator."""
        self.transpose = function
        return function

    def pull(self, u: Tensor, args: Sequence[Any], options: dict[str, Any]) -> tuple[Tensor, ...]:
        """From a cotangent u to those of the live arguments, in order; `fit` may still have to shape them."""
        found = NotImplemented
        if self.transpose is not None and not u.is_complex():
            found = self.transpose(u, *args, **options)
        if found is NotImplemented:
            found = self._differentiate(u, args, options)
        return found if type(found) is tuple else (found,)

    def _differentiate(self, u: Tensor, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """By autograd through this one step, at zero; it is affine, so any point gives the same."""

        def of_live(*values: Tensor) -> Tensor:
            given = iter(values)
            return self.run(*mapped(list(args), lambda leaf: next(given) if type(leaf) is Spec else leaf), **options)

        live = [leaf for leaf in leaves(list(args)) if type(leaf) is Spec]
        zeros = [torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) for spec in live]
        return torch.func.vjp(of_live, *zeros)[1](u)


def operation(*, joint: Axes = (0,), optional: Axes = ()) -> Callable[[Callable[..., Tensor]], Operation]:
    """Register a function as an operation under its own name."""

    def register(run: Callable[..., Tensor]) -> Operation:
        OPERATIONS[run.__name__] = Operation(run, joint=joint, optional=optional)
        return OPERATIONS[run.__name__]

    return register


def fit(u: Tensor, spec: Spec) -> Tensor:
    """A cotangent of its slot's shape: summed over broadcast axes, in the slot's type and on its device."""
    shape, dtype, device = spec
    if u.shape != shape:
        u = u.sum_to_size(shape)
    if u.is_complex() and not dtype.is_complex:
        u = u.real
    return u.to(dtype=dtype, device=device)


# Functions that are not one of torch ----------------------------------------------------------------------------------


def _cast(x: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    return x.to(dtype=dtype, device=device)


def _triangle(x: Tensor, diagonal: int, upper: bool) -> Tensor:
    """Zero below a diagonal, or above it."""
    return x.triu(diagonal) if upper else x.tril(diagonal)


def _as_strided(flat: Tensor, shape: Axes, strides: Axes, offset: int) -> Tensor:
    """A view of memory, as numbers in storage order."""
    return flat.contiguous().as_strided(shape, strides, offset)


def _as_strided_scatter(flat: Tensor, value: Tensor, shape: Axes, strides: Axes, offset: int) -> Tensor:
    """The memory after a write through a view of it."""
    flat = flat.clone(memory_format=torch.contiguous_format)
    flat.as_strided(shape, strides, offset).copy_(value)
    return flat


def _gain(x: Tensor, factor: Tensor) -> Tensor:
    """`x` ⊙ factor, and zero where the factor is, even if x is infinite: what is masked does not move."""
    return torch.where(factor == 0, 0, x) * factor


def _blend(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    """`a` ⊙ of_a + `b` ⊙ of_b: a product of two live tensors, each weighted by the other's value."""
    return a * of_a + b * of_b


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Matrix products of groups of rows, each with a matrix of its own: the experts of a router."""
    function = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    return function(a, b, offs=offsets, out_dtype=dtype)


def _solve(matrix: Tensor, b: Tensor, upper: bool | None, left: bool, unitriangular: bool) -> Tensor:
    """A⁻¹ b; with `upper` given, of a triangular matrix."""
    if upper is None:
        return torch.linalg.solve(matrix, b, left=left)
    return torch.linalg.solve_triangular(matrix, b, upper=upper, left=left, unitriangular=unitriangular)


def _constant(value: Tensor) -> Tensor:
    """A held tensor in place of a live one: the content that a write left in its memory."""
    return value


def _put(x: Tensor, at: tuple[Any, ...], value: Any, accumulate: bool = False) -> Tensor:
    """`x` after `x[at] = value`, or after `x[at] += value`."""
    if accumulate:
        return _added_at(x, at, value)
    x = x.clone()
    x[at] = value
    return x


def _added_at(x: Tensor, at: tuple[Any, ...], value: Any) -> Tensor:
    """`x` after `x[at] += value`, also where an index occurs several times."""
    return torch.ops.aten.index_put(x, [one if isinstance(one, Tensor) else None for one in at], value, True)


def _index_add(x: Tensor, axis: int, places: Tensor, source: Tensor, alpha: float = 1) -> Tensor:
    """`x` with rows of the source added at indices of an axis."""
    return x.index_add(axis, places, source, alpha=alpha)


# Their transposes -----------------------------------------------------------------------------------------------------


def _live(*pairs: tuple[Any, Any]) -> tuple[Tensor, ...]:
    """The cotangents of live arguments, from pairs of a cotangent and its argument."""
    return tuple([g for g, arg in pairs if type(arg) is Spec])


def _seen(u: Tensor, x: Spec, view: Callable[..., Tensor], *places: Any) -> Tensor:
    """Zeros for x, with a cotangent where a view of them is."""
    found = u.new_zeros(x.shape)
    view(found, *places).copy_(u)
    return found


def _index_back(u: Tensor, x: Spec, at: tuple[Any, ...]) -> Tensor:
    others = [one for one in at if not isinstance(one, Tensor)]
    if len(others) == len(at):
        return _seen(u, x, operator.getitem, at)
    # `index_put` takes only tensors and whole axes.
    is_simple = all(type(one) is slice and one == slice(None) for one in others)
    return _added_at(u.new_zeros(x.shape), at, u) if is_simple else NotImplemented


def _as_strided_back(u: Tensor, flat: Spec, shape: Axes, strides: Axes, offset: int) -> Tensor:
    places = torch.arange(flat.shape[0], device=u.device).as_strided(shape, strides, offset)
    # A view may show a number several times.
    return u.new_zeros(flat.shape).index_add(0, places.reshape(-1), u.reshape(-1))


def _as_strided_scatter_back(
    u: Tensor, flat: Any, value: Any, shape: Axes, strides: Axes, offset: int
) -> tuple[Tensor, ...]:
    # u is (n,), for the memory after the write: the view's places belong to the new value, all others to what was
    # there before.
    left = u.clone(memory_format=torch.contiguous_format)
    view = left.as_strided(shape, strides, offset)
    of_value = view.clone()
    view.zero_()
    return _live((left, flat), (of_value, value))


def _spread(u: Tensor, x: Spec, axes: Axes, keepdim: bool) -> Tensor:
    if not keepdim:
        for axis in sorted([axis % len(x.shape) for axis in axes]):
            u = u.unsqueeze(axis)
    return u.expand(x.shape)


def _mean_back(u: Tensor, x: Spec, axes: Axes, keepdim: bool) -> Tensor:
    return _spread(u / math.prod([x.shape[axis] for axis in axes]), x, axes, keepdim)


def _where_back(u: Tensor, mask: Tensor, a: Any, b: Any) -> tuple[Tensor, ...]:
    of_a = (torch.where(mask, u, 0),) if type(a) is Spec else ()
    return (*of_a, torch.where(mask, 0, u)) if type(b) is Spec else of_a


def _matmul_back(u: Tensor, a: Any, b: Any) -> Tensor:
    if min(len(a.shape), len(b.shape)) < 2:
        return NotImplemented
    # y = a b with u of y's shape: u bᵀ for a, aᵀ u for b; `fit` sums over axes that were broadcast.
    return torch.matmul(u, b.mT) if type(a) is Spec else torch.matmul(a.mT, u)


def unpacked(codes: Tensor, scale: Tensor, zero: Tensor | None, book: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Unpack a weight: each block minus its zero point, times its scale; a code book decodes 4-bit numbers."""
    if book is not None:
        codes = book[torch.stack((codes >> 4, codes & 15), -1).long()]
    blocks = codes.reshape(scale.numel(), -1).to(scale.dtype)
    blocks = blocks if zero is None else blocks - zero.reshape(-1, 1)
    return (blocks * scale.reshape(-1, 1)).reshape(shape)


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, unpacked(*weight).to(x.dtype) if type(weight) is tuple else weight, bias)


def _linear_back(u: Tensor, x: Any, weight: Any, bias: Any = None) -> Any:
    weight = unpacked(*weight).to(u.dtype) if type(weight) is tuple else weight
    of_x = torch.matmul(u, weight) if type(x) is Spec else None
    return of_x if type(bias) is not Spec else _live((of_x, x), (u, bias))


def _grouped_mm_back(u: Tensor, a: Any, b: Any, offsets: Tensor | None = None, dtype: Any = None) -> Tensor:
    if type(b) is Spec or len(a.shape) != 2 or b.dim() != 3:
        return NotImplemented
    return _grouped_mm(u.contiguous(), b.mT, offsets)


def _put_back(u: Tensor, x: Any, at: tuple[Any, ...], value: Any, accumulate: bool = False) -> tuple[Tensor, ...]:
    return _live((u if accumulate else _put(u, at, 0), x), (u[at], value))


def _of_source(u: Tensor, source: Any) -> Tensor:
    """A cotangent of the part of a source that the places of a scatter cover."""
    return _seen(u, source, operator.getitem, tuple([slice(size) for size in u.shape])) if type(source) is Spec else u


# The table ------------------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Operation] = {
    # Numbers elsewhere
    "reshape": Operation(torch.reshape, lambda u, x, shape: u.reshape(x.shape)),
    "permute": Operation(torch.permute, lambda u, x, axes: u.permute(sorted(range(len(axes)), key=axes.__getitem__))),
    "expand": Operation(Tensor.expand, lambda u, x, shape: u),
    "cast": Operation(_cast, lambda u, x, dtype, device=None: u),
    "index": Operation(operator.getitem, _index_back),
    "narrow": Operation(torch.narrow, lambda u, x, axis, start, length: _seen(u, x, torch.narrow, axis, start, length)),
    "select": Operation(torch.select, lambda u, x, axis, place: _seen(u, x, torch.select, axis, place)),
    "index_select": Operation(
        torch.index_select, lambda u, x, axis, places: u.new_zeros(x.shape).index_add(axis, places, u)
    ),
    "gather": Operation(torch.gather, lambda u, x, axis, places: u.new_zeros(x.shape).scatter_add(axis, places, u)),
    "cat": Operation(
        torch.cat,
        lambda u, parts, axis: _live(*zip(u.split([part.shape[axis] for part in parts], axis), parts, strict=True)),
    ),
    "stack": Operation(torch.stack, lambda u, parts, axis: _live(*zip(u.unbind(axis), parts, strict=True))),
    "pad": Operation(F.pad, joint=(0, 3), optional=(3,)),
    "flip": Operation(torch.flip, lambda u, x, axes: u.flip(axes)),
    "repeat_interleave": Operation(
        torch.repeat_interleave,
        lambda u, x, times, axis: u.unflatten(axis, (-1, times)).sum(axis % u.dim() + 1),
    ),
    "triangle": Operation(_triangle, lambda u, x, diagonal, upper: _triangle(u, diagonal, upper)),
    "as_strided": Operation(_as_strided, _as_strided_back),
    "as_strided_scatter": Operation(_as_strided_scatter, _as_strided_scatter_back, joint=(0, 1)),
    # Sums and products
    "sum": Operation(torch.sum, _spread),
    "mean": Operation(torch.mean, _mean_back),
    "cumsum": Operation(torch.cumsum, lambda u, x, axis: u.flip(axis).cumsum(axis).flip(axis)),
    "add": Operation(operator.add, lambda u, a, b: (u, u) if type(a) is Spec and type(b) is Spec else u, joint=(0, 1)),
    "sub": Operation(operator.sub, lambda u, a, b: u if type(b) is not Spec else _live((u, a), (-u, b)), joint=(0, 1)),
    "mul": Operation(operator.mul, lambda u, a, b: u * (b if type(a) is Spec else a), joint=()),
    "gain": Operation(_gain, lambda u, x, factor: u * factor),
    "div": Operation(operator.truediv, lambda u, a, b: u / b),
    "blend": Operation(_blend, lambda u, a, b, of_a, of_b: (u * of_a, u * of_b), joint=(0, 1)),
    "where": Operation(torch.where, _where_back, joint=(1, 2)),
    "matmul": Operation(torch.matmul, _matmul_back, joint=()),
    "linear": Operation(_linear, _linear_back, joint=(0, 2), optional=(2,)),
    "einsum": Operation(torch.einsum, joint=()),
    "grouped_mm": Operation(_grouped_mm, _grouped_mm_back, joint=()),
    "convolution": Operation(torch.convolution, joint=(0, 2), optional=(2,)),
    "solve": Operation(_solve, joint=(1,)),
    "constant": Operation(_constant),
    # Writes
    "put": Operation(_put, _put_back, joint=(0, 2)),
    "index_add": Operation(
        _index_add,
        lambda u, x, axis, places, source, alpha=1: _live((u, x), (alpha * u.index_select(axis, places), source)),
        joint=(0, 3),
    ),
    "scatter": Operation(
        torch.scatter,
        lambda u, x, axis, places, source: _live(
            (u.scatter(axis, places, 0), x), (_of_source(u.gather(axis, places), source), source)
        ),
        joint=(0, 3),
    ),
    "scatter_add": Operation(
        torch.scatter_add,
        lambda u, x, axis, places, source: _live((u, x), (_of_source(u.gather(axis, places), source), source)),
        joint=(0, 3),
    ),
}
"""The operations, by their names in programs and files."""

LINEAR_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(place, name)
    for place, names in (
        (
            torch,
            "diagonal diag diag_embed roll diff trace view_as_real view_as_complex real imag conj_physical "
            "complex take",
        ),
        (Tensor, "repeat index_copy"),
        (
            F,
            "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate "
            "fold pixel_shuffle pixel_unshuffle channel_shuffle",
        ),
        (
            torch.fft,
            "fft ifft rfft irfft fftn ifftn fft2 ifft2 rfftn irfftn rfft2 irfft2 hfft ihfft fftshift ifftshift",
        ),
    )
    for name in names.split()
    if hasattr(place, name)
}
"""Functions that are linear in their first argument and have no transpose of their own; they are differentiated."""

LINEAR_FUNCTIONS["window"] = F.unfold
LINEAR_FUNCTIONS["view_as_complex"] = lambda x: torch.view_as_complex(x.contiguous())
JOINT = {"complex": (0, 1), "index_copy": (0, 3)}
"""Functions of this table that are affine in further arguments."""

OPERATIONS |= {name: Operation(run, joint=JOINT.get(name, (0,))) for name, run in LINEAR_FUNCTIONS.items()}
