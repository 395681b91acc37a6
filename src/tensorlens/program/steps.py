r"""The parts of a program: live values, held values, the steps between them, and the operations of steps.

An operation is affine *jointly* in the arguments at its `joint` places, where a constant is added and therefore left
out of the linear part, or it is a product, linear in *one* argument while the others are constant factors. Its
transpose takes a cotangent u of the result and the same arguments, with a `Spec` in the place of each live tensor, and
gives a cotangent for each live argument. Operations without a transpose of their own are differentiated, one step
alone. Most are one function of torch: they stand in one table. Others are written out before it, or after it where
several torch functions are one step with one transpose.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from tensorlens.errors import NotLinearError
from tensorlens.memory import BYTES_OF_SCORES, bytes_on


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A live value: an input of the program, or the result of a step."""

    index: int


class Held(msgspec.Struct, frozen=True, gc=False):
    """A constant, by its place in `Program.constants`."""

    index: int


NOT_PLAIN = frozenset([Slot, Held, tuple, list])
"""Types that make a nested argument more than plain values."""

Axes: TypeAlias = tuple[int, ...]
"""Numbers of axes, or sizes along them."""


class Spec(NamedTuple):
    """Shape, type and device of the tensor in a slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False, slots=True)
class Step:
    """One operation: `out = operation(*args, **options)`.

    Attributes:
        out: The slot it fills.
        operation: A name in `OPERATIONS`.
        args: `Slot`s, `Held` constants and plain values, nested in tuples and lists; in a program that was rewritten
            also tensors.
        options: Plain values by name.
        module: Path of the module that ran.
        block: The block it belongs to, or None outside of blocks.
        note: The convention that decided which factor of a product is held, if the calculus leaves it open.
        slots: The live values it takes, in order; a value that it takes twice is listed twice.
        held: The constants it takes, in order.
    """

    out: int
    operation: str
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    block: int | None = None
    note: str | None = None
    slots: list[int] = field(init=False, repr=False)
    held: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = leaves(self.args)
        self.slots = [leaf.index for leaf in found if type(leaf) is Slot]
        self.held = [leaf.index for leaf in found if type(leaf) is Held]


# Nested arguments -----------------------------------------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    """The leaves of nested tuples and lists, in order."""
    found: list[Any] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[Any]) -> None:
    if type(value) is tuple or type(value) is list:
        for part in value:
            _gather(part, found)
    else:
        found.append(value)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested tuples and lists with every leaf changed."""
    if type(value) is tuple:
        return tuple([mapped(part, change) for part in value])
    if type(value) is list:
        return [mapped(part, change) for part in value]
    return change(value)


