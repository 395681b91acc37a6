r"""How a block is wired: the paths between its input, its attention and its output.

The steps of a block are read from its input x to attention, whose mixture m is a source of its own, and on to the first
slot that everything passes through after it: the residual stream s. From there they are read anew. So the block is

    s = C x + O m,   y = E s      (or y = E x + O m, where attention and feed-forward both take x),   m = mix(V x)

and C, O, V and E are sums of paths, which act on every token alone. No family of models is known by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

from tensorlens.operators.folding.pieces import Path, Pieces
from tensorlens.operators.folding.reading import AttentionStep, NotFoldable, Reading, Sum
from tensorlens.program.program import Program
from tensorlens.recording.recording import Heads, Recording, Span


@dataclass(frozen=True, kw_only=True, eq=False)
class Wiring:
    """The paths of one block.

    Attributes:
        program: The program that was read.
        sums: What was found at each slot from the stream on, or in a parallel block from the input on.
        mixing: Its attention.
        value: V, from the input to what is mixed.
        out: O, from the mixture to the stream; in a parallel block to the next state.
        carry: C, from the input to the stream; empty in a parallel block.
        inner: E, from the stream, or in a parallel block from the input, to the next state.
        own: The same to the end of the block itself, which a final norm comes after; O as well in a parallel block.
        is_parallel: Whether attention and feed-forward both take the input.
        start: The slot that E begins at: the stream, or in a parallel block the input.
    """

    program: Program
    sums: dict[int, Sum]
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
    def first(self) -> Pieces:
        """What the stream passes before it divides, if a norm is among it: the first norm of a post-LN block."""
        alike = zip(*[path.pieces for path in (*self.streams, *self.branches)], strict=False)
        shared = tuple([pieces[0] for pieces in takewhile(lambda pieces: len(set(pieces)) == 1, alike)])
        return shared if self.branches and not self.is_parallel and has_norm(shared) else ()

    def slot_of(self, *paths: Path) -> int | None:
        """The last slot that holds the sum of these paths and nothing else."""
        return next((slot for slot in reversed(self.sums) if set(self.sums[slot].paths) == set(paths)), None)


def has_norm(pieces: Pieces) -> bool:
    """Whether a norm is among some pieces: something that depends on the token."""
    return any(piece.kind == "token" for piece in pieces)


def before_weight(pieces: Pieces) -> Pieces:
    """Some pieces up to the first matrix."""
    return tuple(takewhile(lambda piece: piece.kind != "weight", pieces))


def wiring(recording: Recording, n: int, heads: Heads | None = None) -> Wiring:
    """How block n of a recorded pass is wired.

    Raises:
        AnatomyError: it is made of something else, such as experts or a recurrence; says of what.
    """
    part = recording.part(Span(n, n + 1), {n: heads[n]} if heads and n in heads else None)
    with naming_block(recording, n):
        return wired(part, n)


@contextmanager
def naming_block(recording: Recording, n: int) -> Iterator[None]:
    """Say of which block it is that it cannot be folded, and what follows from that."""
    try:
        yield
    except NotFoldable as error:
        raise NotFoldable(
            f"Block {n} of `{recording.name}` cannot be folded: {error}. Expected one attention and maps that act on "
            "every token alone. Rows and norms go by the program instead; methods that need the weights do not apply."
        ) from None


def wired(program: Program, n: int | None = None) -> Wiring:
    """How a program from one state to the next is wired; `n` is the block that its own steps belong to."""
    if len(program.inputs) != 1 or len(program.specs[program.inputs[0]].shape) != 3:
        raise NotFoldable("it takes more than one hidden state")
    (x,), (y,) = program.inputs, program.outputs
    passed, before, steps, stream = _passed_by_all(program), Reading(program), iter(program.steps), x
    for step in steps:
        before.read(step)
        if before.mixing is not None and step.out in passed:
            stream = step.out
            break
    else:
        raise NotFoldable("there is no attention in it")
    at_stream = before.sums[stream]
    is_parallel = any(path.source == x and path.has_weights for path in at_stream.paths)
    after = before if is_parallel else Reading(program, {stream: at_stream.from_here(stream)})
    for step in steps:
        after.read(step)
    if after.mixing is not None and not is_parallel:
        raise NotFoldable("there is more than one attention")
    if not (after.sums[y].ends_in_channels and after.sums[y].rows is None and len(after.sums[y].shape) == 3):
        raise NotFoldable("its output is not laid out as its input is")
    own = [step.out for step in program.steps if step.block == n and step.out in passed and step.out in after.sums]
    return Wiring(
        program=program,
        sums=after.sums,
        mixing=before.mixing,
        value=before.mixing.values.paths,
        out=_from(before.mixing.slot, after.sums[y].paths if is_parallel else at_stream.paths),
        carry=() if is_parallel else _from(x, at_stream.paths),
        inner=_from(x if is_parallel else stream, after.sums[y].paths),
        own=after.sums[own[-1] if own else y].paths,
        is_parallel=is_parallel,
        start=x if is_parallel else stream,
    )


def _from(source: int, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple([path for path in paths if path.source == source])


def _passed_by_all(program: Program) -> set[int]:
    """The slots that everything on its way from the input to the output passes through."""
    last = {slot: place for place, step in enumerate(program.steps) for slot in step.slots}
    last[program.outputs[0]] = len(program.steps)
    latest, found = last.get(program.inputs[0], -1), set[int]()
    for place, step in enumerate(program.steps):
        if latest <= place:  # nothing that was there before is read again
            found.add(step.out)
        latest = max(latest, last[step.out])
    return found
