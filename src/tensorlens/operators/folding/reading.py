"""What each slot of a block holds, as paths: an interpretation of its steps, without running them.

Every slot is a sum of paths from a few sources. Steps that scale, centre or multiply by a matrix add a piece to each
path; steps that move axes are followed by sending the numbers of rows and of channels through them. Numbers are
expanded views, so that this copies next to nothing, however large the tensors of the block are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import AnatomyError
from tensorlens.models.precision import at_least_float32
from tensorlens.operators.folding.pieces import Path, Piece
from tensorlens.program.composite import rows_of_attention
from tensorlens.program.nodes import Held, Slot, Step, leaves, mapped, words
from tensorlens.program.operations import OPERATIONS
from tensorlens.program.program import Program

MOVES = words("reshape permute expand index narrow select index_select flip repeat_interleave repeat cat")
"""Operations that put numbers elsewhere and change none."""

BY_NUMBER = words("index index_select")
"""Those of them that take constants: the numbers of places."""

CENTRE, MEAN, MINUS = Piece("centre"), Piece("mean"), Piece("scale", torch.tensor(-1.0, dtype=torch.float64))


class NotFoldable(AnatomyError):  # noqa: N818  (its message is a reason, not an error)
    """A block is made of more than one attention and maps that act on every token alone."""


@dataclass(frozen=True, eq=False)
class Sum:
    """What a slot holds: a sum of paths, each of which gives (row, channel). A row is a token of a sample.

    Attributes:
        shape: Of the slot.
        is_channel: Which axes count channels; all others count rows. False for an axis of length one.
        paths: The paths.
        rows: The row at each place, where they are not in order.
    """

    shape: tuple[int, ...]
    is_channel: tuple[bool, ...]
    paths: tuple[Path, ...]
    rows: Tensor | None = None

    @property
    def width(self) -> int:
        """How many channels."""
        return math.prod([n for n, is_channel in zip(self.shape, self.is_channel, strict=True) if is_channel])

    @property
    def ends_in_channels(self) -> bool:
        """Whether the last axis counts all channels."""
        return self.shape[-1] == self.width and (self.is_channel[-1] or self.width == 1)

    def then(self, *pieces: Piece) -> Sum:
        """The same with further pieces at the end of every path."""
        return replace(self, paths=tuple([Path(path.source, (*path.pieces, *pieces)) for path in self.paths]))

    def from_here(self, slot: int) -> Sum:
        """The same slot as a source."""
        return replace(self, paths=(Path(slot),))

    def numbers(self, of_channels: bool) -> Tensor:
        """The number of the channel, or of the row, at every place of the slot."""
        counted = [n if is_one == of_channels else 1 for n, is_one in zip(self.shape, self.is_channel, strict=True)]
        return torch.arange(math.prod(counted)).view(counted).expand(self.shape)


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """Attention meeting values.

    Attributes:
        slot: What it gave.
        shape: Samples, heads, tokens, channels of a head.
        values: What was mixed: (row, head · channel of a head); values that heads share are repeated.
        matrix: Gives A as (sample, head, out_token, in_token).
    """

    slot: int
    shape: tuple[int, int, int, int]
    values: Sum
    matrix: Callable[[], Tensor]


class Reading:
    """Reads the steps of a program, one after the other. What they add is left out.

    Args:
        program: The program, whose first input is a state (sample, token, channel).
        sources: Where paths begin; the input if None.
    """

    def __init__(self, program: Program, sources: Mapping[int, Sum] | None = None) -> None:
        self.program = program
        shape, start = program.specs[program.inputs[0]].shape, program.inputs[0]
        self.n_samples, self.n_tokens, n_channels = shape
        self.device = program.specs[start].device
        self.sums = dict(sources or {start: Sum(shape, (False, False, n_channels > 1), (Path(start),))})
        self.mixing: AttentionStep | None = None

    def read(self, step: Step) -> None:
        """One more step.

        Raises:
            NotFoldable: it is neither a map of single tokens nor the first attention.
        """
        try:
            if step.operation in MOVES:
                self.sums[step.out] = self._move(step)
            elif step.operation in READERS:
                known = mapped(step.args, self._known)
                self.sums[step.out] = READERS[step.operation](self, step.out, *known, **step.options)
            else:
                raise NotFoldable(f"`{step.operation}` is not followed")
        except NotFoldable as error:
            raise NotFoldable(f"{error} (in `{step.module or 'the model'}`)") from None

    def _known(self, leaf: Any) -> Any:
        if type(leaf) is Slot:
            return self.sums[leaf.index]
        return self.program.constants[leaf.index] if type(leaf) is Held else leaf

    # Moves ------------------------------------------------------------------------------------------------------------

    def _move(self, step: Step) -> Sum:
        if len(step.slots) != 1 or step.operation not in BY_NUMBER and any(type(x) is Held for x in leaves(step.args)):
            raise NotFoldable(f"`{step.operation}` joins several tensors")
        run, constants = OPERATIONS[step.operation].run, self.program.constants

        def move(numbers: Tensor) -> Tensor:
            def given(leaf: Any) -> Any:
                kind = type(leaf)
                return numbers if kind is Slot else constants[leaf.index].cpu() if kind is Held else leaf

            return run(*mapped(step.args, given), **step.options)

        return self.moved(self.sums[step.slots[0]], move)

    def moved(self, value: Sum, move: Callable[[Tensor], Tensor]) -> Sum:
        """A value after a move, found by moving the numbers of its rows and channels."""
        rows, channels = move(value.numbers(of_channels=False)), move(value.numbers(of_channels=True))
        shape = tuple(rows.shape)
        is_channel = tuple([_counts_channels(rows, channels, axis) for axis in range(len(shape))])
        # Rows vary along their own axes alone and channels along theirs, so that the first of all others stand for all.
        rows = rows[tuple([slice(1) if is_one else slice(None) for is_one in is_channel])].flatten()
        channels = channels[tuple([slice(None) if is_one else slice(1) for is_one in is_channel])].flatten()
        found = replace(value, shape=shape, is_channel=is_channel, rows=self._order(value.rows, rows))
        is_same = len(channels) == value.width and torch.equal(channels, torch.arange(len(channels)))
        return found if is_same else found.then(Piece("take", channels))

    def _order(self, before: Tensor | None, rows: Tensor) -> Tensor | None:
        """The row at each place after a move of rows; None where they are in order."""
        in_order = torch.arange(self.n_samples * self.n_tokens)
        if not torch.equal(rows.sort().values, in_order):
            raise NotFoldable("some tokens are left out or repeated")
        rows = rows if before is None else before[rows]
        return None if torch.equal(rows, in_order) else rows

    def expanded(self, value: Sum, shape: Sequence[int]) -> Sum:
        """A value repeated along axes of length one, and along new ones in front."""
        return value if value.shape == tuple(shape) else self.moved(value, lambda numbers: numbers.expand(tuple(shape)))

    # Factors ----------------------------------------------------------------------------------------------------------

    def scaled(self, value: Sum, by: Any) -> Sum:
        """A value multiplied by a constant, whatever that varies with."""
        by = by if isinstance(by, Tensor) else torch.tensor(by, dtype=torch.float64)
        value = self.expanded(value, torch.broadcast_shapes(value.shape, by.shape))
        # Of a single token nothing varies; what has all axes was made of it, and is not a weight.
        of_single = self.n_samples * self.n_tokens == 1 and by.dim() == len(value.shape)
        by = by.view((1,) * (len(value.shape) - by.dim()) + tuple(by.shape))
        by = by[tuple([slice(1) if stride == 0 else slice(None) for stride in by.stride()])]
        sizes = list(zip(value.shape, by.shape, value.is_channel, strict=True))
        per_row = of_single or any(n > 1 for _, n, is_one in sizes if not is_one)
        per_channel = any(n > 1 for _, n, is_one in sizes if is_one)
        by = by.expand([n if (per_channel if is_one else per_row) else 1 for n, _, is_one in sizes])
        if not per_row:
            return value.then(Piece("scale", by.flatten() if per_channel else by.reshape(())))
        axes = sorted(range(by.dim()), key=lambda axis: value.is_channel[axis])  # rows first
        by = by.permute(axes).reshape(self.n_samples * self.n_tokens, -1)
        by = by if value.rows is None else by[value.rows.argsort().to(by.device)]
        return value.then(Piece("gain", by) if per_channel else Piece("token", by[:, 0]))

    def added(self, a: Any, b: Any) -> Sum:
        """A sum of two values, of which one may be constant: that is left out."""
        shape = torch.broadcast_shapes(*(getattr(one, "shape", ()) for one in (a, b)))
        a, b = (self.expanded(one, shape) if isinstance(one, Sum) else None for one in (a, b))
        if a is None or b is None:
            return a or b  # type: ignore[return-value]
        if a.is_channel != b.is_channel or not _same_rows(a.rows, b.rows):
            raise NotFoldable("values are added that lie in different orders")
        return replace(a, paths=_with_centring((*a.paths, *b.paths)))

    def mixed(self, slot: int, values: Sum, form: Callable[[], Tensor]) -> Sum:
        """What attention makes of values (…, token, channel of a head): a source of its own.

        Args:
            slot: What it gives.
            values: What is mixed.
            form: Gives the attention matrices (…, out_token, in_token).
        """
        if self.mixing is not None:
            raise NotFoldable("there is more than one attention")
        *lead, n_out, d_head = self.program.specs[slot].shape
        values = self.expanded(values, (*lead, *values.shape[-2:]))
        of_heads = values.is_channel[:-2]
        n_samples = math.prod([n for n, is_one in zip(lead, of_heads, strict=True) if not is_one])
        is_whole = (values.shape[-2], n_out, n_samples) == (self.n_tokens, self.n_tokens, self.n_samples)
        if not is_whole or values.is_channel[-2] or values.is_channel[-1] != (d_head > 1) or values.rows is not None:
            raise NotFoldable("attention does not go from all tokens of a sample to all of them")

        def matrix() -> Tensor:
            axes = sorted(range(len(lead)), key=lambda axis: of_heads[axis])  # samples first
            found = form().expand(*lead, n_out, n_out).permute(*axes, -2, -1)
            return found.reshape(self.n_samples, -1, n_out, n_out)

        n_heads = math.prod(lead) // n_samples
        self.mixing = AttentionStep(slot, (self.n_samples, n_heads, n_out, d_head), values, matrix)
        return replace(values.from_here(slot), shape=(*lead, n_out, d_head))


def _counts_channels(rows: Tensor, channels: Tensor, axis: int) -> bool:
    """Whether an axis counts channels. One along which nothing varies repeats them."""
    if rows.shape[axis] == 1:
        return False
    by_row, by_channel = (numbers.stride(axis) != 0 for numbers in (rows, channels))
    if by_row and by_channel:  # the move made a copy, so that strides say nothing
        by_row, by_channel = (bool((n != n.narrow(axis, 0, 1)).any()) for n in (rows, channels))
        if by_row and by_channel:
            raise NotFoldable("an axis counts tokens and channels together")
    return not by_row


def _same_rows(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or a is not None and b is not None and torch.equal(a, b)


def _with_centring(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Paths of a sum, in which p less the mean of p, written out by hand, is p and a centring."""
    centred = set(paths) & set(map(_mean_taken_from, paths))
    return tuple(
        [
            Path(path.source, (*path.pieces, CENTRE)) if path in centred else path
            for path in paths
            if _mean_taken_from(path) not in centred
        ]
    )


