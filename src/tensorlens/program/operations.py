r"""The operations that steps are made of, each with its transpose.

An operation is affine *jointly* in the arguments at its `joint` places, where a constant is added and therefore left
out of the linear part, and linear in *one* of those at its `single` places while the others are constant factors. Its
transpose takes a cotangent u of the result and the same arguments, with a `Spec` in the place of each live tensor, and
gives a cotangent for each live argument. Operations without a transpose of their own are differentiated, one step
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorlens.program.nodes import Axes, Spec, leaves, mapped

OPERATIONS: dict[str, Operation] = {}
Pull = Callable[[Tensor], tuple[Tensor, ...]]


class Operation:
    """One operation: how it runs, in what it is affine, and its transpose.

    Attributes:
        name: Its name in programs and files.
        run: The function itself.
        joint: Places of arguments in which it is affine together.
        single: Places of arguments of which one may be live, the others being factors.
        optional: Joint places at which None stands for nothing that is added.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Tensor],
        joint: Axes = (),
        single: Axes = (),
        optional: Axes = (),
    ) -> None:
        self.name, self.run = name, run
        self.joint, self.single, self.optional = tuple(joint), tuple(single), tuple(optional)
        self._transpose: Callable[..., Any] | None = None

    def transpose(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the transpose, as a decorator: a cotangent, or a tuple of one for each live argument."""
        self._transpose = function
        return function

    def pull(self, args: Sequence[Any], options: dict[str, Any]) -> Pull:
        """The transpose at some arguments: from a cotangent u to cotangents of the live ones, in order."""
        live, transpose = list[Spec](), self._transpose
        for arg in args:
            if type(arg) is Spec:
                live.append(arg)
            elif type(arg) is tuple or type(arg) is list:
                live += [leaf for leaf in leaves(arg) if type(leaf) is Spec]

        def pulled(u: Tensor) -> tuple[Tensor, ...]:
            found = NotImplemented if transpose is None or u.is_complex() else transpose(u, *args, **options)
            if found is NotImplemented:
                found = self._differentiate(u, live, args, options)
            if len(live) == 1:
                return (fit(found[0] if type(found) is tuple else found, live[0]),)
            return tuple([fit(g, spec) for g, spec in zip(found, live, strict=True)])

        return pulled

    def _differentiate(self, u: Tensor, live: Sequence[Spec], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """By autograd through this one step, at zero; it is affine, so any point gives the same."""

        def of_live(*values: Tensor) -> Tensor:
            given = iter(values)
            return self.run(*mapped(list(args), lambda leaf: next(given) if type(leaf) is Spec else leaf), **options)

        zeros = [torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) for spec in live]
        return torch.func.vjp(of_live, *zeros)[1](u)


def operation(
    *, joint: Axes = (), single: Axes = (), optional: Axes = ()
) -> Callable[[Callable[..., Tensor]], Operation]:
    """Register a function as an operation under its own name.

    Args:
        joint: Places of arguments in which it is affine together.
        single: Places of arguments of which one may be live.
        optional: Joint places at which None stands for nothing that is added.
    """

    def register(run: Callable[..., Tensor]) -> Operation:
        name = run.__name__.rstrip("_")
        OPERATIONS[name] = Operation(name, run, joint, single, optional)
        return OPERATIONS[name]

    return register


def fit(u: Tensor, spec: Spec) -> Tensor:
    """A cotangent as large as its slot: summed over what was broadcast, in the slot's own type and place."""
    shape, dtype, device = spec
    if u.shape != shape:
        u = u.sum_to_size(shape)
    if u.dtype is not dtype and u.is_complex() and not dtype.is_complex:
        u = u.real
    return u if u.dtype is dtype and u.device == device else u.to(dtype=dtype, device=device)


def zeros(spec: Spec, u: Tensor) -> Tensor:
    """Zeros for a slot, in the type of a cotangent that is to be put into them."""
    return u.new_zeros(spec.shape)


# Shapes ---------------------------------------------------------------------------------------------------------------


@operation(joint=(0,))
def reshape(x: Tensor, shape: Axes) -> Tensor:
    """The same numbers in other axes."""
    return x.reshape(shape)


@reshape.transpose
def _(u: Tensor, x: Spec, shape: Axes) -> Tensor:
    return u.reshape(x.shape)


@operation(joint=(0,))
def permute(x: Tensor, axes: Axes) -> Tensor:
    """Axes in another order."""
    return x.permute(*axes)


@permute.transpose
def _(u: Tensor, x: Spec, axes: Axes) -> Tensor:
    return u.permute(sorted(range(len(axes)), key=lambda axis: axes[axis]))


@operation(joint=(0,))
def expand(x: Tensor, shape: Axes) -> Tensor:
    """Repeated along axes of length one, and along new ones in front."""
    return x.expand(shape)


@expand.transpose
def _(u: Tensor, x: Spec, shape: Axes) -> Tensor:
    return u


@operation(joint=(0,))
def cast(x: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """In another type, or on another device."""
    return x.to(dtype=dtype, device=device)


@cast.transpose
def _(u: Tensor, x: Spec, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    return u


@operation(joint=(0,))
def index(x: Tensor, at: tuple[Any, ...]) -> Tensor:
    """x[at], with numbers, slices, None and constant tensors."""
    return x[at]


@index.transpose
def _(u: Tensor, x: Spec, at: tuple[Any, ...]) -> Tensor:
    if any(isinstance(one, Tensor) for one in at):
        return _added_at(zeros(x, u), at, u) if _is_simple(at) else NotImplemented
    found = zeros(x, u)
    found[at] += u  # a view without overlap
    return found


def _is_simple(at: tuple[Any, ...]) -> bool:
    """Whether an index is of tensors and whole axes alone, as `index_put` takes it."""
    return all(isinstance(one, Tensor) or isinstance(one, slice) and one == slice(None) for one in at)


def _added_at(x: Tensor, at: tuple[Any, ...], value: Any) -> Tensor:
    """X after `x[at] += value`, also where a place is named several times."""
    return torch.ops.aten.index_put(x, [one if isinstance(one, Tensor) else None for one in at], value, True)


@operation(joint=(0,))
def narrow(x: Tensor, axis: int, start: int, length: int) -> Tensor:
    """Some places in a row of one axis."""
    return x.narrow(axis, start, length)


@narrow.transpose
def _(u: Tensor, x: Spec, axis: int, start: int, length: int) -> Tensor:
    found = zeros(x, u)
    found.narrow(axis, start, length).copy_(u)
    return found


@operation(joint=(0,))
def select(x: Tensor, axis: int, place: int) -> Tensor:
    """One place of an axis."""
    return x.select(axis, place)


@select.transpose
def _(u: Tensor, x: Spec, axis: int, place: int) -> Tensor:
    found = zeros(x, u)
    found.select(axis, place).copy_(u)
    return found


@operation(joint=(0,))
def index_select(x: Tensor, axis: int, places: Tensor) -> Tensor:
    """Some places of one axis, in any order."""
    return x.index_select(axis, places)


@index_select.transpose
def _(u: Tensor, x: Spec, axis: int, places: Tensor) -> Tensor:
    return zeros(x, u).index_add(axis, places, u)


@operation(joint=(0,))
def gather(x: Tensor, axis: int, places: Tensor) -> Tensor:
    """Along one axis, at each position of the result, the value at its own place."""
    return x.gather(axis, places)


@gather.transpose
def _(u: Tensor, x: Spec, axis: int, places: Tensor) -> Tensor:
    return zeros(x, u).scatter_add(axis, places, u)


@operation(joint=(0,))
def cat(parts: list[Tensor], axis: int) -> Tensor:
    """One after the other along an axis."""
    return torch.cat(parts, axis)


@cat.transpose
def _(u: Tensor, parts: list[Any], axis: int) -> tuple[Tensor, ...]:
    pieces = u.split([part.shape[axis] for part in parts], axis)
    return tuple([piece for piece, part in zip(pieces, parts, strict=True) if type(part) is Spec])


@operation(joint=(0,))
def stack(parts: list[Tensor], axis: int) -> Tensor:
    """One after the other along a new axis."""
    return torch.stack(parts, axis)


@stack.transpose
def _(u: Tensor, parts: list[Any], axis: int) -> tuple[Tensor, ...]:
    return tuple([piece for piece, part in zip(u.unbind(axis), parts, strict=True) if type(part) is Spec])


@operation(joint=(0, 3), optional=(3,))
def pad(x: Tensor, amounts: Axes, mode: str = "constant", value: float | None = None) -> Tensor:
    """More places at the ends of the last axes."""
    return F.pad(x, amounts, mode, value)


@operation(joint=(0,))
def flip(x: Tensor, axes: Axes) -> Tensor:
    """Backwards along axes."""
    return x.flip(axes)


@flip.transpose
def _(u: Tensor, x: Spec, axes: Axes) -> Tensor:
    return u.flip(axes)


@operation(joint=(0,))
def repeat_interleave(x: Tensor, times: int, axis: int) -> Tensor:
    """Each place of an axis several times in a row."""
    return x.repeat_interleave(times, axis)


@repeat_interleave.transpose
def _(u: Tensor, x: Spec, times: int, axis: int) -> Tensor:
    axis %= u.dim()
    return u.unflatten(axis, (-1, times)).sum(axis + 1)


@operation(joint=(0,))
def triangle(x: Tensor, diagonal: int, upper: bool) -> Tensor:
    """Zero below a diagonal, or above it."""
    return x.triu(diagonal) if upper else x.tril(diagonal)


@triangle.transpose
def _(u: Tensor, x: Spec, diagonal: int, upper: bool) -> Tensor:
    return u.triu(diagonal) if upper else u.tril(diagonal)


@operation(joint=(0,))
def as_strided(flat: Tensor, shape: Axes, strides: Axes, offset: int) -> Tensor:
    """A view of memory: of a row of numbers in the order in which they lie there."""
    return flat.contiguous().as_strided(shape, strides, offset)


@as_strided.transpose
def _(u: Tensor, flat: Spec, shape: Axes, strides: Axes, offset: int) -> Tensor:
    places = torch.arange(flat.shape[0], device=u.device).as_strided(shape, strides, offset)
    return zeros(flat, u).index_add(0, places.reshape(-1), u.reshape(-1))  # a view may show a number several times


@operation(joint=(0, 1))
def as_strided_scatter(flat: Tensor, value: Tensor, shape: Axes, strides: Axes, offset: int) -> Tensor:
    """The memory after a write through a view of it."""
    flat = flat.clone(memory_format=torch.contiguous_format)
    flat.as_strided(shape, strides, offset).copy_(value)
    return flat


@as_strided_scatter.transpose
def _(u: Tensor, flat: Any, value: Any, shape: Axes, strides: Axes, offset: int) -> tuple[Tensor, ...]:
    found = []
    if type(flat) is Spec:
        left = u.clone(memory_format=torch.contiguous_format)
        left.as_strided(shape, strides, offset).zero_()
        found.append(left)
    if type(value) is Spec:
        found.append(u.contiguous().as_strided(shape, strides, offset))
    return tuple(found)


# Sums -----------------------------------------------------------------------------------------------------------------


@operation(joint=(0,))
def sum_(x: Tensor, axes: Axes, keepdim: bool) -> Tensor:
    """Over axes."""
    return x.sum(axes, keepdim=keepdim)


@sum_.transpose
def _(u: Tensor, x: Spec, axes: Axes, keepdim: bool) -> Tensor:
    return _spread(u, x, axes, keepdim)


@operation(joint=(0,))
def mean(x: Tensor, axes: Axes, keepdim: bool) -> Tensor:
    """Over axes."""
    return x.mean(axes, keepdim=keepdim)


@mean.transpose
def _(u: Tensor, x: Spec, axes: Axes, keepdim: bool) -> Tensor:
    return _spread(u / math.prod([x.shape[axis] for axis in axes]), x, axes, keepdim)


def _spread(u: Tensor, x: Spec, axes: Axes, keepdim: bool) -> Tensor:
    if not keepdim:
        for axis in sorted([axis % len(x.shape) for axis in axes]):
            u = u.unsqueeze(axis)
    return u.expand(x.shape)


@operation(joint=(0,))
def cumsum(x: Tensor, axis: int) -> Tensor:
    """Running sums."""
    return x.cumsum(axis)


@cumsum.transpose
def _(u: Tensor, x: Spec, axis: int) -> Tensor:
    return u.flip(axis).cumsum(axis).flip(axis)


# Arithmetic -----------------------------------------------------------------------------------------------------------


@operation(joint=(0, 1))
def add(a: Any, b: Any) -> Tensor:
    """A + b."""
    return a + b


@add.transpose
def _(u: Tensor, a: Any, b: Any) -> tuple[Tensor, ...]:
    return tuple([u for one in (a, b) if type(one) is Spec])


@operation(joint=(0, 1))
def sub(a: Any, b: Any) -> Tensor:
    """A - b."""
    return a - b


@sub.transpose
def _(u: Tensor, a: Any, b: Any) -> tuple[Tensor, ...]:
    return tuple([-u if place else u for place, one in enumerate((a, b)) if type(one) is Spec])


@operation(single=(0, 1))
def mul(a: Any, b: Any) -> Tensor:
    """A ⊙ b, one of them a constant."""
    return a * b


@mul.transpose
def _(u: Tensor, a: Any, b: Any) -> Tensor:
    return u * (b if type(a) is Spec else a)


@operation(joint=(0,))
def gain(x: Tensor, factor: Tensor) -> Tensor:
    """X ⊙ factor, and zero where the factor is, though x be infinite: what is masked does not move."""
    return torch.where(factor == 0, 0, x) * factor


@gain.transpose
def _(u: Tensor, x: Spec, factor: Tensor) -> Tensor:
    return u * factor


@operation(joint=(0,))
def div(a: Tensor, b: Any) -> Tensor:
    """A / b with b constant."""
    return a / b


@div.transpose
def _(u: Tensor, a: Spec, b: Any) -> Tensor:
    return u / b


@operation(joint=(0, 1))
def blend(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    """A ⊙ of_a + b ⊙ of_b: a product of two live tensors, in which each is weighed by what the other was."""
    return a * of_a + b * of_b


@blend.transpose
def _(u: Tensor, a: Any, b: Any, of_a: Tensor, of_b: Tensor) -> tuple[Tensor, ...]:
    return u * of_a, u * of_b


@operation(joint=(1, 2))
def where(mask: Tensor, a: Any, b: Any) -> Tensor:
    """A where the mask says so, b elsewhere."""
    return torch.where(mask, a, b)


@where.transpose
def _(u: Tensor, mask: Tensor, a: Any, b: Any) -> tuple[Tensor, ...]:
    return tuple(
        [torch.where(mask if place == 0 else ~mask, u, 0) for place, one in enumerate((a, b)) if type(one) is Spec]
    )


@operation(single=(0, 1))
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """A b, one of them a constant."""
    return torch.matmul(a, b)


@matmul.transpose
def _(u: Tensor, a: Any, b: Any) -> Tensor:
    if min(len(a.shape), len(b.shape)) < 2:
        return NotImplemented
    return torch.matmul(u, b.mT) if type(a) is Spec else torch.matmul(a.mT, u)


@operation(joint=(0, 2), optional=(2,))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X Wᵀ + b."""
    return F.linear(x, weight, bias)


@linear.transpose
def _(u: Tensor, x: Any, weight: Tensor, bias: Any = None) -> tuple[Tensor, ...]:
    return tuple(
        [torch.matmul(u, weight) if place == 0 else u for place, one in enumerate((x, bias)) if type(one) is Spec]
    )


@operation(single=(1, 2, 3, 4, 5, 6))
def einsum(equation: str, *operands: Tensor) -> Tensor:
    """A sum of products, all operands but one constant."""
    return torch.einsum(equation, *operands)


@operation(single=(0, 1))
def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Matrix products of groups of rows, each with a matrix of its own: the experts of a router."""
    function = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    return function(a, b, offs=offsets, out_dtype=dtype)


@grouped_mm.transpose
def _(u: Tensor, a: Any, b: Any, offsets: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if type(b) is Spec or len(a.shape) != 2 or b.dim() != 3:
        return NotImplemented
    return grouped_mm.run(u.contiguous(), b.mT, offsets)


@operation(joint=(0, 2), optional=(2,))
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Axes,
    padding: Axes,
    dilation: Axes,
    transposed: bool,
    output_padding: Axes,
    groups: int,
) -> Tensor:
    """A convolution or its transpose, over any number of axes."""
    return torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


@operation(joint=(1,))
def solve(matrix: Tensor, b: Tensor, upper: bool | None, left: bool, unitriangular: bool) -> Tensor:
    """A⁻¹ b; with `upper` given, of a triangular matrix."""
    if upper is None:
        return torch.linalg.solve(matrix, b, left=left)
    return torch.linalg.solve_triangular(matrix, b, upper=upper, left=left, unitriangular=unitriangular)


@operation(joint=(0,))
def constant(value: Tensor) -> Tensor:
    """A held tensor that stands in the place of a live one: what a write left in its memory."""
    return value


# Writes ---------------------------------------------------------------------------------------------------------------


@operation(joint=(0, 2))
def put(x: Tensor, at: tuple[Any, ...], value: Any, accumulate: bool = False) -> Tensor:
    """X after `x[at] = value`, or after `x[at] += value`."""
    if accumulate:
        return _added_at(x, at, value)
    x = x.clone()
    x[at] = value
    return x


@put.transpose
def _(u: Tensor, x: Any, at: tuple[Any, ...], value: Any, accumulate: bool = False) -> tuple[Tensor, ...]:
    found = []
    if type(x) is Spec:
        left = u if accumulate else u.clone()
        if not accumulate:
            left[at] = 0
        found.append(left)
    if type(value) is Spec:
        found.append(u[at])
    return tuple(found)


@operation(joint=(0, 3))
def index_add(x: Tensor, axis: int, places: Tensor, source: Tensor, alpha: float = 1) -> Tensor:
    """X with rows of the source added at places of an axis."""
    return x.index_add(axis, places, source, alpha=alpha)


@index_add.transpose
def _(u: Tensor, x: Any, axis: int, places: Tensor, source: Any, alpha: float = 1) -> tuple[Tensor, ...]:
    of_source = [alpha * u.index_select(axis, places)] if type(source) is Spec else []
    return (*([u] if type(x) is Spec else []), *of_source)


@operation(joint=(0, 3))
def scatter(x: Tensor, axis: int, places: Tensor, source: Any) -> Tensor:
    """X with numbers of the source written over its own at places of an axis."""
    return x.scatter(axis, places, source)


@scatter.transpose
def _(u: Tensor, x: Any, axis: int, places: Tensor, source: Any) -> tuple[Tensor, ...]:
    left = [u.scatter(axis, places, 0)] if type(x) is Spec else []
    return (*left, *_of_source(u.gather(axis, places), source))


@operation(joint=(0, 3))
def scatter_add(x: Tensor, axis: int, places: Tensor, source: Tensor) -> Tensor:
    """X with numbers of the source added to its own at places of an axis."""
    return x.scatter_add(axis, places, source)


@scatter_add.transpose
def _(u: Tensor, x: Any, axis: int, places: Tensor, source: Any) -> tuple[Tensor, ...]:
    return (*([u] if type(x) is Spec else []), *_of_source(u.gather(axis, places), source))


def _of_source(u: Tensor, source: Any) -> list[Tensor]:
    """A cotangent of the part of a source that the places cover."""
    if type(source) is not Spec:
        return []
    found = zeros(source, u)
    found[tuple([slice(size) for size in u.shape])] = u
    return [found]


# Any other linear function of torch -----------------------------------------------------------------------------------

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
"""Functions that are linear in their first argument and need no form of their own; they are differentiated."""

LINEAR_FUNCTIONS["window"] = F.unfold
JOINT = {"complex": (0, 1), "index_copy": (0, 3)}
"""Those of them that are affine in other arguments too."""

for _name, _function in LINEAR_FUNCTIONS.items():
    OPERATIONS[_name] = Operation(_name, _function, JOINT.get(_name, (0,)))
