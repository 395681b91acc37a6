"""Down the residual stream: cotangents on it, and what every earlier component gives them by the stream alone.

Several rows of cotangents go down together. A row may join below the top, where its component reads the stream; above
that place it is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tensorlens.inside.component_map import Component
from tensorlens.inside.stream import Write
from tensorlens.inside.target import StreamPass

ROUNDING = 64
"""Below this many roundings of the whole, experts leave nothing over."""


class Row(NamedTuple):
    """A component and its scores (…, token)."""

    component: Component
    scores: Tensor


class Read(NamedTuple):
    """Where a component reads the stream: before which sum of its block, the last counted first.

    After all of them comes the state that enters the block.
    """

    block: int
    place: int


@dataclass
class Joining:
    """Cotangents that join on the way: by place and row, and those of what the decoder reads of the encoder."""

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

    def all_the_way(self, last: int) -> Iterator[Row]:
        """What every component gives, (row, token) each, from block `last` down to the embedding."""
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
        """What the state that enters block n carries, (row, token)."""
        return self.run.by_token(n, self.cotangents * self.run.values(n)[self.run.entry(n)])

    def block(self, n: int) -> list[Row]:
        """Go down one block: what its components give, in their order."""
        run, sums, values = self.run, self.run.sums(n), self.run.values(n)
        at, entry = run.exit(n), run.entry(n)
        if sums is None:
            row = whole_row(run, n, self.cotangents)
            self.cotangents = torch.stack([run.handed_on(n, one) for one in self.cotangents])
            self._join(Read(n, 0))
            return [row]
        bias = torch.zeros(1, dtype=values[entry].dtype, device=values[entry].device)
        by_write: dict[int, Tensor] = {}
        for place, one in enumerate([*sums, None]):
            slot = entry if one is None else one.slot
            if slot != at:
                further = run.pulled(n, at, self.cotangents, slot)
                bias = bias + run.by_token(n, self.cotangents * values[at]) - run.by_token(n, further * values[slot])
                self.cotangents = further
            if one is not None:
                by_write |= {write.slot: self.cotangents for write in one.writes}
                self.cotangents = run.pulled(n, one.term, self.cotangents, one.stream)
                at = one.stream
            self._join(Read(n, place))
        rows = [row for write, kind in run.kinds(n) for row in self._rows(n, write, kind, by_write)]
        return [*rows, Row(Component(block=n, kind="bias"), bias)] if bool(bias.any()) else rows

    def _rows(self, n: int, write: Write, kind: str, by_write: Mapping[int, Tensor]) -> list[Row]:
        cotangents = by_write[write.slot]
        at = {slot: self.run.pulled(n, write.slot, cotangents, slot) for slot in self.run.inner(n, write)}
        return write_rows(self.run, n, write, kind, {write.slot: cotangents} | at)

    def _join(self, read: Read) -> None:
        joining = self.joining.stream.get(read, ())
        if joining:
            self.cotangents = _added(self.cotangents, joining)

    def _enter_encoder(self, n: int) -> Tensor:
        """From what the decoder read of the encoder to the state that the encoder's last block leaves."""
        run, slot = self.run, self.run.memory
        assert slot is not None, "asked of a model with an encoder"
        memory, at = run.pieces.values(n - run.start, [slot])[slot], run.exit(n)
        there = _added(memory.new_zeros(len(self.cotangents), *memory.shape), self.joining.memory)
        self.cotangents = run.pulled(n, slot, there, at)
        return run.by_token(n, there * memory) - run.by_token(n, self.cotangents * run.values(n)[at])


def _added(cotangents: Tensor, joining: Iterable[tuple[int, Tensor]]) -> Tensor:
    cotangents = cotangents.clone()
    for row, cotangent in joining:
        cotangents[row] += cotangent.reshape(cotangents.shape[1:])
    return cotangents


# What was written -----------------------------------------------------------------------------------------------------


def whole_row(run: StreamPass, n: int, cotangents: Tensor) -> Row:
    """What a block gives whose parts cannot be told apart, by cotangents (row, …) of the state that leaves it."""
    there = torch.stack([run.to_tokens(n, one) for one in cotangents])
    return Row(Component(block=n, kind="block"), run.by_token(n, there * run.whole_write(n)))


def write_rows(run: StreamPass, n: int, write: Write, kind: str, at: Mapping[int, Tensor]) -> list[Row]:
    """What one write gives: a row for each head, expert or neuron where they can be told apart, else one.

    Args:
        run: The pass.
        n: The block.
        write: What was written.
        kind: What to call it.
        at: Cotangents (row, …) of the write and of the slots inside it.
    """
    values, name = run.values(n), Component(block=n, kind=kind)
    whole = run.by_token(n, at[write.slot] * values[write.slot])
    effects = {slot: at[slot] * values[slot] for slot in run.inner(n, write)}
    head, neurons = run.heads_of(n, write), run.neurons(n, write)
    if head is not None:
        return _parts(run, name, whole, "head", effects[head.slot].sum(-1).flatten(1, -2))
    if not write.mixtures and run.experts(n):
        return _expert_rows(run, n, name, effects, whole)
    if neurons is not None and values[neurons].numel() == run.n_tokens(n) * values[neurons].shape[-1]:
        by_neuron = effects[neurons].reshape(len(whole), run.n_tokens(n), -1).transpose(1, 2)
        return _parts(run, name, whole, "neuron", by_neuron)
    return [Row(name, whole)]


def _parts(run: StreamPass, of: Component, whole: Tensor, name: str, scores: Tensor) -> list[Row]:
    """Rows of parts (row, part, token), and one for what the last matrix adds: its bias."""
    assert of.block is not None, "a write is in a block"
    scores = run.placed(of.block, scores)
    kind = f"{of.kind} head" if name == "head" else name
    parts = [replace(of, kind=kind, **{name: i}) for i in range(scores.shape[1])]
    rows = [Row(part, one) for part, one in zip(parts, scores.unbind(1), strict=True)]
    return [*rows, Row(replace(of, kind=f"{of.kind} bias"), whole - scores.sum(1))]


def _expert_rows(run: StreamPass, n: int, name: Component, effects: Mapping[int, Tensor], whole: Tensor) -> list[Row]:
    """A row for each expert that was chosen, and one for what the feed-forward writes beside them, if anything."""
    rows, rest = [], whole
    for part in run.experts(n):
        by_row = effects[part.slot].sum(-1).flatten(1)[:, part.rows]
        scores = by_row.new_zeros(len(by_row), run.n_tokens(n)).index_add(1, part.tokens, by_row)
        rows.append(Row(Component(block=n, kind="expert", expert=part.expert), run.placed(n, scores)))
        rest = rest - rows[-1].scores
    if bool((rest.abs() > ROUNDING * torch.finfo(rest.dtype).eps * whole.abs().max()).any()):
        rows.append(Row(name, rest))
    return rows