def at_least_float32(x: Tensor) -> Tensor:
    """Statistics, held factors and folded weights are computed in float32 or better, whatever the storage."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# Operations -----------------------------------------------------------------------------------------------------------


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
            "diagonal diag diag_embed roll trace view_as_real view_as_complex real imag conj_physical complex take",
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
LINEAR_FUNCTIONS["view_as_real"] = lambda x: torch.view_as_real(x.resolve_conj())
LINEAR_FUNCTIONS["view_as_complex"] = lambda x: torch.view_as_complex(x.contiguous())
JOINT = {"complex": (0, 1), "index_copy": (0, 3)}
"""Functions of this table that are affine in further arguments."""

OPERATIONS |= {name: Operation(run, joint=JOINT.get(name, (0,))) for name, run in LINEAR_FUNCTIONS.items()}


# Kept whole -----------------------------------------------------------------------------------------------------------
#
# Norms, softmax, attention. `derivative` replaces any torch kernel with its derivative at X, for functions that are
# rare or have no simple form: backwards by torch's backward pass, forwards by the derivative of that. Only the kernel's
# name is kept, so a program with such a step is data like any other.
#
# Where attention is live, let dx = x - x⁰ and w the weights of `Rules.attention`: 1 for ``taylor``, ½ for ``half``
# where both factors of a product are live. Then
#
#     dS = w_s (q⁰ dkᵀ + dq k⁰ᵀ) · scale,   dA = s ⊙ (dS - Σ s ⊙ dS),   y = y⁰ + w_v A⁰ dv + w_a dA v⁰
#
# with s = softmax(S⁰/τ), which is A⁰ at temperature τ = 1. The transpose of this is the fused kernel's own backward
# pass at X, with the gradients of q, k and v scaled; at another temperature a second kernel gives those of q and k,
# since diag s - s sᵀ is the derivative of τ softmax(S/τ).

FORMED = 512
"""Up to this many keys, full-precision attention is formed as a matrix: fused kernels are fast in half precision."""


@operation(joint=(0, 3), optional=(3,))
def norm(
    x: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    axes: Axes,
    centred: bool,
    unit: Tensor | None = None,
) -> Tensor:
    r"""γ ⊙ (x - mean(x)) / σ + β with 1/σ held; without the mean for a norm that does not centre.

    With `unit`, the normalised x̂ of the recording, σ is followed too: $dx̂ = (dx - x̂\,\mathrm{mean}(x̂ ⊙ dx))/σ$.
    """
    y = _normalised(at_least_float32(x), inverse, axes, centred, unit)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


@norm.transposed_by
def _(
    u: Tensor,
    x: Any,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Any,
    axes: Axes,
    centred: bool,
    unit: Tensor | None = None,
) -> Tensor:
    # Scaling by a number per token commutes with centring, so the middle is its own transpose.
    u = at_least_float32(u)
    return _normalised(u if weight is None else u * weight, inverse, axes, centred, unit)


def _normalised(x: Tensor, inverse: Tensor, axes: Axes, centred: bool, unit: Tensor | None) -> Tensor:
    if centred:
        x = x - x.mean(axes, keepdim=True)
    if unit is not None:
        x = x - unit * (unit * x).mean(axes, keepdim=True)
    return x * inverse


@operation(joint=(0, 3), optional=(3,))
def softmax(x: Tensor, weights: Tensor, axis: int, added: Tensor | None = None) -> Tensor:
    """The derivative of a softmax with the result `weights`: A ⊙ (x - Σ A ⊙ x). Masked entries do not move."""
    found = _softmax(torch.where(weights == 0, 0, x).to(weights.dtype), weights, axis)
    return found if added is None else found + added


@softmax.transposed_by
def _(u: Tensor, x: Spec, weights: Tensor, axis: int, added: Any = None) -> Tensor:
    return _softmax(u, weights, axis)


def _softmax(x: Tensor, weights: Tensor, axis: int = -1) -> Tensor:
    weighted = weights * x
    return weighted - weights * weighted.sum(axis, keepdim=True)


@operation(joint=(2,))
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """A v with A = softmax(q kᵀ · scale + mask) held: q and k are constants, and A is never formed.

    For several v in `vmap`, which has no fused kernel, the rows of A are formed once for all of them.
    """
    if is_batchedtensor(value):
        q, k, factor = _for_rows(query, key, scale, grouped)

        def together(vs: Tensor) -> Tensor:
            vs = _repeated(vs, query.shape[-3]) if grouped else vs
            # (v, …, head, key, channel) as (…, head, key, v and channel): one product of A for all of them.
            side_by_side = vs.movedim(0, -2).flatten(-2)
            found = [
                rows_of_attention(q, k, mask, causal, factor, rows).to(vs.dtype) @ side_by_side
                for rows in _chunks(q, k)
            ]
            found = torch.cat(found, -2)
            return found.unflatten(-1, (len(vs), -1)).movedim(-2, 0)

        return _Several.apply(value, together)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


@attention.transposed_by
def _(
    u: Tensor, query: Tensor, key: Tensor, value: Spec, mask: Any, causal: bool, scale: float | None, grouped: bool
) -> Any:
    """Aᵀu: by the rows of A, each formed once, or by the kernel's own backward pass where that is faster."""
    if not is_batchedtensor(u) and (key.shape[-2] > FORMED or query.dtype.itemsize < 4):

        def mix(v: Tensor) -> Tensor:
            return attention.run(query, key, v, mask, causal, scale, grouped)

        return _backward(mix, [torch.zeros(value.shape, dtype=value.dtype, device=value.device)], u)
    q, k, factor = _for_rows(query, key, scale, grouped)

    def together(us: Tensor) -> Tensor:
        # (u, …, head, query, channel) as (…, head, query, u and channel): one product of A for all of them.
        side_by_side = us.movedim(0, -2).flatten(-2)
        found = side_by_side.new_zeros(*us.shape[1:-2], k.shape[-2], side_by_side.shape[-1])
        for rows in _chunks(q, k):
            a = rows_of_attention(q, k, mask, causal, factor, rows)
            found += a.to(found.dtype).mT @ side_by_side[..., rows, :]
        found = found.unflatten(-1, (len(us), -1)).movedim(-2, 0)
        # (u, …, value head, query heads that share it, key, channel): what they share adds up.
        return found.unflatten(-3, (value.shape[-3], -1)).sum(-3) if grouped else found

    return _Several.apply(u, together) if is_batchedtensor(u) else together(u[None])[0]


