"""Down the residual stream: cotangents on it, and the contribution of every earlier component by the stream alone.

Several rows of cotangents go down together. A row may join below the top, where its component reads the stream; above
that place it is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from tensorlens.inside.block import Block, StreamPass
from tensorlens.inside.dictionary import FeatureParts, features_of
from tensorlens.inside.stream import Component, Write

ROUNDING = 64
"""If the remainder beside the experts is below this many roundings of the whole, it counts as zero."""


class Row(NamedTuple):
    """A component and its scores (…, token)."""

    component: Component
    scores: Tensor


class Read(NamedTuple):
    """Where a component reads the stream: the sum of its block before which it reads, counted from the last.

    The state that enters the block comes after all sums.
    """

    block: int
    place: int


@dataclass
class Joining:
    """Cotangents that join on the way, by place and row, and those of the decoder's reading of the encoder."""

    stream: dict[Read, list[tuple[int, Tensor]]] = field(default_factory=dict)
    memory: list[tuple[int, Tensor]] = field(default_factory=list)

    def add(self, row: int, read: Read, cotangent: Tensor, of_memory: Tensor | None) -> None:
        """Let a row join."""
        self.stream.setdefault(read, []).append((row, cotangent))
        if of_memory is not None:
            self.memory.append((row, of_memory))


class Walk:
    """Cotangents on their way down the stream.

    Args:
        run: The pass.
        cotangents: (row, …) in the layout of the state that leaves the block where the walk begins.
        joining: Rows that join further down.
    """

    def __init__(self, run: StreamPass, cotangents: Tensor, joining: Joining | None = None) -> None:
        self.run, self.cotangents = run, cotangents
        self.joining = joining or Joining()

    @classmethod
    def from_zero(cls, run: StreamPass, last: int, n_rows: int, joining: Joining) -> Walk:
        """A walk of rows that all join on the way, from the state that leaves block `last`."""
        top = run.recording.program.specs[run.block(last).exit]
        return cls(run, torch.zeros(n_rows, *top.shape, dtype=top.dtype, device=top.device), joining)

    def all_the_way(self, last: int) -> Iterator[Row]:
        """The contribution of every component, (row, token) each, from block `last` down to the embedding."""
        n_encoder = self.run.recording.n_encoder_blocks
        for n in reversed(range(self.run.start, last + 1)):
            if n + 1 == n_encoder and n < last:
                yield Row(Component(kind="embedding"), self.carried(n + 1))
                if not self.joining.memory:
                    return
                yield Row(Component(kind="bias", block=n), self._enter_encoder(n))
            yield from self.block(n)
        yield Row(Component(kind="embedding"), self.carried(self.run.start))

    def carried(self, n: int) -> Tensor:
        """The contribution of the state that enters block n, (row, token)."""
        block = self.run.block(n)
        return block.by_token(self.cotangents * block.values[block.entry])

    def block(self, n: int) -> list[Row]:
        """Go down one block: the contributions of its components, in their order."""
        block = self.run.block(n)
        values, at = block.values, block.exit
        if block.sums is None:
            row = whole_row(block, self.cotangents)
            self.cotangents = torch.stack([block.handed_on(one) for one in self.cotangents])
            self._join(Read(n, 0))
            return [row]
        bias = torch.zeros(1, dtype=values[at].dtype, device=values[at].device)
        by_write: dict[int, Tensor] = {}
        for place, one in enumerate([*block.sums, None]):
            slot = block.entry if one is None else one.slot
            if slot != at:
                further = block.pulled(at, self.cotangents, slot)
                bias = bias + block.by_token(self.cotangents * values[at]) - block.by_token(further * values[slot])
                self.cotangents = further
            if one is not None:
                by_write |= {write.slot: self.cotangents for write in one.writes}
                self.cotangents = block.pulled(one.term, self.cotangents, one.stream)
                at = one.stream
            self._join(Read(n, place))
        rows = [row for write, kind in block.writes for row in self._rows(block, write, kind, by_write[write.slot])]
        return [*rows, Row(Component(block=n, kind="bias"), bias)] if bool(bias.any()) else rows

    def _rows(self, block: Block, write: Write, kind: str, cotangents: Tensor) -> list[Row]:
        inner = {slot: block.pulled(write.slot, cotangents, slot) for slot in block.inner(write)}
        return write_rows(block, write, kind, {write.slot: cotangents} | inner)

    def _join(self, read: Read) -> None:
        joining = self.joining.stream.get(read, ())
        if joining:
            self.cotangents = _added(self.cotangents, joining)

    def _enter_encoder(self, n: int) -> Tensor:
        """From the decoder's reading of the encoder to the state that leaves the encoder's last block."""
        block, slot = self.run.block(n), self.run.memory
        assert slot is not None, "only for a model with an encoder"
        memory = block.values_of([slot])[slot]
        there = _added(memory.new_zeros(len(self.cotangents), *memory.shape), self.joining.memory)
        self.cotangents = block.pulled(slot, there, block.exit)
        return block.by_token(there * memory) - block.by_token(self.cotangents * block.values[block.exit])


