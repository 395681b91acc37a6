r"""`ComponentGraph`: components at tokens, the contributions between them, and how the graph of a target grows.

The edge from b to c is ⟨λ_c, y_b⟩, with λ_c pulled from c to where it reads the stream, and along it. Edges into c
and its constants sum to its total effect:

    Σ_b edge(b → c) + (constants inside c) = e_c = ⟨λ_c, y_c⟩
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import torch
from rich.console import RenderableType
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_choice, check_path, check_whole
from tensorlens.files import to_json, write_whole
from tensorlens.inside.block import Finer, Part
from tensorlens.inside.dictionary import ActiveFeature, features_of
from tensorlens.inside.stream import Component, Write
from tensorlens.inside.target import Explained, Pass
from tensorlens.inside.walk import Joining, Read, Row, Walk
from tensorlens.memory import fitting
from tensorlens.progress import check_cancelled
from tensorlens.records import Index, Record, Writer
from tensorlens.views.captions import caption_lines, headline_of
from tensorlens.views.page import inside_page
from tensorlens.views.printing import heading, table
from tensorlens.views.table import Table

AT_A_TIME = 32
"""How many nodes are opened together; one by one, each would take a walk of its own."""

MOST_EDGES = 8192
"""How many edges into one node are kept, the heaviest first; the rest is cut off in any case."""

Key = tuple[Component, int]

GraphFormat = Literal["tensorlens", "circuit-tracer"]


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    r"""A component at one token.

    Attributes:
        component: The component; of kind ``"target"`` for the target itself.
        token: The token.
        value: Its total effect $e_c = ⟨λ_c, y_c⟩$ at this token. For the embedding and biases, into which nothing
            flows, what they contributed to the nodes of the graph.
        constant: The part of the value that comes from biases inside.
        cut: The contribution of the edges that were left out: the value minus the constant and the edges into it.
    """

    component: Component
    token: Index
    value: float
    constant: float = 0.0
    cut: float = 0.0


class Edge(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The contribution of one node to another, along the residual stream alone. Nodes are given by index."""

    source: Index
    target: Index
    weight: float


class ComponentGraph(Record, frozen=True, kw_only=True, tag="tensorlens.component_graph/1"):
    """The flow from the input to a target, by component.

    For every node that something flows into: the edges into it, its constant and its cut sum to its value.

    Attributes:
        nodes: The first is the target.
        edges: In the order they were kept, the heaviest first as far as they were known.
        tokens: A label for each token.
        target: What is explained.
        value: The number that is explained.
        share: The share of the magnitude flowing into the nodes that is on the edges.
        meta: Model, versions, rules, blocks, output; the share and the number of nodes that were asked for.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    tokens: tuple[str, ...]
    target: str
    value: float
    share: float
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that nodes stand at tokens and edges between nodes."""
        super().__post_init__()
        n_nodes, n_tokens = len(self.nodes), len(self.tokens)
        if not all(node.token < n_tokens for node in self.nodes):
            raise InputError(f"Expected nodes at the {n_tokens} tokens; got one elsewhere.")
        if not all(max(edge.source, edge.target) < n_nodes for edge in self.edges):
            raise InputError(f"Expected edges between the {n_nodes} nodes; got one elsewhere.")

    def __repr__(self) -> str:
        """One line: nodes, edges and share."""
        size = f"{len(self.nodes)} nodes, {len(self.edges)} edges, {self.share:.0%} of what flows into them"
        return f"ComponentGraph({self.target!r} = {self.value:.4g}: {size})"

    @property
    def headline(self) -> str:
        """The question that the graph answers, such as ``Why “ Paris”?``."""
        return headline_of(self.meta, self.target)

    def _table(self) -> Table:
        """Weights: row t, column s is the contribution of node s to node t."""
        names = [self.name(i) for i in range(len(self.nodes))]
        weights = np.zeros((len(names), len(names)))
        for edge in self.edges:
            weights[edge.target, edge.source] += edge.weight
        return Table(weights, names, names)

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(repr(self))
        edges = sorted(self.edges, key=lambda edge: -abs(edge.weight))[:k]
        rows = [(self.name(edge.source), self.name(edge.target), f"{edge.weight:+.4g}") for edge in edges]
        yield table(("from", "to", "weight"), rows, numbers=(2,))

    def name(self, node: int) -> str:
        """The name of a node: its component and its token."""
        one = self.nodes[node]
        if one.component.kind == "target":
            return f"target {self.target!r}"
        at = f" at {one.token} {self.tokens[one.token]!r}" if len(self.tokens) > 1 else ""
        return f"{one.component}{at}"

    def _writers(self) -> Mapping[str, Writer]:
        return {**super()._writers(), ".html": page_writer(self.payload, f"Graph of {self.target}")}

    def save(  # pyright: ignore[reportIncompatibleMethodOverride] -- it has another format
        self, path: str | Path, *, format: GraphFormat = "tensorlens"
    ) -> Path:
        """Write a file in the format of its suffix, whole or not at all.

        Args:
            path: A name that ends in ``.json`` or ``.html``.
            format: ``"tensorlens"``, which `load` reads, or ``"circuit-tracer"``: the JSON that circuit-tracer's page
                and Neuronpedia draw.
        """
        check_choice(format, "format", get_args(GraphFormat))
        if format == "tensorlens":
            return super().save(path)
        path = check_path(path)
        if path.suffix.lower() != ".json":
            raise InputError(f"A graph for circuit-tracer is a .json file; got {path.name!r}.")
        return write_whole(path, to_json(circuit_tracer_json(self)))

    def payload(self) -> dict[str, Any]:
        """The data of the page, as plain values."""
        nodes = [self._node_payload(i) for i in range(len(self.nodes))]
        edges = msgspec.to_builtins(self.edges)
        own = {key: value for key, value in self.meta.items() if key not in ("text", "offsets", "headline")}
        return {
            "title": self.headline,
            "target": self.target,
            "value": self.value,
            "tokens": list(self.tokens),
            "caption": [list(line) for line in caption_lines(str(own.pop("method", "tensor.components")), own, 1)],
            "graph": {"nodes": nodes, "edges": edges, "share": self.share},
            "components": None,
        }

    def _node_payload(self, i: int) -> dict[str, Any]:
        node = self.nodes[i]
        is_target = node.component.kind == "target"
        return msgspec.to_builtins(node) | {
            "name": f"target {self.target}" if is_target else str(node.component),
            "short": self.target if is_target else node.component.short,
            "kind": node.component.kind,
            "block": node.component.block,
            "column": node.component.column,
        }


