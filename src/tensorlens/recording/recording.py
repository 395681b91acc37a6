r"""`Recording`: the result of one pass. The program, the states on its way, and where it came from.

A state is (sample, token, channel). With an encoder it is the encoder's tokens, then the decoder's, so that every range
of blocks composes with the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError, InputError, MethodError
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.layouts import readout_layout
from tensorlens.program.marks import MOVES, Choice, Meeting, Mixture, count_heads
from tensorlens.program.program import Constants, Pieces, Program, SideChannelError
from tensorlens.recording.calls import BlockCall, ModuleOutput, Weights
from tensorlens.recording.conventions import Rules
from tensorlens.recording.rules.attention import with_live_sinks

Heads = Mapping[int, Tensor]
"""Multipliers of heads, by block."""


class Span(NamedTuple):
    """From the state entering block `start` to the state entering block `stop`; `stop` = number of blocks is $X^N$."""

    start: int
    stop: int


class Origin(NamedTuple):
    """The model that was recorded.

    Attributes:
        anatomy: Where its parts are.
        inputs: The arguments it was called with.
        calls: How its blocks were called.
        weights: Its weights as they were.
    """

    anatomy: Anatomy
    inputs: dict[str, Any]
    calls: tuple[BlockCall, ...]
    weights: Weights

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.anatomy.model


class Head:
    """The unembedding: logits are $W y + b$ of its input y. Weights that were written to since then are refused.

    Args:
        weight: W.
        bias: b, if there is one.
        name: The module's name.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, name: str = "unembedding") -> None:
        self._held = Constants([weight, bias], {0: f"{name}.weight", 1: f"{name}.bias"})

    @property
    def weight(self) -> Tensor:
        """W; unpacked each time if torchao has packed it."""
        self._held.check()
        weight = self._held[0]
        return weight.dequantize() if hasattr(weight, "__tensor_flatten__") else weight

    @property
    def bias(self) -> Tensor | None:
        """The bias, if there is one."""
        return self._held.values[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    r"""The result of one pass.

    Attributes:
        program: All steps of the pass, from $X^0$ to the readout.
        states: $X^0 … X^N$; `states[n]` enters block n, the last is the output, with an encoder the decoder's alone.
        slots: The slots of each state: one, or the encoder's and the decoder's.
        rules: The conventions in force.
        readout: The end of the pass: the input of the unembedding, or the logits of a different head; None without a
            head.
        readout_slot: Its slot; None if it is not live.
        head: The unembedding, if the readout is its input.
        n_encoder_blocks: How many of the blocks are the encoder's.
        starts_at_embedding: Whether $X^0$ is the token embeddings, because the first block takes only a part of them.
        mixtures: Where attention multiplied values.
        meetings: Where queries multiplied keys.
        choices: The experts that were chosen.
        modules: The output of each module, in the order in which they returned.
        gives_raw_logits: Whether the model's logits are those of its unembedding, without a soft cap or a scale.
        rules_applied: How often each rule was applied, by (rule, module).
        mixes_samples: The function and module that made a held value of several samples together; None if none did.
        name: Name of the model's class.
        origin: The model; None for a recording that was loaded from a file.
    """

    program: Program = field(repr=False)
    states: tuple[Tensor, ...] = field(repr=False)
    slots: tuple[tuple[int, ...], ...] = field(repr=False)
    rules: Rules
    readout: Tensor | None = field(default=None, repr=False)
    readout_slot: int | None = None
    head: Head | None = field(default=None, repr=False)
    n_encoder_blocks: int = 0
    starts_at_embedding: bool = False
    mixtures: tuple[Mixture, ...] = field(default=(), repr=False)
    meetings: tuple[Meeting, ...] = field(default=(), repr=False)
    choices: tuple[Choice, ...] = field(default=(), repr=False)
    modules: tuple[ModuleOutput, ...] = field(default=(), repr=False)
    rules_applied: Mapping[tuple[str, str], int] = field(default_factory=dict, repr=False)
    gives_raw_logits: bool = True
    mixes_samples: str | None = None
    name: str = ""
    origin: Origin | None = field(default=None, repr=False)

    # What there is ----------------------------------------------------------------------------------------------------

    @property
    def n_blocks(self) -> int:
        """Number of blocks, counted by call."""
        return len(self.states) - 1

    @property
    def n_samples(self) -> int:
        """Number of samples that were recorded together."""
        return len(self.states[0])

    @property
    def has_head(self) -> bool:
        """Whether the model continues after $X^N$, to logits."""
        return self.readout is not None

    @property
    def pools(self) -> bool:
        """Whether the head gives one set of logits for the whole input instead of one per token."""
        return self.head is None and self.readout is not None and self.readout.dim() == 2

    @property
    def is_streamed(self) -> bool:
        """Whether the input is so long that blocks are recorded again when they are needed."""
        return not self.program.constants.is_complete

    def split(self, n: int) -> int:
        """Number of tokens of state n that are the encoder's."""
        slots = self.slots[n]
        return self.program.specs[slots[0]].shape[1] if len(slots) > 1 else 0

    @cached_property
    def n_heads(self) -> dict[int, int]:
        """Number of attention heads by block, where a head axis was recognised."""
        return {self._block_of(slot): n for slot, n in self._by_head.items()}

    @cached_property
    def _by_head(self) -> dict[int, int]:
        """The mixtures in which heads can be distinguished: their number of heads, by slot."""
        found = {mixture.slot: count_heads(self.program, mixture) for mixture in self.mixtures}
        return {slot: n for slot, n in found.items() if n is not None}

    def _block_of(self, slot: int) -> int:
        return next(mixture.block for mixture in self.mixtures if mixture.slot == slot)

    def from_model(self, what: str) -> Origin:
        """The model behind this recording, for running it again.

        Raises:
            MethodError: it was loaded from a file, without one.
            InputError: its weights have changed since.
        """
        if self.origin is None:
            raise MethodError(
                f"{what} needs the model itself, and this tensor was loaded without it. Call a lens on the model."
            )
        self.origin.weights.check(what)
        return self.origin

    @property
    def anatomy(self) -> Anatomy:
        """Where the parts of the model are."""
        assert self.origin is not None, "only with a model"
        return self.origin.anatomy

    # Parts of the program ---------------------------------------------------------------------------------------------

    def part(self, span: Span, heads: Heads | None = None, *, to_logits: bool = False) -> Program:
        """The program from one state to another, or to the input of the head.

        Args:
            span: The range of blocks.
            heads: Multipliers of heads.
            to_logits: Whether it ends at the readout.

        Raises:
            AnatomyError: the range begins after block 0, and something else from before it is read.
        """
        key = (span, to_logits, tuple((block, tuple(m.tolist())) for block, m in sorted((heads or {}).items())))
        if key not in self._parts:
            self._parts[key] = self._part(span, heads or {}, to_logits)
        program = self._parts[key]
        program.constants.check(program.used)
        return program

    @cached_property
    def _parts(self) -> dict[Any, Program]:
        return {}

    def _part(self, span: Span, heads: Heads, to_logits: bool) -> Program:
        outputs = self.slots[span.stop]
        if to_logits:
            outputs = (-1,) if self.readout_slot is None else (self.readout_slot,)
        program = self.scaled(heads)
        try:
            return program.part(self.slots[span.start], outputs)
        except SideChannelError as error:
            raise AnatomyError(
                f"Block {span.start} cannot be the first of a range in `{self.name}`: {error} Take ranges that begin "
                "at block 0."
            ) from None

    def _factors(self, heads: Heads) -> dict[int, Tensor]:
        """Multipliers of heads by the slot of the mixture: (head, 1, 1)."""
        found = {}
        for slot, n_heads in self._by_head.items():
            multiplier = heads.get(self._block_of(slot))
            if multiplier is not None:
                if len(multiplier) != n_heads:
                    raise MethodError(
                        f"Block {self._block_of(slot)} has attentions of {len(multiplier)} and of {n_heads} "
                        f"heads, so a head number is ambiguous."
                    )
                spec = self.program.specs[slot]
                found[slot] = multiplier.to(dtype=spec.dtype, device=spec.device)[:, None, None]
        return found

    def pieces(
        self, span: Span, heads: Heads | None = None, *, to_logits: bool = False, also: Collection[int] = ()
    ) -> Pieces:
        """The program of a range cut where states enter blocks; with `to_logits` the head is one more piece.

        Args:
            span: The range of blocks.
            heads: Multipliers of heads; values of states are then those with these multipliers.
            to_logits: Whether it ends at the readout.
            also: Further slots whose steps are kept.
        """
        program = self.part(span, heads, to_logits=to_logits)
        if also:
            program = self.scaled(heads or {}).part(program.inputs, program.outputs, also)
        ends = self._ends(program, range(span.start, span.stop - 1))
        if to_logits:
            last = [place for place, step in enumerate(program.steps) if step.block == span.stop - 1]
            ends.append(max(last, default=len(program.steps) - 1) + 1)
        known = {} if heads else self._values_of_states
        return Pieces(program, ends, known | self._state(span.start))

    @cached_property
    def _values_of_states(self) -> dict[int, Tensor]:
        found = {slot: value for n in range(len(self.states)) for slot, value in self._state(n).items()}
        if self.readout_slot is not None and self.readout is not None:
            found[self.readout_slot] = self.readout
        # A model with a layout of its own begins before X⁰ is laid out as tokens and channels.
        return found | dict(zip(self.program.inputs, self._state(0).values(), strict=True))

    def _state(self, n: int) -> dict[int, Tensor]:
        """The values of state n by slot: one, or the encoder's and the decoder's."""
        slots = self.slots[n]
        sizes = [self.program.specs[slot].shape[1] for slot in slots]
        parts = (self.states[n],) if len(slots) == 1 else self.states[n].split(sizes, 1)
        return {slot: part.to(self.program.specs[slot].device) for slot, part in zip(slots, parts, strict=True)}

    def values(self, block: int, slots: Collection[int]) -> dict[int, Tensor]:
        """Values at X of some slots of a block."""
        return self._whole.values(block, slots)

    def scaled(self, heads: Heads) -> Program:
        """The whole program, with multipliers of heads."""
        return self.program.scaled(self._factors(heads)) if heads else self.program

    @cached_property
    def _whole(self) -> Pieces:
        """The whole program, nothing dropped, cut where blocks end."""
        return Pieces(self.program, self._ends(self.program, range(self.n_blocks - 1)), self._values_of_states)

    def _ends(self, program: Program, blocks: Iterable[int]) -> list[int]:
        """The number of steps up to the end of each block, where the next state has been made.

        If blocks pass on several streams, the next state may have been made long before; the ends stay in order.
        """
        made = {step.out: place for place, step in enumerate(program.steps, 1)}
        last = {step.block: place for place, step in enumerate(program.steps, 1)}
        ends = [max(last.get(n, 0), *[made.get(slot, 0) for slot in self.slots[n + 1]]) for n in blocks]
        return list(accumulate(ends, max))

    # Forwards and backwards -------------------------------------------------------------------------------------------

    def push(self, x: Tensor, span: Span, heads: Heads | None = None, **options: bool) -> Tensor:
        r"""$\tilde F_X(x)$, or $T x$ alone, at one state (sample, token, channel); options as in `push_each`."""
        return self.push_each([x], span, heads, **options)[0]

    def push_each(
        self,
        states: Sequence[Tensor],
        span: Span,
        heads: Heads | None = None,
        *,
        linear: bool = False,
        to_logits: bool = False,
    ) -> list[Tensor]:
        """`push` for several states; all go through one block before the next."""
        program = self.part(span, heads, to_logits=to_logits)
        found = (program.linear if linear else program).run_each([self._divided(program.inputs, x) for x in states])
        return [self._joined(parts) for parts in found]

    def pull(self, u: Tensor, span: Span, heads: Heads | None = None, *, to_logits: bool = False) -> Tensor:
        r"""$T^\top u$ for one cotangent of the output, or of the input of the head: (sample, token, channel)."""
        return self.pull_each([u], span, heads, to_logits=to_logits)[0]

    def pull_each(
        self, cotangents: Sequence[Tensor], span: Span, heads: Heads | None = None, *, to_logits: bool = False
    ) -> list[Tensor]:
        """`pull` for several cotangents; all go through one block before the next."""
        program = self.part(span, heads, to_logits=to_logits)  # added constants have no transpose
        found = program.pull_each([self._divided(program.outputs, u) for u in cotangents])
        return [self._joined(parts) for parts in found]

    def bias_of_sinks(self, span: Span, heads: Heads | None = None, *, to_logits: bool = False) -> Tensor | None:
        r"""The part of B that comes from a held sink (`Rules.sink`), (sample, token, channel); None if none is held."""
        held = self.part(span, heads, to_logits=to_logits)
        live = with_live_sinks(held)
        if live is held:
            return None
        return self._joined(held.run(*held.zeros())) - self._joined(live.run(*held.zeros()))

    def _divided(self, slots: Sequence[int], x: Tensor) -> list[Tensor]:
        """A state or cotangent split by slot: the encoder's tokens and the decoder's."""
        specs = [self.program.specs[slot] for slot in slots]
        parts = [x] if len(specs) == 1 else x.split([spec.shape[1] for spec in specs], 1)
        return [part.to(device=spec.device, dtype=spec.dtype) for part, spec in zip(parts, specs, strict=True)]

    def _joined(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The encoder's tokens and the decoder's, on one device."""
        return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[-1].device) for part in parts], 1)

    # The head ---------------------------------------------------------------------------------------------------------

    def laid_out(self, end: Tensor, n_rows: int) -> Tensor:
        """The end of a run of the model on several rows, as the readout is laid out."""
        found = readout_layout(end, n_rows, self.states[-1].shape[1], is_read=self.head is not None)
        return end if found is None else found

    def place_read(self, out_token: int) -> int:
        """The row of the readout that belongs to an output: some models pass only the last token to their head."""
        readout, end = self.readout, self.states[-1]
        if readout is None or readout.dim() < 3 or readout.shape[1] == end.shape[1]:
            return out_token
        if out_token not in self._places_read:
            raise InputError(
                f"The head of `{self.name}` reads {readout.shape[1]} of {end.shape[1]} tokens, and token {out_token} "
                "is not one of them. Ask for one that it reads, such as the last."
            )
        return self._places_read.index(out_token)

    @cached_property
    def _places_read(self) -> list[int]:
        """The output in each row of the readout, found by sending the positions of the outputs through the steps."""
        if self.readout_slot is None:
            return []
        end = self.states[-1]
        try:
            program = self.part(Span(self.n_blocks, self.n_blocks), to_logits=True)
        except AnatomyError:  # it reads more than the last state
            return []
        if any(step.operation not in MOVES for step in program.steps):
            return []
        numbers = torch.arange(end.shape[1], dtype=end.dtype, device=end.device)[:, None].expand(end.shape)
        return [int(row) for row in program.run(numbers)[0][0, :, 0]]

    def logits(self, readout: Tensor, out_token: int, classes: Tensor | None = None) -> Tensor:
        """Logits (sample, class) at one output, from the end of a pass: the unembedding's, with nothing after it."""
        if self.head is not None:
            weight, bias = self.head.weight, self.head.bias
            if classes is not None:
                weight, bias = weight[classes], None if bias is None else bias[classes]
            return torch.nn.functional.linear(readout[:, self.place_read(out_token)], weight, bias)
        found = readout if readout.dim() == 2 else readout[:, out_token]
        return found if classes is None else found[:, classes]

    def logits_at(self, out_token: int) -> Tensor:
        """Logits (class,) at the input of the recording."""
        assert self.readout is not None, "only for a model with a head"
        return self.logits(self.readout, out_token)[0]

    def head_cotangent(self, weights: Tensor, out_token: int) -> Tensor:
        """The cotangent (1, …) of the readout for a weighted sum of logits (class,) at one output."""
        if self.head is None:
            return self.at_readout(weights, out_token)
        classes = weights.nonzero()[:, 0]
        rows = self.head.weight[classes]
        return self.at_readout(weights[classes].to(rows) @ rows, out_token)

    def at_readout(self, vector: Tensor, out_token: int) -> Tensor:
        """A cotangent (1, …) of the readout that lives on one output: (channel,), or (class,) where it has logits."""
        assert self.readout is not None, "only for a model with a head"
        u = torch.zeros_like(self.readout[:1])
        if u.dim() == 2:
            u[0] = vector
        else:
            u[0, self.place_read(out_token) if self.head is not None else out_token] = vector.to(u)
        return u
