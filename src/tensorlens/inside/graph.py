r"""The graph of a target: components at tokens, and what each gave to which.

The edge from b to c is ⟨λ_c pulled from c to the place where it reads the stream, and along it, y_b⟩. What enters c
sums to its total effect:

    Σ_b edge(b → c) + (constants inside c) = e_c = ⟨λ_c, y_c⟩
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorlens import cancel
from tensorlens.errors import InputError, MethodError, check_whole
from tensorlens.inside.component_graph import ComponentGraph, Edge, Node
from tensorlens.inside.component_map import Component
from tensorlens.inside.components import Cotangents, from_target
from tensorlens.inside.stream import Write, by_head, pulled
from tensorlens.inside.target import Explained, Pass, pass_to
from tensorlens.inside.walk import Joining, Read, Row, Walk, kinds, seen_from, told_apart, whole_write

AT_A_TIME = 32
"""How many nodes are opened together: pulling them one by one would take as many walks."""

MOST_EDGES = 8192
"""How many of the edges into one node are remembered, the heaviest; the rest is cut off in any case."""

Key = tuple[Component, int]


def check_growth(share: float, max_nodes: int) -> None:
    """Refuse what no graph can grow to."""
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
        raise InputError(f"`share` must be above 0 and at most 1; got {share!r:.60}.")
    check_whole(max_nodes, "max_nodes", 1)


def component_graph(asked: Explained, share: float, max_nodes: int) -> ComponentGraph:
    """The graph of a target, as a record."""
    check_growth(share, max_nodes)
    n_encoder = asked.operator.recording.n_encoder_blocks
    if n_encoder and asked.operator.span.start >= n_encoder:
        raise MethodError("The graph of a decoder needs its encoder; got a range of blocks that begins after it.")
    with pass_to(asked.operator, asked.weights, asked.out_token) as run:
        grown = Growth(run).grow(share, max_nodes)
    channels, meta = run.recording.side_channels, asked.meta
    if channels and run.seen.memory is None:
        meta = meta | {"constants": f"{channels[0]} also reads what earlier blocks left for it"}
    return grown.as_graph(replace(asked, meta=meta), share, max_nodes)


class Source(NamedTuple):
    """A component that something can flow into: where it reads the stream, and what it wrote."""

    read: Read
    write: Write | None
    head: int | None


@dataclass
class Growing:
    """A node while the graph grows: what it is worth, what constants inside it give, and what flowed in so far."""

    key: Key
    value: float = 0.0
    constant: float = 0.0
    kept: float = 0.0
    given: float = 0.0
    is_open: bool = False


@dataclass
class Growth:
    """A graph that grows from the target, the heaviest edge first."""

    run: Pass
    edges: list[Edge] = field(default_factory=list)
    covered: float = 0.0
    magnitude: float = 0.0

    def __post_init__(self) -> None:
        """Take every λ by one backward pass."""
        self._sources = dict(_sources(self.run))
        writes = [source.write for source in self._sources.values() if source.write is not None]
        blocks = [self.run.seen.outputs[n][0] for n, sums in self.run.sums.items() if sums is None]
        mixtures = [mixture.edge for write in writes for mixture in write.mixtures]
        self._at = Cotangents(self.run, [*(write.edge for write in writes), *mixtures, *blocks])
        self._growing: list[Growing] = []
        self._places: dict[Key, int] = {}
        self._offered: dict[int, list[tuple[float, Key]]] = {}  # by node, the lightest first
        self._ahead: list[tuple[float, int]] = []  # the heaviest of each node

    @property
    def nodes(self) -> list[Node]:
        """The nodes as they stand."""
        return [
            Node(
                component=one.key[0], token=one.key[1], value=one.value if one.is_open else one.given,
                constant=one.constant, cut=one.value - one.constant - one.kept if one.is_open else 0.0,
            )
            for one in self._growing
        ]  # fmt: skip

    def as_graph(self, asked: Explained, share: float, max_nodes: int) -> ComponentGraph:
        """The record of it."""
        return ComponentGraph(
            nodes=tuple(self.nodes), edges=tuple(self.edges), tokens=asked.tokens, target=asked.name,
            value=float(self.run.t.detach()), share=self.covered / self.magnitude if self.magnitude else 1.0,
            meta=asked.meta | {"asked_share": share, "max_nodes": max_nodes},
        )  # fmt: skip

    def grow(self, share: float, max_nodes: int) -> Growth:
        """Keep the heaviest edges until `share` of the magnitude into the nodes is covered, or no node may be added."""
        self._open_target()
        while self._ahead and self.covered < share * self.magnitude:
            cancel.check()
            fresh: list[int] = []
            while self._ahead and len(fresh) < AT_A_TIME and self.covered < share * self.magnitude:
                node, (weight, key) = self._heaviest()
                if key in self._places or len(self._growing) < max_nodes:
                    fresh += self._keep(weight, node, key)
            self._open(fresh)
        return self

    def _heaviest(self) -> tuple[int, tuple[float, Key]]:
        _, node = heapq.heappop(self._ahead)
        found = self._offered[node].pop()
        self._push(node)
        return node, found

    def _push(self, node: int) -> None:
        if self._offered[node]:
            heapq.heappush(self._ahead, (-abs(self._offered[node][-1][0]), node))

    def _keep(self, weight: float, node: int, key: Key) -> list[int]:
        """Keep an edge; its source is to be opened if it is new and something flows into it."""
        is_new = key not in self._places
        place = self._places.setdefault(key, len(self._growing))
        if is_new:
            self._growing.append(Growing(key))
        self.edges.append(Edge(source=place, target=node, weight=weight))
        self.covered += abs(weight)
        self._growing[node].kept += weight
        self._growing[place].given += weight
        return [place] if is_new and key[0] in self._sources else []

    # What flows into a node ---------------------------------------------------------------------------------------

    def _open_target(self) -> None:
        walk, _, head = from_target(self.run)
        key = Component(kind="target"), self.run.out_token
        self._places[key] = 0
        self._growing.append(Growing(key, float(self.run.t.detach()), is_open=True))
        rows = [*walk.all_the_way(self.run.operator.span.stop - 1), Row(Component(kind="bias"), head[None])]
        self._offer([0], rows)

    def _open(self, places: Sequence[int]) -> None:
        """Pull each node's λ through its component alone, to the stream and down along it."""
        if not places:
            return
        joining = Joining()
        for row, place in enumerate(places):
            self._join(row, self._growing[place], joining)
        last = max(read.block for read in joining.stream)
        top = self.run.seen.outputs[last][1]
        walk = Walk(self.run, top.new_zeros(len(places), *top.shape), joining)
        self._offer(places, list(walk.all_the_way(last)))

    def _join(self, row: int, node: Growing, joining: Joining) -> None:
        component, token = node.key
        read, write, head = self._sources[component]
        one = _OneNode(self.run, self._at, read, write, head, token)
        node.value, node.is_open = one.value, True
        node.constant = one.value - one.from_stream - one.from_memory
        joining.add(row, read, one.cotangent, one.of_memory)

    def _offer(self, places: Sequence[int], rows: list[Row]) -> None:
        """Queue the edges into some nodes, of which the heaviest is chosen next."""
        scores = torch.stack([row.scores.detach().cpu() for row in rows], 1)  # (node, component, token)
        n_tokens = scores.shape[-1]
        for place, found in zip(places, scores.flatten(1), strict=True):
            self.magnitude += float(found.abs().sum())
            best = found.abs().topk(min(MOST_EDGES, int(found.count_nonzero()))).indices.flip(0)
            keys = [(rows[i // n_tokens].component, i % n_tokens) for i in best.tolist()]
            self._offered[place] = list(zip(found[best].tolist(), keys, strict=True))
            self._push(place)


class _OneNode:
    """One component at one token: its worth, and the cotangent where it reads the stream."""

    def __init__(self, run: Pass, at: Cotangents, read: Read, write: Write | None, head: int | None, token: int):
        self.run, n = run, read.block
        self.of_memory, self.from_memory = None, 0.0
        if write is None:
            edge, after = run.seen.outputs[n]
            to, stream = run.entry(n)
            chosen = run.at_token(n, at.times(edge, torch.ones_like(after)), token)
            self.value = float((chosen * whole_write(after, stream)).sum())
            self.cotangent = pulled(edge, chosen[None], to)[0] - chosen.reshape(stream.shape)
        else:
            sums = run.sums[n]
            assert sums is not None, "a write is one of a sum"
            to, stream = sums[read.place].stream, sums[read.place].stream_value
            edge, value = (
                (write.edge, write.value) if head is None else (write.mixtures[0].edge, write.mixtures[0].value)
            )
            whole = at.times(edge, torch.ones_like(value))
            chosen = run.at_token(n, whole, token) if head is None else _at_head(whole, head, token - run.offset(n))
            self.value = float((chosen * value).sum())
            self.cotangent = seen_from(edge, chosen, to, stream)  # zero: a cross-attention with attention held
            self._read_memory(edge, chosen, to)
        self.from_stream = float((self.cotangent * stream).sum())

    def _read_memory(self, edge: Any, chosen: Tensor, to: Any) -> None:
        """What a cross-attention reads of the encoder: all of it but what comes by way of its own stream."""
        if self.run.seen.memory is None:
            return
        place, memory = self.run.seen.memory
        by_all = seen_from(edge, chosen, place, memory)
        self.of_memory = by_all - seen_from(to, self.cotangent, place, memory)
        self.from_memory = float((self.of_memory * memory).sum())


def _at_head(whole: Tensor, head: int, token: int) -> Tensor:
    chosen = whole.new_zeros(whole.shape)
    by_head(chosen)[head, token] = by_head(whole)[head, token]
    return chosen


def _sources(run: Pass) -> Iterator[tuple[Component, Source]]:
    for n, sums in run.sums.items():
        if sums is None:
            yield Component(block=n, kind="block"), Source(Read(n, 0), None, None)
            continue
        places = {id(write): place for place, one in enumerate(sums) for write in one.writes}
        for write, kind in kinds(run, n, sums):
            read = Read(n, places[id(write)])
            told = told_apart(run, n, write)
            if not told:
                yield Component(block=n, kind=kind), Source(read, write, None)
                continue
            for head in range(len(by_head(told[0].value))):
                yield Component(block=n, kind=f"{kind} head", head=head), Source(read, write, head)