def page_writer(payload: Callable[[], dict[str, Any]], title: str) -> Writer:
    """The text of an inside page; numbers that are not finite cannot be drawn."""

    def write(path: Path) -> None:
        try:
            text = inside_page(payload(), title)
        except ValueError as error:  # strict JSON
            raise InputError(
                f"Expected finite numbers to draw; this record contains others ({error}). Save it as .json instead."
            ) from error
        path.write_text(text, encoding="utf-8")

    return write


# Growing one ----------------------------------------------------------------------------------------------------------


def check_growth(share: float, max_nodes: int) -> None:
    """Refuse limits that no graph can reach."""
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
        raise InputError(f"`share` must be above 0 and at most 1; got {share!r:.60}.")
    check_whole(max_nodes, "max_nodes", 1)


def component_graph(asked: Explained, share: float, max_nodes: int, finer: Finer | None = None) -> ComponentGraph:
    """The graph of a target, as a record."""
    check_growth(share, max_nodes)
    n_encoder = asked.operator.recording.n_encoder_blocks
    if n_encoder and asked.operator.span.start >= n_encoder:
        raise MethodError("The graph of a decoder needs its encoder; got a range of blocks that begins after it.")
    run, meta = asked.run(finer), asked.meta
    grown = Growth(run).grow(share, max_nodes)
    if run.side_channel is not None:
        meta = meta | {"constants": f"{run.side_channel} also reads what earlier blocks left for it"}
    return grown.as_graph(replace(asked, meta=meta | run.error_shares), share, max_nodes)


