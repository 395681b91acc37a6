"""`ComponentGraph`: which component, at which token, gave how much to which other. A record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorlens.inside.component_map import Component
from tensorlens.inside.record_files import read_document, reading, save_record
from tensorlens.strict_json import to_json
from tensorlens.views.page import inside_page
from tensorlens.views.record import caption_lines

FORMAT = "tensorlens.component_graph/1"


@dataclass(frozen=True, kw_only=True)
class Node:
    r"""A component at one token.

    Attributes:
        component: Which one; of kind ``"target"`` for the target itself.
        token: Where.
        value: Its total effect $e_c = ⟨λ_c, y_c⟩$ at this token; of the embedding and of biases, into which nothing
            flows, what they gave to the nodes of the graph.
        constant: What biases inside it give of that.
        cut: What the edges that were left out give: the value less the constant and the edges into it.
    """

    component: Component
    token: int
    value: float
    constant: float = 0.0
    cut: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Edge:
    """What one node gave to another, by the residual stream alone. Numbers count nodes."""

    source: int
    target: int
    weight: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ComponentGraph:
    """What flowed from the input to a target, and by which components.

    For every node that something flows into: the edges into it, its constant and its cut sum to its value.

    Attributes:
        nodes: The first is the target.
        edges: In the order they were kept, the heaviest first as far as they were known.
        tokens: A label for each token.
        target: What is explained.
        value: The number that is explained.
        share: The part of the magnitude of all that flows into the nodes that the edges carry.
        meta: Model, versions, rules, blocks, output; the share and the number of nodes that were asked for.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    tokens: tuple[str, ...]
    target: str
    value: float
    share: float
    meta: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: how much of what."""
        size = f"{len(self.nodes)} nodes, {len(self.edges)} edges, {self.share:.0%} of what flows into them"
        return f"ComponentGraph({self.target!r} = {self.value:.4g}: {size})"

    def show(self, console: Console | None = None, k: int = 10) -> None:
        """Print the heaviest edges; without a console, to standard output."""
        table = Table("from", "to", "weight", box=None, pad_edge=False)
        table.columns[2].justify = "right"
        for edge in sorted(self.edges, key=lambda edge: -abs(edge.weight))[:k]:
            table.add_row(Text(self.name(edge.source)), Text(self.name(edge.target)), f"{edge.weight:+.4g}")
        console = console or Console(highlight=False)
        console.print(Text(repr(self), style="bold"))
        console.print(table)

    def name(self, node: int) -> str:
        """What a node is called: its component and its token."""
        one = self.nodes[node]
        if one.component.kind == "target":
            return f"target {self.target!r}"
        return f"{one.component} at {one.token} {self.tokens[one.token]!r}"

    # Files ------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write a .json file, or a .html page that needs nothing else; whole or not at all."""
        page = f"Graph of {self.target}"
        contents = {".json": lambda: to_json(self.as_dict()), ".html": lambda: inside_page(self.payload(), page)}
        return save_record(path, contents)

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file holds."""
        return {
            "format": FORMAT,
            "nodes": [asdict(node) for node in self.nodes],
            "edges": [[edge.source, edge.target, edge.weight] for edge in self.edges],
            "tokens": list(self.tokens),
            "target": self.target,
            "value": self.value,
            "share": self.share,
            "meta": self.meta,
        }

    def payload(self) -> dict[str, Any]:
        """What the page takes, as plain values."""
        nodes = [self._node_payload(i) for i in range(len(self.nodes))]
        edges = [[edge.source, edge.target, edge.weight] for edge in self.edges]
        own = {key: value for key, value in self.meta.items() if key not in ("text", "offsets")}
        return {
            "title": f"Graph of {self.target!r}",
            "target": self.target,
            "value": self.value,
            "tokens": list(self.tokens),
            "caption": [list(line) for line in caption_lines("tensor.components", own, 1)],
            "graph": {"nodes": nodes, "edges": edges, "share": self.share},
            "components": None,
        }

    def _node_payload(self, i: int) -> dict[str, Any]:
        node = self.nodes[i]
        is_target = node.component.kind == "target"
        return {
            "name": f"target {self.target}" if is_target else str(node.component),
            "short": self.target if is_target else node.component.short,
            "kind": node.component.kind,
            "block": node.component.block,
            "column": node.component.column,
            "token": node.token,
            "value": node.value,
            "constant": node.constant,
            "cut": node.cut,
        }

    @classmethod
    def load(cls, path: str | Path) -> ComponentGraph:
        """Read a .json file of `save`; `InputError` for a foreign or damaged one."""
        path = Path(path)
        with reading(cls, FORMAT, path):
            found = read_document(path, FORMAT)
            nodes = tuple(Node(**node | {"component": Component(**node["component"])}) for node in found.pop("nodes"))
            edges = tuple(Edge(source=s, target=t, weight=w) for s, t, w in found.pop("edges"))
            return cls(nodes=nodes, edges=edges, tokens=tuple(found.pop("tokens")), **found)
