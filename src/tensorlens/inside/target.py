"""The number that is explained, and the blocks of a pass on the way to it, one at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tensorlens.errors import InputError, MethodError
from tensorlens.inside.experts import ExpertRows, expert_rows
from tensorlens.inside.stream import Stream, Sum, Write
from tensorlens.maps.context import Context
from tensorlens.maps.targets import Classes, Target, no_head
from tensorlens.operators.base import check_token
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.marks import MOVES, Mixture
from tensorlens.program.pieces import Cotangents, Pieces, by_row
from tensorlens.program.program import Program
from tensorlens.recording.recording import Recording

Weights = dict[int, float]


class Finer(NamedTuple):
    """Blocks whose feed-forwards are taken apart: into neurons, or into experts."""

    neurons: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()


def weights_of(operator: FrozenOperator, classes: Classes | None, target: Target | Weights | None, i: int) -> Weights:
    """Weights on logits: of the target, or of the model's own first choice at output i."""
    recording = operator.recording
    if classes is None or recording.readout is None:
        raise no_head(recording.name)
    if isinstance(target, dict):
        if not target or not all(isinstance(weight, Real) and math.isfinite(weight) for weight in target.values()):
            raise InputError(f"Weights must be {{id: number}} with at least one, none of them NaN; got {target!r:.80}.")
        return {classes.index(index): float(weight) for index, weight in target.items()}
    return classes.weights(int(recording.logits_at(i).argmax()) if target is None else target)


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """What is explained: a target at one output of an input.

    Attributes:
        operator: The operator of the input.
        classes: Names of the classes.
        out_token: Where the target is read.
        target: A token or class, a pair for a contrast, weights by class; the model's own first choice if None.
        tokens: A label for each token.
        meta: Model, versions, rules, blocks, output, as records say them.
    """

    operator: FrozenOperator
    classes: Classes | None
    out_token: int
    target: Target | Weights | None
    tokens: tuple[str, ...]
    meta: dict[str, Any]

    @classmethod
    def at(
        cls,
        operator: FrozenOperator,
        context: Context,
        meta: dict[str, Any],
        out_token: int,
        target: Target | Weights | None,
    ) -> Explained:
        """The target at an output; a head that reads the whole input at once has only one."""
        i = 0 if operator.recording.pools else check_token(out_token, operator.shape[0])
        return cls(
            operator=operator,
            classes=context.classes,
            out_token=i,
            target=target,
            tokens=context.tokens,
            meta=meta | {"out_positions": [i]},
        )

    @cached_property
    def weights(self) -> Weights:
        """The target's weights on logits."""
        return weights_of(self.operator, self.classes, self.target, self.out_token)

    @property
    def name(self) -> str:
        """The target in words."""
        weights = self.weights  # raises where there are no classes
        assert self.classes is not None, "a target has classes"
        return self.classes.names(weights)