def _backward(function: Callable[..., Tensor], point: Sequence[Tensor], u: Tensor) -> tuple[Tensor, ...]:
    """The kernel's own backward pass at a point: without the wrappers of `torch.func`, which cost ten launches."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in point]
        return torch.autograd.grad(function(*leaves), leaves, u)


def _for_rows(query: Tensor, key: Tensor, scale: float | None, grouped: bool) -> tuple[Tensor, Tensor, float]:
    """Queries, the key for each of them, in float32 or better, and the factor of their products."""
    k = _repeated(key, query.shape[-3]) if grouped else key
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return at_least_float32(query), at_least_float32(k), factor


class _Several(torch.autograd.Function):
    """Pass values or cotangents that `vmap` has separated to a function that takes all of them (u, …)."""

    @staticmethod
    def forward(u: Tensor, together: Callable[[Tensor], Any]) -> Any:
        return together(u[None])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        u, together = args
        found = together(u.movedim(in_dims[0], 0))
        return found, tuple([0] * len(found)) if type(found) is tuple else 0


def _chunks(query: Tensor, key: Tensor) -> list[slice]:
    """Queries in chunks, to limit how many scores (…, head, query, key) are formed at a time."""
    n_queries, n_scores = query.shape[-2], key.shape[-2] * math.prod(query.shape[:-2])
    step = max(1, bytes_on(query.device, BYTES_OF_SCORES) // max(1, n_scores * query.dtype.itemsize))
    return [slice(start, start + step) for start in range(0, n_queries, step)]


@operation(joint=(0, 1, 2, 3), optional=(3,))
def live_attention(
    query: Any,
    key: Any,
    value: Any,
    given: Tensor | None,
    at: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    shares: tuple[float, float, float],
    temperature: float = 1.0,
) -> Tensor:
    """Attention whose matrix is followed by its derivative, a chunk of queries at a time.

    Args:
        query: (…, head, query, channel), live or a constant.
        key: (…, head, key, channel).
        value: (…, head, key, channel).
        given: The recorded result; None in the linear part.
        at: Query, key and value in the recording.
        mask: Added to the scores, or True where a query sees a key.
        causal: Whether a query sees no later key.
        scale: Factor of the scores; one over the root of their channels if None.
        grouped: Whether several query heads share a key head.
        shares: The shares that follow the factors of the scores, the attention matrix and the values.
        temperature: Temperature of the softmax's derivative.
    """
    q0, k0, v0 = at
    q, k, v = (_moved(x, x0, given) for x, x0 in zip((query, key, value), at, strict=True))
    if grouped:
        k0, v0, k, v = (_repeated(x, q0.shape[-3]) for x in (k0, v0, k, v))
    scale = 1 / math.sqrt(q0.shape[-1]) if scale is None else scale
    of_scores, of_matrix, of_values = shares
    parts = []
    for rows in _chunks(q0, k0):  # each matrix here is (…, head, some queries, key)
        a0 = rows_of_attention(q0, k0, mask, causal, scale, rows)
        moved = of_scores * scale * (_times(q0[..., rows, :], k) + _times(None if q is None else q[..., rows, :], k0))
        s = a0 if temperature == 1 else rows_of_attention(*_cooled(q0, k0, mask, causal, scale, temperature), rows)
        change = of_matrix * (_softmax(moved, s) @ v0)
        parts.append(change if v is None else change + of_values * (a0 @ v))
    found = torch.cat(parts, -2)
    return found if given is None else given + found


def _cooled(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None, bool, float]:
    """The factor that gives softmax(S/τ) instead of softmax(S), as `rows_of_attention` takes it."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask / temperature
    return query, key, mask, causal, scale / temperature