def _mean_taken_from(path: Path) -> Path | None:
    """The path whose mean this path takes away from all channels, if that is what it does."""
    is_mean = [piece.kind for piece in path.pieces[-3:]] == ["mean", "scale", "take"] and path.pieces[-2] is MINUS
    return Path(path.source, path.pieces[:-3]) if is_mean else None


# What each operation does ---------------------------------------------------------------------------------------------

READERS: dict[str, Callable[..., Sum]] = {}


def reads(names: str) -> Callable[[Callable[..., Sum]], Callable[..., Sum]]:
    """Register what operations do to paths: called with the reading, the slot that is filled and the arguments."""
    return lambda reader: READERS.update(dict.fromkeys(names.split(), reader)) or reader


@reads("cast")
def _(reading: Reading, slot: int, x: Sum, dtype: torch.dtype, device: torch.device | None = None) -> Sum:
    if device is not None and torch.device(device) != reading.device:
        raise NotFoldable("it lies on several devices")
    return x


@reads("mul gain")
def _(reading: Reading, slot: int, a: Any, b: Any) -> Sum:
    return reading.scaled(a, b) if isinstance(a, Sum) else reading.scaled(b, a)


@reads("div")
def _(reading: Reading, slot: int, a: Sum, b: Any) -> Sum:
    return reading.scaled(a, 1 / b)