class StreamPass:
    r"""The blocks of an operator at X, one at a time: what wrote to the stream in each, and the values there.

    Args:
        operator: The operator.
        pieces: Its program, cut where states enter blocks.
        finer: Blocks whose feed-forwards are taken apart.
    """

    def __init__(self, operator: FrozenOperator, pieces: Pieces, finer: Finer | None = None) -> None:
        self.operator, self.pieces, self.finer = operator, pieces, finer or Finer()
        self.recording: Recording = operator.recording
        self.start, self.stop = operator.span
        self._streams: dict[int, Stream] = {}
        self._sums: dict[int, list[Sum] | None] = {}
        self._experts: dict[int, list[ExpertRows]] = {}
        self._values: dict[int, dict[int, Tensor]] = {}

    # The blocks -------------------------------------------------------------------------------------------------------

    def program(self, n: int) -> Program:
        """The steps of block n."""
        return self.pieces.programs[n - self.start]

    def entry(self, n: int) -> int:
        """The slot of the state that enters block n."""
        return self.recording.slots[n][0 if n < self.recording.n_encoder_blocks else -1]

    def exit(self, n: int) -> int:
        """The slot of the state that leaves block n: it enters the next one, or is the last thing that the block made.

        What stands between the last block and the end (a final norm) is not the block's.
        """
        if n + 1 not in (self.recording.n_encoder_blocks, self.recording.n_blocks):
            return self.entry(n + 1)
        program = self.program(n)
        made = [step.out for step in program.steps if step.block == n]
        after = {slot for step in program.steps if step.block != n for slot in step.slots} | set(program.outputs)
        return next((slot for slot in reversed(made) if slot in after), self.entry(n))

    @cached_property
    def memory(self) -> int | None:
        """The slot of what the encoder hands to the decoder; None without an encoder in the range."""
        n = self.recording.n_encoder_blocks
        return self.recording.slots[n][0] if self.start < n else None

    def stream(self, n: int) -> Stream:
        """The stream in block n."""
        if n not in self._streams:
            mixtures = [one for one in self.recording.mixtures if one.block == n]
            self._streams[n] = Stream(self.program(n), self.entry(n), mixtures, self.recording.rules)
        return self._streams[n]

    def sums(self, n: int) -> list[Sum] | None:
        """The sums of block n that write to the stream, the last first; None where parts cannot be told apart."""
        if n not in self._sums:  # nothing depends on a block that has no steps
            self._sums[n] = self.stream(n).sums(self.exit(n)) if self.program(n).steps else None
        return self._sums[n]

    def kinds(self, n: int) -> list[tuple[Write, str]]:
        """What was written in a block, in order, and what to call it; a second one of a kind has its number."""
        writes = [write for one in reversed(self.sums(n) or []) for write in reversed(one.writes)]
        has_attention = any(mixture.block == n for mixture in self.recording.mixtures)
        found, n_of = [], Counter[str]()
        for write in writes:
            kind = "attention" if write.mixtures else "feed-forward"
            if not has_attention:  # one cannot say which of its parts mixes tokens
                kind = "block" if len(writes) == 1 else "part"
            if write.slot in self.program(n).makers and self.program(n).makers[write.slot].block is None:
                kind = "between blocks"
            n_of[kind] += 1
            is_numbered = kind == "part" or n_of[kind] > 1
            found.append((write, f"{kind} {n_of[kind]}" if is_numbered else kind))
        return found

    def heads_of(self, n: int, write: Write) -> Mixture | None:
        """The mixture behind a write, where its axes are known to be heads and the tokens of the stream."""
        if len(write.mixtures) != 1:
            return None
        shape = self.recording.program.specs[write.mixtures[0].slot].shape
        is_told = len(shape) == 3 or len(shape) == 4 and shape[0] == 1
        return write.mixtures[0] if is_told and shape[-2] == self.n_tokens(n) else None

    # Values and cotangents --------------------------------------------------------------------------------------------

    def marked(self, n: int) -> list[int]:
        """The slots of a block that questions ask about: states, sums, writes, heads, neurons, experts."""
        found = [self.entry(n), self.exit(n)]
        for one in self.sums(n) or ():
            found += [one.slot, one.term, one.stream]
            for write in one.writes:
                found += [write.slot, *self.inner(n, write)]
        return list(dict.fromkeys(found))

    def inner(self, n: int, write: Write) -> list[int]:
        """The slots by which a write is taken apart: that of its heads, of its neurons, or those of its experts."""
        head, neurons = self.heads_of(n, write), self.neurons(n, write)
        found = [] if head is None else [head.slot]
        found += [] if neurons is None else [neurons]
        return found if write.mixtures else [*found, *dict.fromkeys(rows.slot for rows in self.experts(n))]

    def neurons(self, n: int, write: Write) -> int | None:
        """The slot whose channels are the neurons of a feed-forward, where they are asked for."""
        if n not in self.finer.neurons or write.mixtures:
            return None
        step = self.stream(n).last_matrix(write)
        return None if step is None else step.slots[0]

    def experts(self, n: int) -> list[ExpertRows]:
        """What each expert of a block wrote, where they are asked for."""
        if n not in self.finer.experts:
            return []
        if n not in self._experts:
            self._experts[n] = expert_rows(self.recording, self.program(n), n)
        return self._experts[n]

    def values(self, n: int) -> dict[int, Tensor]:
        """What the marked slots of a block hold at X."""
        if n not in self._values:
            if self.recording.is_streamed:
                self._values.clear()
            self._values[n] = self.pieces.values(n - self.start, self.marked(n))
        return self._values[n]

    def pulled(self, n: int, slot: int, cotangents: Tensor, to: int) -> Tensor:
        """Cotangents (row, …) of one slot of a block at an earlier one that it was computed from."""
        if slot == to:
            return cotangents
        return self.cotangents_at(n, {slot: cotangents}, (to,), (to,))[to]

    def cotangents_at(self, n: int, starts: Cotangents, slots: Collection[int], stop: Collection[int]) -> Cotangents:
        """Cotangents (row, …) of some slots of a block at earlier ones, through none of `stop`."""
        program = self.program(n)
        program.load()
        return by_row(lambda one: program.cotangents(one, slots, stop=stop), starts)

    @cached_property
    def side_channel(self) -> str | None:
        """A module that reads what earlier blocks left for it, beside the state and the encoder's output."""
        for n, program in enumerate(self.pieces.programs[1:], self.start + 1):
            known = {*self.recording.slots[min(n, self.stop - 1)], *((self.exit(n - 1),) if n == self.stop else ())}
            beside = set(program.inputs) - known
            if beside:
                return next(step.module for step in program.steps if not beside.isdisjoint(step.slots))
        return None

    # Tokens -----------------------------------------------------------------------------------------------------------

    def n_tokens(self, n: int) -> int:
        """How many tokens the stream of a block has: the encoder's or the decoder's, where there are two."""
        return self.recording.program.specs[self.entry(n)].shape[1]

    @property
    def n_in(self) -> int:
        """How many tokens there are in all."""
        return self.recording.states[self.start].shape[1]

    def offset(self, n: int) -> int:
        """Where the tokens of a block's stream begin among all tokens."""
        return 0 if n < self.recording.n_encoder_blocks else self.n_in - self.n_tokens(n)

    def placed(self, n: int, scores: Tensor) -> Tensor:
        """Scores (…, token) of a block's stream among all tokens: the encoder's, then the decoder's."""
        before, after = self.offset(n), self.n_in - self.n_tokens(n) - self.offset(n)
        return pad(scores, (before, after)) if before or after else scores

    def by_token(self, n: int, numbers: Tensor) -> Tensor:
        """Numbers (row, …) in the layout of some slot of a block's stream, summed over channels: (row, token)."""
        if numbers.shape[1:] == self._state_shape(n):
            found = numbers[:, 0].sum(-1)
        else:
            found = torch.stack([self.to_tokens(n, one)[0].sum(-1) for one in numbers])
        return self.placed(n, found)

    def to_tokens(self, n: int, x: Tensor) -> Tensor:
        """What is laid out as some slot of a block's stream, as (1, token, channel)."""
        layout = self._layout(n, tuple(x.shape))
        return x.reshape(1, self.n_tokens(n), -1) if layout is None else layout.pull(x)[0]

    def from_tokens(self, n: int, x: Tensor, shape: torch.Size) -> Tensor:
        """The way back, for a slot of some shape."""
        layout = self._layout(n, tuple(shape))
        return x.reshape(shape) if layout is None else layout.run(x)[0]

    def at_token(self, n: int, numbers: Tensor, token: int) -> Tensor:
        """Numbers in the layout of some slot of a block's stream, zero but for one of all tokens."""
        states = self.to_tokens(n, numbers)
        chosen, place = torch.zeros_like(states), token - self.offset(n)
        chosen[:, place] = states[:, place]
        return self.from_tokens(n, chosen, numbers.shape)

    def whole_write(self, n: int) -> Tensor:
        """What a block wrote whose parts cannot be told apart, (1, token, channel); all of it if it changes channels."""
        values = self.values(n)
        after, before = self.to_tokens(n, values[self.exit(n)]), values[self.entry(n)]
        return after - before if after.shape == before.shape else after

    def handed_on(self, n: int, cotangent: Tensor) -> Tensor:
        """The cotangent of the state that leaves such a block where it enters: past what the block wrote."""
        x = self.to_tokens(n, cotangent)
        return x if x.shape == self._state_shape(n) else x.new_zeros(self._state_shape(n))

    def _state_shape(self, n: int) -> tuple[int, ...]:
        return self.recording.program.specs[self.entry(n)].shape

    def _layout(self, n: int, shape: tuple[int, ...]) -> Program | None:
        """The steps that lay out the state entering a block in another shape; None where there are none."""
        program, entry = self.program(n), self.entry(n)
        size = math.prod(self._state_shape(n))
        ahead = [entry] if shape != self._state_shape(n) and math.prod(shape) == size else []
        while ahead:
            for step in program.readers.get(ahead.pop(), ()):
                if step.operation in MOVES and math.prod(program.specs[step.out].shape) == size:
                    if program.specs[step.out].shape == shape:
                        return program.part((entry,), (step.out,))
                    ahead.append(step.out)
        return None


