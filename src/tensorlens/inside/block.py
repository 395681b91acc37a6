"""`Block`: one block of a pass at X, as questions about components see it: its writes, values and tokens."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tensorlens.inside.dictionary import Dictionary
from tensorlens.inside.stream import Component, ExpertRows, Stream, StreamSum, Write, expert_rows
from tensorlens.memory import SHARE_OF_VALUES, free_bytes
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.marks import MOVES, Mixture
from tensorlens.program.program import Cotangents, Pieces, Program, of_each
from tensorlens.recording.recording import Recording

if TYPE_CHECKING:
    from tensorlens.inside.dictionary import FeatureParts


@dataclass(frozen=True)
class Finer:
    """Blocks whose writes are split into neurons, into experts, or into the features of a dictionary."""

    neurons: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()
    features: Mapping[int, Dictionary] = field(default_factory=dict)


class Part(NamedTuple):
    """A component of a block where it is written: a whole write, or one head of its mixture.

    Attributes:
        component: The component.
        slot: The slot that contains it.
        write: The write it belongs to.
        place: The sum of its block before which it reads the stream, counted from the last.
    """

    component: Component
    slot: int
    write: Write
    place: int

    @property
    def block(self) -> int:
        """Its block."""
        assert self.component.block is not None, "a part is in a block"
        return self.component.block

    @property
    def head(self) -> int | None:
        """Its head, if it is one."""
        return self.component.head

    def of(self, x: Tensor) -> Tensor:
        """Its own part of a value of the slot, for a head (token, channel). A view."""
        # A mixture is (…, head, token, channel), and the axes before it are of size one.
        return x if self.head is None else x.flatten(0, -3)[self.head]

    def alone(self, x: Tensor, tokens: slice = slice(None)) -> Tensor:
        """A value of the slot with everything set to zero except this head, at some of its tokens."""
        if self.head is None:
            return x
        found = torch.zeros_like(x, memory_format=torch.contiguous_format)
        self.of(found)[tokens].copy_(self.of(x)[tokens])
        return found


class Block:
    """One block at X.

    Args:
        run: The pass it is in.
        n: Which block.

    Attributes:
        program: Its steps.
        entry: The slot of the state that enters it.
    """

    def __init__(self, run: StreamPass, n: int) -> None:
        self.run, self.n, self.recording = run, n, run.recording
        self.program: Program = run.pieces.programs[n - run.start]
        self.specs = self.recording.program.specs
        self.entry = run.entry(n)
        self.is_encoder = n < self.recording.n_encoder_blocks

    @cached_property
    def exit(self) -> int:
        """The slot of the state that leaves the block: it enters the next block, or is the last value of the block.

        Steps between the last block and the end (a final norm) do not belong to the block.
        """
        if self.n + 1 not in (self.recording.n_encoder_blocks, self.recording.n_blocks):
            return self.run.entry(self.n + 1)
        steps = self.program.steps
        after = {slot for step in steps if step.block != self.n for slot in step.slots} | set(self.program.outputs)
        made = [step.out for step in steps if step.block == self.n and step.out in after]
        return made[-1] if made else self.entry

    # What it wrote ----------------------------------------------------------------------------------------------------

    @cached_property
    def stream(self) -> Stream:
        """The residual stream."""
        return Stream(self.program, self.entry, self._mixtures, self.recording.rules)

    @cached_property
    def _mixtures(self) -> list[Mixture]:
        return [mixture for mixture in self.recording.mixtures if mixture.block == self.n]

    @cached_property
    def sums(self) -> list[StreamSum] | None:
        """The sums that write to the stream, the last first; None if the parts cannot be told apart."""
        return self.stream.sums(self.exit) if self.program.steps else None  # nothing depends on a block without steps

    @cached_property
    def writes(self) -> list[tuple[Write, str]]:
        """The writes in order, with their names; the second of a kind has a number in its name."""
        writes = [write for one in reversed(self.sums or []) for write in reversed(one.writes)]
        found, n_of = [], Counter[str]()
        for write in writes:
            kind = "attention" if write.mixtures else "feed-forward"
            if not self._mixtures:  # it is unknown which of its parts mixes tokens
                kind = "block" if len(writes) == 1 else "part"
            maker = self.program.makers.get(write.slot)
            if maker is not None and maker.block is None:
                kind = "between blocks"
            n_of[kind] += 1
            is_numbered = kind == "part" or n_of[kind] > 1
            found.append((write, f"{kind} {n_of[kind]}" if is_numbered else kind))
        return found

    def heads_of(self, write: Write) -> Mixture | None:
        """The mixture behind a write, if its axes are known to be heads and the tokens of the stream."""
        if len(write.mixtures) != 1:
            return None
        shape = self.specs[write.mixtures[0].slot].shape
        is_told = len(shape) == 3 or len(shape) == 4 and shape[0] == 1
        return write.mixtures[0] if is_told and shape[-2] == self.n_tokens else None

    @cached_property
    def parts(self) -> list[Part]:
        """Writes, each with its heads after it, in the order of the pass; none if they cannot be told apart."""
        places = {write.slot: place for place, one in enumerate(self.sums or ()) for write in one.writes}
        found = list[Part]()
        for write, kind in self.writes:
            found.append(Part(Component(block=self.n, kind=kind), write.slot, write, places[write.slot]))
            mixture = self.heads_of(write)
            for head in range(0 if mixture is None else self.specs[mixture.slot].shape[-3]):
                component = Component(block=self.n, kind=f"{kind} head", head=head)
                found.append(Part(component, write.mixtures[0].slot, write, places[write.slot]))
        return found

    def neurons(self, write: Write) -> int | None:
        """The slot whose channels are the neurons of a feed-forward, if neurons are requested."""
        if self.n not in self.run.finer.neurons or write.mixtures:
            return None
        step = self.stream.last_matrix(write, next(one for one in self.sums or () if write in one.writes))
        return None if step is None else step.slots[0]

    @cached_property
    def experts(self) -> list[ExpertRows]:
        """The write of each expert, if experts are requested."""
        return expert_rows(self.recording, self.program, self.n) if self.n in self.run.finer.experts else []

    def inner(self, write: Write) -> list[int]:
        """The slots that split a write: those of its heads, its neurons or its experts."""
        head, neurons = self.heads_of(write), self.neurons(write)
        experts = [] if write.mixtures else [rows.slot for rows in self.experts]
        return list(dict.fromkeys([*([head.slot] if head else []), *([] if neurons is None else [neurons]), *experts]))

    def taken_by(self, path: str) -> list[int]:
        """The slots that a module of the block reads."""
        steps = [step for step in self.program.steps if f"{step.module}.".startswith(f"{path}.")]
        made = {step.out for step in steps}
        return list(dict.fromkeys(slot for step in steps for slot in step.slots if slot not in made))

    @cached_property
    def marked(self) -> list[int]:
        """The slots that questions ask about: states, sums, writes, heads, neurons, experts."""
        found = [self.entry, self.exit]
        for one in self.sums or ():
            found += [one.slot, one.term, one.stream]
            found += [slot for write in one.writes for slot in (write.slot, *self.inner(write))]
        return list(dict.fromkeys(found))

    # Values and cotangents --------------------------------------------------------------------------------------------

    @property
    def values(self) -> dict[int, Tensor]:
        """Values of the marked slots at X."""
        return self.run.values(self.n)

    def values_of(self, slots: Sequence[int]) -> dict[int, Tensor]:
        """Values of other slots of the block at X."""
        return self.run.pieces.values(self.n - self.run.start, slots)

    def pulled(self, slot: int, cotangents: Tensor, to: int) -> Tensor:
        """Cotangents (row, …) of one slot at an earlier one that it was computed from."""
        return cotangents if slot == to else self.cotangents_at({slot: cotangents}, (to,), (to,))[to]

    def cotangents_at(self, starts: Cotangents, slots: Collection[int], stop: Collection[int]) -> Cotangents:
        """Cotangents (row, …) of some slots at earlier ones, along paths that avoid `stop`."""
        self.program.load()
        return of_each(lambda one: self.program.cotangents(one, slots, stop=stop), starts)

    # Tokens -----------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the state that enters it: (1, token, channel)."""
        return self.specs[self.entry].shape

    @property
    def n_tokens(self) -> int:
        """Number of tokens of its stream: the encoder's or the decoder's, if there are two."""
        return self.shape[1]

    @property
    def offset(self) -> int:
        """The first token of its stream, counted among all tokens."""
        return 0 if self.is_encoder else self.run.n_tokens - self.n_tokens

    def placed(self, scores: Tensor) -> Tensor:
        """Scores (…, token) of its stream among all tokens: the encoder's, then the decoder's."""
        return pad(scores, (self.offset, self.run.n_tokens - self.n_tokens - self.offset))

    def by_token(self, numbers: Tensor) -> Tensor:
        """Numbers (row, …) in the layout of some slot of its stream, summed over channels: (row, token)."""
        if numbers.shape[1:] == self.shape:
            return self.placed(numbers[:, 0].sum(-1))
        rows = [self.to_tokens(one)[0].sum(-1) for one in numbers]  # each (token,): summed over channels
        return self.placed(torch.stack(rows))

    def to_tokens(self, x: Tensor) -> Tensor:
        """A tensor in the layout of any slot of this stream, rearranged to (1, token, channel)."""
        layout = self._layout(tuple(x.shape))
        return x.reshape(1, self.n_tokens, -1) if layout is None else layout.pull(x)[0]

    def from_tokens(self, x: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `to_tokens`: (1, token, channel) in the layout of the slots that have this shape."""
        layout = self._layout(tuple(shape))
        return x.reshape(shape) if layout is None else layout.run(x)[0]

    def at_token(self, numbers: Tensor, token: int) -> Tensor:
        """The numbers with all tokens but one set to zero; `token` counts the tokens of all streams."""
        states = self.to_tokens(numbers)
        is_there = torch.arange(self.n_tokens, device=states.device) == token - self.offset
        return self.from_tokens(states * is_there[:, None], numbers.shape)

    def _layout(self, shape: tuple[int, ...]) -> Program | None:
        """The steps that reshape the state that enters; None if there are none."""
        size = math.prod(self.shape)
        ahead = [self.entry] if shape != self.shape and math.prod(shape) == size else []
        while ahead:
            for step in self.program.readers.get(ahead.pop(), ()):
                if step.operation in MOVES and math.prod(self.specs[step.out].shape) == size:
                    if self.specs[step.out].shape == shape:
                        return self.program.part((self.entry,), (step.out,))
                    ahead.append(step.out)
        return None

    # A block of one piece ---------------------------------------------------------------------------------------------

    def whole_write(self) -> Tensor:
        """The write of a block of one piece, (1, token, channel); its whole output if channels change."""
        after, before = self.to_tokens(self.values[self.exit]), self.values[self.entry]
        return after - before if after.shape == before.shape else after

    def handed_on(self, cotangent: Tensor) -> Tensor:
        """The cotangent that the residual stream passes from the block's exit to its entry, beside the block's write.

        Zero if the block changes the shape of the state: then it has no residual.
        """
        x = self.to_tokens(cotangent)
        return x if x.shape == self.shape else x.new_zeros(self.shape)


class ByBlock(dict[int, dict[int, Tensor]]):
    """Tensors of the visited blocks, by block and slot: of all blocks while they fit, otherwise only of the last one.

    Args:
        of: The pass they belong to.
    """

    def __init__(self, of: StreamPass) -> None:
        super().__init__()
        device = of.recording.states[0].device
        self._most = 0.0 if of.recording.is_streamed else SHARE_OF_VALUES * free_bytes(device) / (of.stop - of.start)

    def keep(self, n: int, found: dict[int, Tensor]) -> None:
        """Keep the tensors of block n. Drop the earlier ones if as much from every block would not fit."""
        if sum(tensor.nbytes for tensor in found.values()) > self._most:
            self.clear()
        self[n] = found


class StreamPass:
    """The blocks of an operator at X, one at a time.

    Args:
        operator: The operator.
        pieces: Its program, cut where states enter blocks.
        finer: Blocks whose feed-forwards are split.
    """

    def __init__(self, operator: FrozenOperator, pieces: Pieces, finer: Finer | None = None) -> None:
        self.operator, self.pieces, self.finer = operator, pieces, finer or Finer()
        self.recording: Recording = operator.recording
        self.start, self.stop = operator.span
        self.n_tokens = self.recording.states[self.start].shape[1]
        own = weakref.proxy(self)  # no cycle: tensors are freed with the question
        self._blocks = {n: Block(own, n) for n in range(self.start, self.stop)}
        self._values = ByBlock(self)
        self.kept_features: dict[int, FeatureParts] = {}

    def block(self, n: int) -> Block:
        """Block n."""
        return self._blocks[n]

    @property
    def downwards(self) -> list[Block]:
        """The blocks from the last to the first; for a long input only one is in memory at a time."""
        return list(reversed(self._blocks.values()))

    @cached_property
    def parts(self) -> dict[Component, Part]:
        """All writes and heads by component, in the order of the pass."""
        return {part.component: part for block in self._blocks.values() for part in block.parts}

    @property
    def error_shares(self) -> dict[str, Any]:
        """Notes of records about the dictionaries: the error's share of the variance of each block's write."""
        shares = {str(n): parts.share for n, parts in sorted(self.kept_features.items())}
        return {"error_share": shares} if shares else {}

    def written(self, part: Part) -> Tensor:
        """The value of a part at X."""
        return part.of(self.values(part.block)[part.slot])

    def entry(self, n: int) -> int:
        """The slot of the state that enters block n."""
        return self.recording.slots[n][0 if n < self.recording.n_encoder_blocks else -1]

    @property
    def memory(self) -> int | None:
        """The slot of the state that the encoder passes to the decoder; None without an encoder in the range."""
        n = self.recording.n_encoder_blocks
        return self.recording.slots[n][0] if self.start < n else None

    def values(self, n: int) -> dict[int, Tensor]:
        """Values of the marked slots of block n at X."""
        if n not in self._values:
            self._values.keep(n, self.block(n).values_of(self.block(n).marked))
        return self._values[n]

    @cached_property
    def calls_of_modules(self) -> Counter[str]:
        """How often each module was called."""
        return Counter(module.path for module in self.recording.modules)

    @cached_property
    def side_channel(self) -> str | None:
        """A module that reads values of earlier blocks, beside the state and the encoder's output."""
        states = [set(slots) for slots in self.recording.slots[self.start + 1 : self.stop]]
        known = [*states, {*states[-1:][0], self.block(self.stop - 1).exit} if states else set()]
        for program, slots in zip(self.pieces.programs[1:], known, strict=False):
            beside = set(program.inputs) - slots
            if states and beside:
                return next(step.module for step in program.steps if not beside.isdisjoint(step.slots))
        return None