@reads("add")
def _(reading: Reading, slot: int, a: Any, b: Any) -> Sum:
    return reading.added(a, b)


@reads("sub")
def _(reading: Reading, slot: int, a: Any, b: Any) -> Sum:
    return reading.added(a, b.then(MINUS) if isinstance(b, Sum) else b)


@reads("blend")
def _(reading: Reading, slot: int, a: Sum, b: Sum, of_a: Tensor, of_b: Tensor) -> Sum:
    return reading.added(reading.scaled(a, of_a), reading.scaled(b, of_b))


@reads("mean")
def _(reading: Reading, slot: int, x: Sum, axes: Sequence[int], keepdim: bool) -> Sum:
    _check_axes(x, axes)
    shape = reading.program.specs[slot].shape
    return replace(x.then(MEAN), shape=shape, is_channel=(False,) * len(shape))


@reads("norm")
def _(
    reading: Reading,
    slot: int,
    x: Sum,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Any,
    axes: Sequence[int],
    centred: bool,
    unit: Tensor | None = None,
) -> Sum:
    if unit is not None or isinstance(bias, Sum):
        raise NotFoldable("more than a row of channels goes into a norm")
    if centred:
        _check_axes(x, axes)
        x = x.then(CENTRE)
    x = reading.scaled(x, inverse)
    return x if weight is None else reading.scaled(x, weight)