@dataclass
class Growing:
    """A node while the graph grows: its value, the part of constants inside it, and the inflow so far."""

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
        """Find the components that something can flow into."""
        self._sources = dict(_sources(self.run))
        self._growing: list[Growing] = []
        self._places: dict[Key, int] = {}
        self._offered: dict[int, list[tuple[float, Key]]] = {}  # by node, the lightest first
        self._ahead: list[tuple[float, int]] = []  # the heaviest of each node
        self._at_a_time = fitting(8 * self.run.operator.input.nbytes, AT_A_TIME, self.run.operator.device)

    @property
    def nodes(self) -> list[Node]:
        """The nodes as they stand."""
        return [
            Node(
                component=one.key[0],
                token=one.key[1],
                value=one.value if one.is_open else one.given,
                constant=one.constant,
                cut=one.value - one.constant - one.kept if one.is_open else 0.0,
            )
            for one in self._growing
        ]

    def as_graph(self, asked: Explained, share: float, max_nodes: int) -> ComponentGraph:
        """The record of it."""
        return ComponentGraph(
            nodes=tuple(self.nodes),
            edges=tuple(self.edges),
            tokens=asked.tokens,
            target=asked.name,
            value=self.run.value,
            share=self.covered / self.magnitude if self.magnitude else 1.0,
            meta=asked.meta | {"asked_share": share, "max_nodes": max_nodes},
        )

    def grow(self, share: float, max_nodes: int) -> Growth:
        """Keep the heaviest edges until `share` of the magnitude into the nodes is covered, or no node may be added."""
        self._open_target()
        while self._ahead and self.covered < share * self.magnitude:
            check_cancelled()
            fresh: list[int] = []
            while self._ahead and len(fresh) < self._at_a_time and self.covered < share * self.magnitude:
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
        """Keep an edge; its source is opened next if it is new and something flows into it."""
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
        walk, head = self.run.from_target()
        key = Component(kind="target"), self.run.out_token
        self._places[key] = 0
        self._growing.append(Growing(key, self.run.value, is_open=True))
        rows = [*walk.all_the_way(self.run.stop - 1), Row(Component(kind="bias"), head[None])]
        self._offer([0], rows)

    def _open(self, places: Sequence[int]) -> None:
        """Pull each node's λ through its component alone, to the stream and down along it."""
        if not places:
            return
        joining = Joining()
        # Block by block from the last: for a long input only one block is in memory at a time.
        rows = sorted(enumerate(places), key=lambda pair: -self._sources[self._growing[pair[1]].key[0]].block)
        for row, place in rows:
            self._join(row, self._growing[place], joining)
        last = max(read.block for read in joining.stream)
        self._offer(places, list(Walk.from_zero(self.run, last, len(places), joining).all_the_way(last)))

    def _join(self, row: int, node: Growing, joining: Joining) -> None:
        """Value and constants of one node, and its cotangents where it reads the stream and the encoder's output."""
        run, (component, token) = self.run, node.key
        source = self._sources[component]
        block = run.block(source.block)
        if isinstance(source, ActiveFeature):
            chosen, node.value = self._of_feature(source, token)
        else:
            u = run.cotangents(block.n)[source.slot]
            here = slice(token - block.offset, token - block.offset + 1)
            chosen = block.at_token(u, token) if source.head is None else source.alone(u, here)
            if block.sums is None:
                node.value = float((block.to_tokens(chosen) * block.whole_write()).sum())
            else:
                node.value = float((chosen * block.values[source.slot]).sum())
        stream = block.entry if block.sums is None else block.sums[source.place].stream
        memory = None if block.is_encoder else run.memory
        ends = [stream, *([] if memory is None else [memory])]
        found = block.cotangents_at({source.slot: chosen[None]}, ends, (stream,))
        cotangent = found[stream][0]
        if block.sums is None:  # the block carries the state on
            cotangent = cotangent - block.handed_on(chosen)
        node.is_open, node.constant = True, node.value - float((cotangent * block.values[stream]).sum())
        if memory is not None:
            node.constant -= float((found[memory][0] * run.pieces.at_cuts[memory]).sum())
        joining.add(row, Read(block.n, source.place), cotangent, None if memory is None else found[memory][0])

    def _of_feature(self, feature: ActiveFeature, token: int) -> tuple[Tensor, float]:
        """The feature's row of the encoder times its effect per unit, where it reads; and its effect."""
        run = self.run
        block, wrote = run.block(feature.block), run.block(feature.component.block or 0)
        place = token - wrote.offset
        worth = wrote.to_tokens(run.cotangents(wrote.n)[feature.written])[0, place] @ feature.write
        chosen = torch.zeros(block.shape, dtype=worth.dtype, device=worth.device)
        chosen[0, place] = worth * feature.read
        chosen = block.from_tokens(chosen, torch.Size(block.specs[feature.slot].shape))
        return chosen, float(worth * feature.activation[place])

    def _offer(self, places: Sequence[int], rows: list[Row]) -> None:
        """Queue the edges into some nodes; the heaviest edge is chosen next."""
        scores = torch.stack([row.scores.detach().cpu() for row in rows], 1)  # (node, component, token)
        n_tokens = scores.shape[-1]
        # A row of (component · token) for each node, so that an edge is one index: divmod gives both back.
        for place, found in zip(places, scores.flatten(1), strict=True):
            self.magnitude += float(found.abs().sum())
            best = found.abs().topk(min(MOST_EDGES, int(found.count_nonzero()))).indices.flip(0)
            keys = [(rows[i // n_tokens].component, i % n_tokens) for i in best.tolist()]
            self._offered[place] = list(zip(found[best].tolist(), keys, strict=True))
            self._push(place)


def _sources(run: Pass) -> Iterator[tuple[Component, Part | ActiveFeature]]:
    """The components with incoming edges: heads, features, writes, and blocks whose parts cannot be told apart."""
    for block in reversed(run.downwards):
        if block.sums is None:
            name = Component(block=block.n, kind="block")
            yield name, Part(name, block.exit, Write(block.exit, ()), 0)
        for write, kind in block.writes:
            whole, *heads = [part for part in block.parts if part.write == write]
            features = features_of(block, write, kind)
            found = features.features if features is not None else heads or [whole]
            yield from ((one.component, one) for one in found)


# For other tools: the JSON of circuit-tracer, which its own page and Neuronpedia draw ---------------------------------

KINDS = {"embedding": "embedding", "target": "logit", "error": "mlp reconstruction error"}
"""circuit-tracer's names for kinds of nodes; every other component is a feature there."""


def circuit_tracer_json(graph: ComponentGraph) -> dict[str, Any]:
    """Metadata, parameters of the page, nodes and links of a graph, under circuit-tracer's names.

    A component is a node of its block's layer, numbered within it, with its own name as its label. Constants and the
    part that was cut off are in `clerp` too, since the format has no place for them. `influence` is the share of all
    effects that a node and the stronger ones have together: pages hide nodes beyond a threshold of it.
    """
    blocks = [one.component.block for one in graph.nodes if one.component.block is not None]
    end = max(blocks, default=0) + 2  # layers count from 0, and logits are above the last layer
    numbers = {one: n for n, one in enumerate(dict.fromkeys(node.component for node in graph.nodes))}
    ids = [_id(node.component, node.token, numbers[node.component], end) for node in graph.nodes]
    name = str(graph.meta.get("model") or "model")
    digest = hashlib.sha256(f"{name} {graph.target} {' '.join(graph.tokens)}".encode()).hexdigest()[:8]
    order = sorted(range(len(graph.nodes)), key=lambda i: -abs(graph.nodes[i].value))
    sums = list(accumulate(abs(graph.nodes[i].value) for i in order))
    influence = {i: one / (sums[-1] or 1.0) for i, one in zip(order, sums, strict=True)}
    # Its page drops nodes that occur at more than two thirds of the tokens: with a single token, all of them.
    tokens = [*graph.tokens, ""] if len(graph.tokens) == 1 else list(graph.tokens)
    return {
        "metadata": {
            "slug": f"tensorlens-{digest}",
            "scan": name,
            "transcoder_list": [],
            "prompt_tokens": tokens,
            "prompt": "".join(graph.tokens),
            "node_threshold": 1.0,
            "schema_version": 1,
            "generator": {"name": "tensorlens", "version": str((graph.meta.get("versions") or {}).get("tensorlens"))},
        },
        "qParams": {"pinnedIds": ids[:1], "supernodes": [], "linkType": "both", "clickedId": ids[0], "sg_pos": ""},
        "nodes": [
            {
                "node_id": id_,
                "feature": numbers[node.component],
                "layer": id_.partition("_")[0],
                "ctx_idx": node.token,
                "feature_type": KINDS.get(node.component.kind, "cross layer transcoder"),
                "token_prob": 0.0,
                "is_target_logit": node.component.kind == "target",
                "run_idx": 0,
                "reverse_ctx_idx": len(tokens) - 1 - node.token,
                "jsNodeId": f"{id_}-0",
                "clerp": _label(graph, place),
                "influence": influence[place],
                "activation": node.value,
            }
            for place, (node, id_) in enumerate(zip(graph.nodes, ids, strict=True))
        ],
        "links": [{"source": ids[one.source], "target": ids[one.target], "weight": one.weight} for one in graph.edges],
    }


def _id(component: Component, token: int, number: int, end: int) -> str:
    if component.kind == "embedding":
        return f"E_{number}_{token}"
    layer = end if component.kind == "target" or component.block is None else component.block
    return f"{layer}_{number}_{token}"


def _label(graph: ComponentGraph, place: int) -> str:
    node = graph.nodes[place]
    if node.component.kind == "target":
        chance = (graph.meta.get("why") or {}).get("probability")  # pages read it from here
        p = f"{chance:.3f}" if isinstance(chance, float) else "–"
        return f'Output "{graph.target}" (p={p}), {graph.value:.4g}'
    rest = [f"{name} {part:+.3g}" for name, part in (("constant", node.constant), ("cut", node.cut)) if part]
    return ", ".join([str(node.component), *rest])