def _added(cotangents: Tensor, joining: Iterable[tuple[int, Tensor]]) -> Tensor:
    cotangents = cotangents.clone()
    for row, cotangent in joining:
        cotangents[row] += cotangent.reshape(cotangents.shape[1:])
    return cotangents


# What was written -----------------------------------------------------------------------------------------------------


def whole_row(block: Block, cotangents: Tensor) -> Row:
    """The contribution of a block whose parts cannot be told apart, from cotangents (row, …) of its output."""
    there = torch.stack([block.to_tokens(one) for one in cotangents])
    return Row(Component(block=block.n, kind="block"), block.by_token(there * block.whole_write()))


def write_rows(block: Block, write: Write, kind: str, at: Mapping[int, Tensor]) -> list[Row]:
    """The contribution of one write: a row for each head, expert or neuron if they can be told apart, otherwise one.

    Args:
        block: The block.
        write: The write.
        kind: Its name.
        at: Cotangents (row, …) of the write and of the slots inside it.
    """
    values, name = block.values, Component(block=block.n, kind=kind)
    whole = block.by_token(at[write.slot] * values[write.slot])
    head, neurons, features = block.heads_of(write), block.neurons(write), features_of(block, write, kind)
    if features is not None:
        return _feature_rows(block, features, at[write.slot], whole)
    if head is not None:
        by_head = (at[head.slot] * values[head.slot]).sum(-1).flatten(1, -2)  # (row, head, token)
        parts = [replace(name, kind=f"{kind} head", head=i) for i in range(by_head.shape[1])]
        return _parts(block, name, parts, by_head, whole)
    if not write.mixtures and block.experts:
        return _expert_rows(block, name, at, whole)
    if neurons is not None and values[neurons].numel() == block.n_tokens * values[neurons].shape[-1]:
        by_neuron = (at[neurons] * values[neurons]).reshape(len(whole), block.n_tokens, -1)  # (row, token, neuron)
        by_neuron = by_neuron.transpose(1, 2)
        parts = [replace(name, kind="neuron", neuron=i) for i in range(by_neuron.shape[1])]
        return _parts(block, name, parts, by_neuron, whole)
    return [Row(name, whole)]


def _parts(block: Block, name: Component, parts: list[Component], scores: Tensor, whole: Tensor) -> list[Row]:
    """Rows of parts (row, part, token), and one for the bias of the last matrix."""
    scores = block.placed(scores)
    rows = [Row(part, one) for part, one in zip(parts, scores.unbind(1), strict=True)]
    return [*rows, Row(replace(name, kind=f"{name.kind} bias"), whole - scores.sum(1))]


def _feature_rows(block: Block, parts: FeatureParts, cotangents: Tensor, whole: Tensor) -> list[Row]:
    """A row for each active feature, one for the decoder's bias, and one for the error."""
    there = torch.stack([block.to_tokens(one)[0] for one in cotangents])  # (row, token, channel)
    rows = list[Row]()
    if parts.features:
        writes, activations = (
            torch.stack([getattr(one, name) for one in parts.features]) for name in ("write", "activation")
        )
        by_feature = torch.einsum("rij,fj->rfi", there, writes) * activations  # (row, feature, token)
        scores = block.placed(by_feature).unbind(1)
        rows = [Row(one.component, score) for one, score in zip(parts.features, scores, strict=True)]
    rows.append(Row(Component(block=block.n, kind="decoder bias"), block.placed(there @ parts.bias)))
    return [*rows, Row(Component(block=block.n, kind="error"), whole - sum(row.scores for row in rows))]


def _expert_rows(block: Block, name: Component, at: Mapping[int, Tensor], whole: Tensor) -> list[Row]:
    """A row for each chosen expert, and one for the rest of the feed-forward's write, if any."""
    rows, rest = [], whole
    for part in block.experts:
        # The slot holds rows of all experts in its own order: add those of this expert to their tokens.
        by_row = (at[part.slot] * block.values[part.slot]).sum(-1).flatten(1)[:, part.rows]
        scores = by_row.new_zeros(len(by_row), block.n_tokens).index_add(1, part.tokens, by_row)
        rows.append(Row(Component(block=block.n, kind="expert", expert=part.expert), block.placed(scores)))
        rest = rest - rows[-1].scores
    if bool((rest.abs() > ROUNDING * torch.finfo(rest.dtype).eps * whole.abs().max()).any()):
        rows.append(Row(name, rest))
    return rows
