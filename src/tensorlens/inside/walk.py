"""Down the residual stream: cotangents on it, and what every earlier component gives them by the stream alone.

Several rows of cotangents go down together. A row may join below the top, where its component reads the stream; above
that place it is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tensorlens.inside.component_map import Component
from tensorlens.inside.stream import Mixture, Sum, Write, pulled
from tensorlens.inside.target import StreamPass

ROUNDING = 64
"""Below this many roundings of the whole, experts leave nothing over."""


class Row(NamedTuple):
    """A component and its scores (…, token)."""

    component: Component
    scores: Tensor


class Read(NamedTuple):
    """Where a component reads the stream: before which sum of its block, the last counted first."""

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
        start, n_encoder = self.run.operator.span.start, self.run.recording.n_encoder_blocks
        for n in reversed(range(start, last + 1)):
            if n + 1 == n_encoder and n < last:
                yield Row(Component(kind="embedding"), self.carried(n + 1))
                if not self.joining.memory:
                    return
                yield Row(Component(kind="bias", block=n), self._enter_encoder(n))
            yield from self.block(n)
        yield Row(Component(kind="embedding"), self.carried(start))

    def carried(self, n: int) -> Tensor:
        """What the state that enters block n carries, (row, token)."""
        return self._by_token(n, self.cotangents * self.run.entry(n)[1])

    def block(self, n: int) -> list[Row]:
        """Go down one block: what its components give, in their order."""
        at, value = self.run.seen.outputs[n]
        entry, before = self.run.entry(n)
        sums = self.run.sums[n]
        if sums is None:
            row = Row(Component(block=n, kind="block"), self._by_token(n, self.cotangents * whole_write(value, before)))
            self.cotangents = self.cotangents.reshape(len(self.cotangents), *before.shape)
            self._join(Read(n, 0))
            return [row]
        bias = torch.zeros(1, dtype=self.run.x.dtype, device=self.run.x.device)
        by_write: dict[int, Tensor] = {}
        for place, one in enumerate([*sums, None]):
            edge, there = (entry, before) if one is None else (one.edge, one.value)
            if edge.node is not at.node:
                further = pulled(at, self.cotangents, edge)
                bias = bias + self._by_token(n, self.cotangents * value) - self._by_token(n, further * there)
                self.cotangents = further
            if one is not None:
                by_write |= {id(write): self.cotangents for write in one.writes}
                at, value = one.stream, one.stream_value
                self._join(Read(n, place))
        rows = [row for write, kind in kinds(self.run, n, sums) for row in self._rows(n, write, kind, by_write)]
        return [*rows, Row(Component(block=n, kind="bias"), bias)] if bool(bias.any()) else rows

    def _rows(self, n: int, write: Write, kind: str, by_write: Mapping[int, Tensor]) -> Iterator[Row]:
        cotangents = by_write[id(write)]
        whole = self._by_token(n, cotangents * write.value)
        if is_finer(self.run, n, write):
            return finer_rows(self.run, kind, n, write, cotangents, whole)
        of_heads = [pulled(write.edge, cotangents, one.edge) * one.value for one in told_apart(self.run, n, write)]
        return head_rows(self.run, kind, n, whole, of_heads)

    def _join(self, read: Read) -> None:
        joining = self.joining.stream.get(read, ())
        if joining:
            self.cotangents = _added(self.cotangents, joining)

    def _enter_encoder(self, n: int) -> Tensor:
        """From what the decoder read of the encoder to the state that the encoder's last block leaves."""
        assert self.run.seen.memory is not None, "asked of a model with an encoder"
        edge, memory = self.run.seen.memory
        at, value = self.run.seen.outputs[n]
        there = _added(memory.new_zeros(len(self.cotangents), *memory.shape), self.joining.memory)
        self.cotangents = pulled(edge, there, at)
        of_memory = self.run.placed(n, (there * memory).flatten(1, -3).sum((1, -1)))
        return of_memory - self._by_token(n, self.cotangents * value)

    def _by_token(self, n: int, numbers: Tensor) -> Tensor:
        return torch.stack([self.run.by_token(n, one) for one in numbers])


def _added(cotangents: Tensor, joining: Iterable[tuple[int, Tensor]]) -> Tensor:
    cotangents = cotangents.clone()
    for row, cotangent in joining:
        cotangents[row] += cotangent.reshape(cotangents.shape[1:])
    return cotangents