class Pass(StreamPass):
    r"""The blocks of an operator at X, and cotangents $λ = \partial t/\partial y$ of a target $t = \sum_c w_c\, logit_c$.

    Args:
        operator: The operator; its blocks end at the last.
        weights: Weights of the target on logits.
        out_token: Where the logits are read.
        finer: Blocks whose feed-forwards are taken apart.

    Raises:
        MethodError: the range of blocks does not end at the last, or the number of tokens changes on the way.
    """

    def __init__(self, operator: FrozenOperator, weights: Weights, out_token: int, finer: Finer | None = None) -> None:
        _check(operator)
        pieces = operator.recording.pieces(operator.span, operator.heads, to_logits=True)
        super().__init__(operator, pieces, finer)
        self.weights, self.out_token = weights, out_token
        self._waiting = {self.stop: self._at_last_state}
        self._cotangents: dict[int, Cotangents] = {}

    @cached_property
    def value(self) -> float:
        """The target."""
        recording, classes = self.recording, torch.tensor(list(self.weights), device=self.operator.device)
        end = recording.readout
        if self.operator.heads:
            slot = self.pieces.program.outputs[0]
            end = self.pieces.values(self.stop - self.start, [slot])[slot]
        assert end is not None, "a target is read from a head"
        logits = recording.logits(end, self.out_token, classes)[0]
        return float((logits * torch.tensor(list(self.weights.values())).to(logits)).sum())

    @property
    def _at_last_state(self) -> Cotangents:
        """What waits at the state that leaves the last block, and at whatever else the head reads."""
        recording = self.recording
        n_classes = recording.readout.shape[-1] if recording.head is None else len(recording.head.weight)  # type: ignore[union-attr]
        weights = torch.zeros(n_classes, dtype=recording.states[-1].dtype, device=self.operator.device)
        weights[list(self.weights)] = torch.tensor(list(self.weights.values())).to(weights)
        waiting = {self.pieces.program.outputs[0]: recording.head_cotangent(weights, self.out_token)}
        return self.pieces.pull(self.stop - self.start, waiting)[1]

    def waiting(self, n: int) -> Cotangents:
        """Cotangents of what enters block n, and of what later blocks read of earlier ones; n may be the last state."""
        for block in reversed(range(n, min(self._waiting))):
            self.cotangents(block)
        return self._waiting[n]

    def cotangents(self, n: int) -> Cotangents:
        """λ at the marked slots of block n."""
        if n not in self._cotangents:
            waiting = self.waiting(n + 1)
            if self.recording.is_streamed:
                self._cotangents.clear()
            found, waiting = self.pieces.pull(n - self.start, waiting, self.marked(n))
            self._cotangents[n], self._waiting[n] = found, waiting
        return self._cotangents[n]


def _check(operator: FrozenOperator) -> None:
    recording = operator.recording
    if operator.span.stop != recording.n_blocks:
        raise MethodError(
            f"Components of a target need a range of blocks that ends at the last one ({recording.n_blocks}); got "
            f"{operator.span.stop}."
        )
    sizes = {state.shape[1] for state in recording.states[operator.span.start : -1]}
    if len(sizes) > 1:
        raise MethodError(
            f"`{recording.name}` changes the number of tokens on its way ({sorted(sizes)}), so its components do not "
            "share one row of tokens. Use `tensor.in_class`."
        )