def _moved(x: Any, x0: Tensor, given: Tensor | None) -> Tensor | None:
    """The change of an argument: all of it in the linear part, from X in the affine one; None for a constant."""
    if x is None:
        return None
    return x if given is None else x - x0


def _repeated(x: Tensor | None, n_heads: int) -> Any:
    return None if x is None else x.repeat_interleave(n_heads // x.shape[-3], -3)


def _times(a: Tensor | None, b: Tensor | None) -> Any:
    """A bᵀ, or zero where one of them does not move."""
    return 0.0 if a is None or b is None else a @ b.transpose(-1, -2)


@live_attention.transposed_by
def _(
    u: Tensor,
    query: Any,
    key: Any,
    value: Any,
    given: Any,
    at: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    shares: tuple[float, float, float],
    temperature: float = 1.0,
) -> tuple[Tensor, ...]:
    of_scores, of_matrix, of_values = shares
    weights = (of_scores * of_matrix, of_scores * of_matrix, of_values)
    live = [place for place, x in enumerate((query, key, value)) if type(x) is Spec]

    def attend(*moving: Tensor) -> Tensor:
        given = dict(zip(live, moving, strict=True))
        q, k, v = (given.get(place, x0) for place, x0 in enumerate(at))
        if temperature == 1:
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        _, _, cooled, _, factor = _cooled(q, k, mask, causal, factor, temperature)
        # The first term moves with q and k alone, the second with v alone. Only their derivatives are used.
        moved = F.scaled_dot_product_attention(q, k, at[2], cooled, is_causal=causal, scale=factor, enable_gqa=grouped)
        mixed = attention.run(*at[:2], v, mask, causal, scale, grouped)
        return temperature * moved + mixed

    point = [at[place] for place in live]

    def one_by_one(us: Tensor) -> tuple[Tensor, ...]:
        pull = torch.func.vjp(attend, *point)[1]
        return tuple(map(torch.stack, zip(*(pull(one) for one in us), strict=True)))

    pulled = _Several.apply(u, one_by_one) if is_batchedtensor(u) else _backward(attend, point, u)
    return tuple([g * weights[place] for place, g in zip(live, pulled, strict=True)])


def rows_of_attention(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float, rows: slice = slice(None)
) -> Tensor:
    """Some rows of the attention matrix; the row of a query that sees nothing is zero."""
    scores = (query[..., rows, :] * scale) @ key.transpose(-1, -2)
    if causal:
        n_queries, n_keys = query.shape[-2], key.shape[-2]
        hidden = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device).triu(1)[rows]
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is None:
        return scores.softmax(-1)
    mask = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., rows, :]
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).nan_to_num(0.0)


# Any kernel -----------------------------------------------------------------------------------------------------------


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
    """A kernel as a function of some of its arguments.

    Args:
        name: The kernel's name.
        args: Its arguments, and named ones as pairs.
        places: The leaves of the arguments that move, in order.
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
    """The output of a kernel at X and, by its derivative there, how it moves with some of its arguments.

    Args:
        moved: The arguments that move.
        given: The recorded result; None in the linear part, and for a kernel that is linear in them.
        name: The kernel's name.
        args: All its arguments at X, and named ones as pairs.
        places: Which of the leaves of these move.
        at: The values of these leaves at X.
        part: Which of several results is meant.
        is_linear: Whether the kernel is linear in the arguments that move.
    """
    function = of_some(name, args, places, part)
    if is_linear:
        return function(*moved)
    # What is masked by an infinity does not move.
    pairs = zip(moved, at, strict=True)
    tangents = moved if given is None else tuple([torch.where(x0.isfinite(), x - x0, 0) for x, x0 in pairs])
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