def seen_from(state: GradientEdge, cotangent: Tensor | None, edge: GradientEdge, value: Tensor) -> Tensor:
    """The part of a cotangent that comes by way of one state."""
    if cotangent is None:
        return torch.zeros_like(value)
    found = torch.autograd.grad([state], [edge], [cotangent], retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(value) if found is None else found


# What was written ----------------------------------------------------------------------------------------------------


def whole_write(after: Tensor, before: Tensor) -> Tensor:
    """What a whole block wrote."""
    return after - before.reshape(after.shape) if after.numel() == before.numel() else after


def kinds(run: StreamPass, n: int, sums: list[Sum]) -> Iterator[tuple[Write, str]]:
    """What was written in a block, in order, and what to call it."""
    n_attentions = 0
    for one in reversed(sums):
        for write in reversed(one.writes):
            if write.mixtures:
                n_attentions += 1
                yield write, "attention" if n_attentions == 1 else f"attention {n_attentions}"
            else:  # without attention anywhere in the block, one cannot say which of its parts mixes tokens
                yield write, "feed-forward" if run.seen.mixtures.get(n) else "block"


def told_apart(run: StreamPass, n: int, write: Write) -> list[Mixture]:
    """The mixture behind a write, where its axes are known to be heads and the tokens of the stream."""
    if len(write.mixtures) != 1:
        return []
    value = write.mixtures[0].value
    is_told = value.dim() == 3 or value.dim() == 4 and len(value) == 1
    return list(write.mixtures) if is_told and value.shape[-2] == run.n_tokens(n) else []


def head_rows(run: StreamPass, kind: str, n: int, whole: Tensor, of_heads: list[Tensor]) -> Iterator[Row]:
    """A row for each head and one for the bias of the output projection, or one for the whole; (…, token) each."""
    if not of_heads:
        yield Row(Component(block=n, kind=kind), whole)
        return
    n_leading = whole.dim() - 1
    by_head = of_heads[0].sum(-1).flatten(n_leading, -2)
    heads = run.placed(n, by_head)
    for head, scores in enumerate(heads.unbind(n_leading)):
        yield Row(Component(block=n, kind=f"{kind} head", head=head), scores)
    yield Row(Component(block=n, kind=f"{kind} bias"), whole - heads.sum(n_leading))


def is_finer(run: StreamPass, n: int, write: Write) -> bool:
    """Whether a feed-forward is to be taken apart."""
    return not write.mixtures and (n in run.seen.neurons or n in run.experts)


def finer_rows(run: StreamPass, kind: str, n: int, write: Write, cotangents: Tensor, whole: Tensor) -> Iterator[Row]:
    """A row for each expert or neuron of a feed-forward; (row, token) each."""
    return (expert_rows if n in run.experts else neuron_rows)(run, kind, n, write, cotangents, whole)


def expert_rows(run: StreamPass, kind: str, n: int, write: Write, cotangents: Tensor, whole: Tensor) -> Iterator[Row]:
    """A row for each expert that was chosen, and one for what the feed-forward writes beside them, if anything."""
    rest = whole
    for part in run.experts[n]:
        effects = (pulled(write.edge, cotangents, part.edge) * part.value).sum(-1).flatten(1)[:, part.rows]
        scores = effects.new_zeros(len(effects), run.n_tokens(n)).index_add(1, part.tokens, effects)
        scores = run.placed(n, scores)
        rest = rest - scores
        yield Row(Component(block=n, kind="expert", expert=part.expert), scores)
    if bool((rest.abs() > ROUNDING * torch.finfo(rest.dtype).eps * whole.abs().max()).any()):
        yield Row(Component(block=n, kind=kind), rest)


def neuron_rows(run: StreamPass, kind: str, n: int, write: Write, cotangents: Tensor, whole: Tensor) -> Iterator[Row]:
    """A row for each neuron of a feed-forward, and one for what its last matrix adds; (row, token) each.

    A neuron is a channel of what enters the last matrix. Where that cannot be told by token, there is one row for all.
    """
    step = run.seen.last_matrix(write)
    n_tokens = run.n_tokens(n)
    if step is None or step.value.numel() != n_tokens * step.value.shape[-1]:
        yield Row(Component(block=n, kind=kind), whole)
        return
    effects = pulled(write.edge, cotangents, step.edge) * step.value
    by_neuron = run.placed(n, effects.reshape(len(cotangents), n_tokens, -1).transpose(1, 2))
    for neuron, scores in enumerate(by_neuron.unbind(1)):
        yield Row(Component(block=n, kind="neuron", neuron=neuron), scores)
    yield Row(Component(block=n, kind=f"{kind} bias"), whole - by_neuron.sum(1))
