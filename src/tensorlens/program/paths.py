r"""A block as a set of paths, found by reading its steps without running them.

A path leads from a source (the block's input, the result of attention, the residual stream) to a slot. It is a chain of
pieces, each of which acts on every token on its own. For rows x (row, channel), where a row is a token of a sample:

| kind     | of row l                           | shape of `by`          |
|----------|------------------------------------|------------------------|
| `weight` | $W x_l$, one matrix for all        | (out channel, channel) |
| `scale`  | $g \odot x_l$                      | (channel,) or ()       |
| `token`  | $t_l\,x_l$                         | (row,)                 |
| `gain`   | $\psi_l \odot x_l$                 | (row, channel)         |
| `take`   | some channels, in another order    | (out channel,)         |
| `centre` | $x_l - \mathrm{mean}(x_l)$         |                        |

A norm whose statistic is held is a `centre` (or none), a `token` and a `scale`; an activation is a `gain`. Every slot
holds a sum of paths. Steps that scale, centre or multiply by a matrix add a piece to each; steps that move axes are
followed by sending row and channel indices through them. The indices are expanded views, so that this copies
next to nothing, however large the tensors of the block are.

The steps of a block are read from its input x to attention, whose mixture m is a source of its own, and on to the first
slot that everything passes through after it: the residual stream s. From there they are read again. So the block is

    s = C x + O m,   y = E s      (or y = E x + O m, where attention and feed-forward both take x),   m = mix(V x)

and C, O, V and E are sums of paths. The code knows no family of models by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tensorlens.errors import AnatomyError, words
from tensorlens.program.marks import move
from tensorlens.program.program import Program, filled
from tensorlens.program.steps import Axes, Held, Step, at_least_float32, leaves, rows_of_attention

Kind = Literal["weight", "scale", "token", "gain", "take", "centre"]

REORDERING = words("reshape permute expand index narrow select index_select flip repeat_interleave repeat cat")
"""Operations that move numbers without changing them. Of these, `index` and `index_select` take constants."""

_NOTHING = torch.empty(0)


class NotFoldable(AnatomyError):  # noqa: N818  (its message is a reason, not an error)
    """A block is not made of one attention and maps that act on every token on its own."""


@contextmanager
def naming_block(name: str, n: int) -> Iterator[None]:
    """The error that names a block that cannot be folded and its consequence."""
    try:
        yield
    except NotFoldable as error:
        raise NotFoldable(
            f"Block {n} of `{name}` cannot be folded: {error}. Expected one attention and maps that act on every token "
            "alone. Rows and norms are computed by the program instead; methods that need the weights do not apply."
        ) from None


# Paths ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Piece:
    """One map of single tokens. Pieces are compared by identity.

    Attributes:
        kind: Which map it is.
        by: Its numbers.
    """

    kind: Kind
    by: Tensor = _NOTHING


CENTRE, MINUS = Piece("centre"), Piece("scale", torch.tensor(-1.0, dtype=torch.float64))

Chain = tuple[Piece, ...]
"""Pieces, one after the other."""


class Path(NamedTuple):
    """A chain of pieces from a slot."""

    source: int
    pieces: Chain = ()

    @property
    def has_weights(self) -> bool:
        """Whether it goes through a matrix."""
        return "weight" in [piece.kind for piece in self.pieces]


def has_norm(pieces: Chain) -> bool:
    """Whether a norm is among some pieces: a factor that depends on the token."""
    return any(piece.kind == "token" for piece in pieces)


def before_weight(pieces: Chain) -> Chain:
    """Some pieces up to the first matrix."""
    return tuple(takewhile(lambda piece: piece.kind != "weight", pieces))


@dataclass(frozen=True, eq=False)
class Paths:
    """The content of a slot: a sum of paths, each of which gives (row, channel). A row is a token of a sample.

    Attributes:
        shape: Shape of the slot.
        is_channel: Which axes count channels; all others count rows. False for an axis of length one.
        paths: The paths.
    """

    shape: Axes
    is_channel: tuple[bool, ...]
    paths: tuple[Path, ...]

    @property
    def width(self) -> int:
        """How many channels."""
        return math.prod([n for n, is_channel in zip(self.shape, self.is_channel, strict=True) if is_channel])

    @property
    def ends_in_channels(self) -> bool:
        """Whether the last axis counts all channels."""
        return self.shape[-1] == self.width and (self.is_channel[-1] or self.width == 1)

    def then(self, *pieces: Piece) -> Paths:
        """A copy with further pieces at the end of every path."""
        return replace(self, paths=tuple([Path(path.source, (*path.pieces, *pieces)) for path in self.paths]))

    def from_here(self, slot: int) -> Paths:
        """The same slot as a source."""
        return replace(self, paths=(Path(slot),))

    def numbers(self, of_channels: bool) -> Tensor:
        """The index of the channel, or of the row, at every place of the slot."""
        counted = [n if is_one == of_channels else 1 for n, is_one in zip(self.shape, self.is_channel, strict=True)]
        return torch.arange(math.prod(counted)).view(counted).expand(self.shape)


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """Attention times values.

    Attributes:
        slot: Its result.
        shape: Samples, heads, tokens, channels of a head.
        values: The values: (row, head · channel of a head); values that heads share are repeated.
        matrix: Gives A as (sample, head, out_token, in_token).
    """

    slot: int
    shape: tuple[int, int, int, int]
    values: Paths
    matrix: Callable[[], Tensor]


# Reading steps --------------------------------------------------------------------------------------------------------


class StepReader:
    """Reads the steps of a program, one after the other. Added constants are left out.

    Args:
        program: The program, whose first input is a state (sample, token, channel).
        sources: Where paths begin; the input if None.
    """

    def __init__(self, program: Program, sources: Mapping[int, Paths] | None = None) -> None:
        self.program = program
        shape, start = program.specs[program.inputs[0]].shape, program.inputs[0]
        self.n_samples, self.n_tokens, n_channels = shape
        self.device = program.specs[start].device
        self.found = dict(sources or {start: Paths(shape, (False, False, n_channels > 1), (Path(start),))})
        self.mixing: AttentionStep | None = None

    def read(self, step: Step) -> None:
        """Read one more step.

        Raises:
            NotFoldable: it is neither a map of single tokens nor the first attention.
        """
        try:
            if step.operation in REORDERING:
                self.found[step.out] = self._move(step)
            elif step.operation in READERS:
                known = filled(step.args, self.found, self.program.constants)
                self.found[step.out] = READERS[step.operation](self, step.out, *known, **step.options)
            else:
                raise NotFoldable(f"`{step.operation}` is not followed")
        except NotFoldable as error:
            raise NotFoldable(f"{error} (in `{step.module or 'the model'}`)") from None

    def _move(self, step: Step) -> Paths:
        holds = step.operation not in ("index", "index_select") and any(type(x) is Held for x in leaves(step.args))
        if len(step.slots) != 1 or holds:
            raise NotFoldable(f"`{step.operation}` joins several tensors")
        return self.moved(self.found[step.slots[0]], partial(move, self.program, step))

    def moved(self, value: Paths, move: Callable[[Tensor], Tensor]) -> Paths:
        """A value after a move, found by moving its row and channel indices."""
        # Both have the shape after the move, and at each place the row, or channel, that the number came from.
        rows, channels = move(value.numbers(of_channels=False)), move(value.numbers(of_channels=True))
        shape = tuple(rows.shape)
        if 0 in shape:
            raise NotFoldable("a part that takes no token at all, such as an expert that none was sent to")
        is_channel = tuple([_counts_channels(rows, channels, axis) for axis in range(len(shape))])
        # Row indices vary only along row axes and channel indices along channel axes: one entry of other axes suffices.
        rows = rows[tuple([slice(1) if is_one else slice(None) for is_one in is_channel])].flatten()
        channels = channels[tuple([slice(None) if is_one else slice(1) for is_one in is_channel])].flatten()
        if not torch.equal(rows, torch.arange(self.n_samples * self.n_tokens)):
            raise NotFoldable("some tokens are left out, repeated, or in another order")
        found = replace(value, shape=shape, is_channel=is_channel)
        is_same = len(channels) == value.width and torch.equal(channels, torch.arange(len(channels)))
        return found if is_same else found.then(Piece("take", channels))

    def expanded(self, value: Paths, shape: Sequence[int]) -> Paths:
        """A value repeated along axes of length one, and along new leading axes."""
        return value if value.shape == tuple(shape) else self.moved(value, lambda numbers: numbers.expand(tuple(shape)))

    def scaled(self, value: Paths, by: Any) -> Paths:
        """A value multiplied by a constant, along whatever axes the constant varies."""
        by = by if isinstance(by, Tensor) else torch.tensor(by, dtype=torch.float64)
        value = self.expanded(value, np.broadcast_shapes(value.shape, by.shape))
        # With a single token nothing varies by row; a factor with all axes was computed from it and is not a weight.
        of_single = self.n_samples * self.n_tokens == 1 and by.dim() == len(value.shape)
        # As many axes as the value; of length one where the constant does not vary, which a stride of zero shows.
        by = by.view((1,) * (len(value.shape) - by.dim()) + tuple(by.shape))
        by = by[tuple([slice(1) if stride == 0 else slice(None) for stride in by.stride()])]
        sizes = list(zip(value.shape, by.shape, value.is_channel, strict=True))
        per_row = of_single or math.prod([n for _, n, is_one in sizes if not is_one]) > 1
        per_channel = math.prod([n for _, n, is_one in sizes if is_one]) > 1
        by = by.expand([n if (per_channel if is_one else per_row) else 1 for n, _, is_one in sizes])
        if not per_row:
            return value.then(Piece("scale", by.flatten() if per_channel else by.reshape(())))
        axes = sorted(range(by.dim()), key=lambda axis: value.is_channel[axis])  # rows first
        by = by.permute(axes).reshape(self.n_samples * self.n_tokens, -1)
        return value.then(Piece("gain", by) if per_channel else Piece("token", by[:, 0]))

    def added(self, a: Any, b: Any) -> Paths:
        """A sum of two values; a constant one is left out."""
        shape = np.broadcast_shapes(getattr(a, "shape", ()), getattr(b, "shape", ()))
        a, b = (self.expanded(one, shape) if isinstance(one, Paths) else None for one in (a, b))
        if a is None or b is None:
            return a or b  # type: ignore[return-value]
        if a.is_channel != b.is_channel:
            raise NotFoldable("values in different orders are added")
        return replace(a, paths=(*a.paths, *b.paths))

    def mixed(self, slot: int, values: Paths, form: Callable[[], Tensor]) -> Paths:
        """The result of attention over values (…, token, channel of a head): a source of its own.

        Args:
            slot: Its result.
            values: The values that are mixed.
            form: Gives the attention matrices (…, out_token, in_token).
        """
        if self.mixing is not None:
            raise NotFoldable("there is more than one attention")
        *lead, n_out, d_head = self.program.specs[slot].shape
        values = self.expanded(values, (*lead, *values.shape[-2:]))
        of_heads = values.is_channel[:-2]
        n_samples = math.prod([n for n, is_one in zip(lead, of_heads, strict=True) if not is_one])
        is_whole = (values.shape[-2], n_out, n_samples) == (self.n_tokens, self.n_tokens, self.n_samples)
        if not is_whole or values.is_channel[-2] or values.is_channel[-1] != (d_head > 1):
            raise NotFoldable("attention does not go from all tokens of a sample to all of them")

        def matrix() -> Tensor:
            # (…, out_token, in_token), axes of samples and heads in any order, as (sample, head, out_token, in_token)
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
    if by_row and by_channel:  # the move made a copy, so strides say nothing
        by_row, by_channel = (bool((n != n.narrow(axis, 0, 1)).any()) for n in (rows, channels))
        if by_row and by_channel:
            raise NotFoldable("an axis counts tokens and channels together")
    return not by_row


# What each operation does to paths: called with the reader, the slot that is filled and the arguments -----------------

READERS: dict[str, Callable[..., Paths]] = {
    "mul": lambda reader, slot, a, b: reader.scaled(a, b) if isinstance(a, Paths) else reader.scaled(b, a),
    "gain": lambda reader, slot, x, factor: reader.scaled(x, factor),
    "div": lambda reader, slot, a, b: reader.scaled(a, 1 / b),
    "add": lambda reader, slot, a, b: reader.added(a, b),
    "sub": lambda reader, slot, a, b: reader.added(a, b.then(MINUS) if isinstance(b, Paths) else b),
    "blend": lambda reader, slot, a, b, of_a, of_b: reader.added(reader.scaled(a, of_a), reader.scaled(b, of_b)),
}


def reads(name: str) -> Callable[[Callable[..., Paths]], Callable[..., Paths]]:
    """Register the effect of an operation on paths."""
    return lambda function: READERS.setdefault(name, function)


@reads("cast")
def _(reader: StepReader, slot: int, x: Paths, dtype: torch.dtype, device: torch.device | None = None) -> Paths:
    if device is not None and torch.device(device) != reader.device:
        raise NotFoldable("it is spread over several devices")
    return x


@reads("norm")
def _(
    reader: StepReader,
    slot: int,
    x: Paths,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Any,
    axes: Axes,
    centred: bool,
    unit: Tensor | None = None,
) -> Paths:
    if unit is not None or isinstance(bias, Paths):
        raise NotFoldable("more than a row of channels goes into a norm")
    if centred:
        asked, sizes = {axis % len(x.shape) for axis in axes}, zip(x.shape, x.is_channel, strict=True)
        if any(n > 1 and is_one != (axis in asked) for axis, (n, is_one) in enumerate(sizes)):
            raise NotFoldable("a mean is not taken over the channels of a token")
        x = x.then(CENTRE)
    x = reader.scaled(x, inverse)
    return x if weight is None else reader.scaled(x, weight)


@reads("linear")
def _(reader: StepReader, slot: int, x: Any, weight: Any, bias: Any = None) -> Paths:
    if type(weight) is tuple:
        raise NotFoldable("a weight is packed")
    if not isinstance(x, Paths) or isinstance(bias, Paths) or not x.ends_in_channels:
        raise NotFoldable("a matrix does not act on all channels of a token")
    shape, is_channel = (*x.shape[:-1], len(weight)), (*x.is_channel[:-1], len(weight) > 1)
    return replace(x.then(Piece("weight", weight)), shape=shape, is_channel=is_channel)


@reads("matmul")
def _(reader: StepReader, slot: int, a: Any, b: Any) -> Paths:
    if isinstance(a, Paths):
        if b.numel() != math.prod(b.shape[-2:]) or not 2 <= b.dim() <= len(a.shape):
            raise NotFoldable("tokens or heads have matrices of their own")
        return READERS["linear"](reader, slot, a, b.reshape(b.shape[-2:]).mT)
    if a.dim() < 2 or len(b.shape) < 2:
        raise NotFoldable("a vector is multiplied")
    return reader.mixed(slot, b, lambda: a)


@reads("attention")
def _(
    reader: StepReader,
    slot: int,
    query: Tensor,
    key: Tensor,
    value: Paths,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Paths:
    n_shared = query.shape[-3] // key.shape[-3] if grouped else 1
    if n_shared > 1:
        value = reader.moved(value, lambda numbers: numbers.repeat_interleave(n_shared, -3))

    def form() -> Tensor:
        q, k = at_least_float32(query), at_least_float32(key)
        k = k.repeat_interleave(n_shared, -3) if n_shared > 1 else k
        return rows_of_attention(q, k, mask, causal, q.shape[-1] ** -0.5 if scale is None else scale)

    return reader.mixed(slot, value, form)


# Wiring ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Wiring:
    """The paths of one block.

    Attributes:
        program: The program that was read.
        found: The paths at each slot from the stream on, or in a parallel block from the input on.
        mixing: Its attention.
        value: V, from the input to the values.
        out: O, from the mixture to the stream; in a parallel block to the next state.
        carry: C, from the input to the stream; empty in a parallel block.
        inner: E, from the stream, or in a parallel block from the input, to the next state.
        own: E to the end of the block itself, before a final norm; in a parallel block O as well.
        is_parallel: Whether attention and feed-forward both take the input.
        start: The slot that E begins at: the stream, or in a parallel block the input.
    """

    program: Program
    found: dict[int, Paths]
    mixing: AttentionStep
    value: tuple[Path, ...]
    out: tuple[Path, ...]
    carry: tuple[Path, ...]
    inner: tuple[Path, ...]
    own: tuple[Path, ...]
    is_parallel: bool
    start: int

    @property
    def streams(self) -> tuple[Path, ...]:
        """The paths of E within the block that go through no matrix."""
        return tuple([path for path in _from(self.start, self.own) if not path.has_weights])

    @property
    def branches(self) -> tuple[Path, ...]:
        """The paths of E within the block that go through matrices."""
        return tuple([path for path in _from(self.start, self.own) if path.has_weights])

    @property
    def first(self) -> Chain:
        """The pieces before the stream divides, if they include a norm: the first norm of a post-LN block."""
        alike = zip(*[path.pieces for path in (*self.streams, *self.branches)], strict=False)
        shared = tuple([pieces[0] for pieces in takewhile(lambda pieces: len(set(pieces)) == 1, alike)])
        return shared if self.branches and not self.is_parallel and has_norm(shared) else ()

    def slot_of(self, *paths: Path) -> int | None:
        """The last slot that is the sum of exactly these paths."""
        return next((slot for slot in reversed(self.found) if set(self.found[slot].paths) == set(paths)), None)


def wiring(program: Program, n: int, name: str) -> Wiring:
    """How a block is wired.

    Args:
        program: From the state that enters it to the next one.
        n: The block; steps that do not belong to it are a final norm.
        name: Name of the model, for errors.

    Raises:
        AnatomyError: it is made of something else, such as experts or a recurrence; names it.
    """
    with naming_block(name, n):
        return _wired(program, n)


def _wired(program: Program, n: int) -> Wiring:
    if len(program.inputs) != 1 or len(program.specs[program.inputs[0]].shape) != 3:
        raise NotFoldable("it takes more than one hidden state")
    (x,), (y,) = program.inputs, program.outputs
    passed, before, steps, stream = _passed_by_all(program), StepReader(program), iter(program.steps), x
    # First to the residual stream: the first slot after attention that everything passes through.
    for step in steps:
        before.read(step)
        if before.mixing is not None and step.out in passed:
            stream = step.out
            break
    else:
        raise NotFoldable("there is no attention in it")
    at_stream = before.found[stream]
    # If matrices were applied to the input itself by then, the feed-forward is beside attention: there is no stream in
    # between to start from, and reading continues from the input.
    is_parallel = any(path.source == x and path.has_weights for path in at_stream.paths)
    after = before if is_parallel else StepReader(program, {stream: at_stream.from_here(stream)})
    for step in steps:
        after.read(step)
    if after.mixing is not None and not is_parallel:
        raise NotFoldable("there is more than one attention")
    end = after.found[y]
    if not end.ends_in_channels or len(end.shape) != 3:
        raise NotFoldable("its output is not laid out as its input is")
    own = [step.out for step in program.steps if step.block == n and step.out in passed and step.out in after.found]
    return Wiring(
        program=program,
        found=after.found,
        mixing=before.mixing,
        value=before.mixing.values.paths,
        out=_from(before.mixing.slot, end.paths if is_parallel else at_stream.paths),
        carry=() if is_parallel else _from(x, at_stream.paths),
        inner=_from(x if is_parallel else stream, end.paths),
        own=after.found[own[-1] if own else y].paths,
        is_parallel=is_parallel,
        start=x if is_parallel else stream,
    )


def _from(source: int, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple([path for path in paths if path.source == source])


def _passed_by_all(program: Program) -> set[int]:
    """The slots that every way from the input to the output passes through."""
    last = {slot: place for place, step in enumerate(program.steps) for slot in step.slots}
    last[program.outputs[0]] = len(program.steps)
    latest, found = last.get(program.inputs[0], -1), set[int]()
    for place, step in enumerate(program.steps):
        if latest <= place:  # no earlier slot is read by a later step, so the rest comes from this one's result
            found.add(step.out)
        latest = max(latest, last[step.out])
    return found