def _check_axes(x: Sum, axes: Sequence[int]) -> None:
    """Raise unless the axes are those of all channels."""
    asked = {axis % len(x.shape) for axis in axes}
    if any(
        n > 1 and is_one != (axis in asked) for axis, (n, is_one) in enumerate(zip(x.shape, x.is_channel, strict=True))
    ):
        raise NotFoldable("a mean is not taken over the channels of a token")


@reads("linear")
def _(reading: Reading, slot: int, x: Any, weight: Tensor, bias: Any = None) -> Sum:
    if not isinstance(x, Sum) or isinstance(bias, Sum) or not x.ends_in_channels:
        raise NotFoldable("a matrix does not act on all channels of a token")
    shape, is_channel = (*x.shape[:-1], len(weight)), (*x.is_channel[:-1], len(weight) > 1)
    return replace(x.then(Piece("weight", weight, slot)), shape=shape, is_channel=is_channel)


@reads("matmul")
def _(reading: Reading, slot: int, a: Any, b: Any) -> Sum:
    if isinstance(a, Sum):
        if b.numel() != math.prod(b.shape[-2:]) or not 2 <= b.dim() <= len(a.shape):
            raise NotFoldable("tokens or heads have matrices of their own")
        return READERS["linear"](reading, slot, a, b.reshape(b.shape[-2:]).mT)
    if a.dim() < 2 or len(b.shape) < 2:
        raise NotFoldable("a vector is multiplied")
    return reading.mixed(slot, b, lambda: a)


@reads("attention")
def _(
    reading: Reading,
    slot: int,
    query: Tensor,
    key: Tensor,
    value: Sum,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Sum:
    n_shared = query.shape[-3] // key.shape[-3] if grouped else 1
    if n_shared > 1:
        value = reading.moved(value, lambda numbers: numbers.repeat_interleave(n_shared, -3))

    def form() -> Tensor:
        q, k = at_least_float32(query), at_least_float32(key)
        k = k.repeat_interleave(n_shared, -3) if n_shared > 1 else k
        return rows_of_attention(q, k, mask, causal, q.shape[-1] ** -0.5 if scale is None else scale)

    return reading.mixed(slot, value, form)
