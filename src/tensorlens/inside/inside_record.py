r"""`Inside`: heads, feed-forwards, flow and graph of one target, together, as a record and as a page.

What a head read of token j, over all tokens where it wrote:

    r_{h,j} = Σ_i A_{h,ij} ⟨λ_{h,i}, v_{h,j}⟩,   Σ_j r_{h,j} = e_h
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.inside.component_graph import ComponentGraph
from tensorlens.inside.component_map import Component, ComponentMap
from tensorlens.inside.components import Effect, find
from tensorlens.inside.graph import Growth, check_growth
from tensorlens.inside.looks import Look, Why, strongest, why
from tensorlens.inside.record_files import save_record
from tensorlens.inside.target import Explained, Pass
from tensorlens.operators.attention_matrices import mixing
from tensorlens.strict_json import to_json
from tensorlens.views.page import inside_page

FORMAT = "tensorlens.inside/1"
MOST_READ = 1024
"""Up to how many tokens it is said what heads read: that needs their attention matrices."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inside:
    """The inside of a model at one input, for one target.

    Attributes:
        total: Total effects of all components.
        direct: Direct effects of all components.
        graph: Nodes and edges grown from the target.
        reads: For each head, what it read of each token; none where attention cannot be told apart, or is too large.
        looks: For each of these heads, where it looked when it read what moved the target most.
        whys: For the strongest of them, why it looked there.
    """

    total: ComponentMap
    direct: ComponentMap
    graph: ComponentGraph
    reads: dict[Component, Tensor]
    looks: dict[Component, Look] = field(default_factory=dict)
    whys: dict[Component, Why] = field(default_factory=dict)

    def show(self, console: Console | None = None, k: int = 10) -> None:
        """Print the strongest components and the heaviest edges; without a console, to standard output."""
        self.total.show(console, k)
        self.graph.show(console, k)

    def save(self, path: str | Path) -> Path:
        """Write a .html page that needs nothing else, or a .json file; whole or not at all."""
        page = f"Inside: {self.total.target}"
        contents = {".html": lambda: inside_page(self.payload(), page), ".json": lambda: to_json(self.as_dict())}
        return save_record(path, contents)

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file holds: the three records; by the names of heads what they read, where they looked, why."""
        records = {name: getattr(self, name).as_dict() for name in ("total", "direct", "graph")}
        reads = {str(head): row.tolist() for head, row in self.reads.items()}
        return {
            "format": FORMAT,
            **records,
            "reads": reads,
            "looks": {str(head): self._look(head) for head in self.looks},
        }

    def payload(self) -> dict[str, Any]:
        """What the page takes, as plain values."""
        blocks = sorted({label.block for label in self.total.labels if label.block is not None})
        columns = _columns(self.total)
        cells = {(label.block, label.column): label for label in self.total.labels if label.column is not None}
        sums = {
            effect: dict(zip(found.labels, found.scores.sum(1).tolist(), strict=True))
            for effect, found in (("total", self.total), ("direct", self.direct))
        }
        tables = {
            effect: [[values.get(cells[n, c], 0.0) if (n, c) in cells else None for c in columns] for n in blocks]
            for effect, values in sums.items()
        }
        details = [[self._detail(cells.get((n, column)), sums) for column in columns] for n in blocks]
        return {
            **self.graph.payload(),
            "title": f"Inside {self.total.meta.get('model') or 'the model'}",
            "components": {
                "blocks": blocks,
                "columns": columns,
                **tables,
                "flow": self.total.flow().tolist(),
                "details": details,
            },
        }

    def _detail(self, label: Component | None, sums: dict[str, dict[Component, float]]) -> dict[str, Any] | None:
        if label is None:
            return None
        wrote = self.total.scores[self.total.labels.index(label)].tolist()
        read = self.reads[label].tolist() if label in self.reads else None
        told = {"wrote": wrote, "read": read, "look": self._look(label)}
        return told | {effect: values.get(label, 0.0) for effect, values in sums.items()}

    def _look(self, label: Component) -> dict[str, Any] | None:
        look = self.looks.get(label)
        if look is None:
            return None
        return look._asdict() | {"why": self.whys[label].payload() if label in self.whys else None}


def _columns(found: ComponentMap) -> list[str]:
    """Heads by number, then the others as they come."""
    columns = dict.fromkeys(column for label in found.labels if (column := label.column) is not None)
    heads = sorted((column for column in columns if column.isdigit()), key=int)
    return heads + [column for column in columns if not column.isdigit()]


# Looking -------------------------------------------------------------------------------------------------------------


def look_inside(asked: Explained, share: float, max_nodes: int, n_whys: int) -> Inside:
    """Everything about one target, and why the strongest heads looked where they did."""
    check_growth(share, max_nodes)
    run = Pass(asked.operator, asked.weights, asked.out_token)
    totals, directs = (find(run, effect).as_map(effect, run, asked) for effect in get_args(Effect))
    graph = Growth(run).grow(share, max_nodes).as_graph(asked, share, max_nodes)
    reads, looks = head_reads(run)
    worth = dict(zip(totals.labels, totals.scores.sum(1).abs().tolist(), strict=True))
    first = sorted(looks, key=lambda head: -worth[head])[:n_whys]
    found = {head: why(asked.operator, head, looks[head], asked.tokens) for head in first}
    whys = {head: one for head, one in found.items() if one is not None}
    return Inside(total=totals, direct=directs, graph=graph, reads=reads, looks=looks, whys=whys)


def head_reads(run: Pass) -> tuple[dict[Component, Tensor], dict[Component, Look]]:
    """What each head read of each token, over all tokens where it wrote; and where it looked for most of it."""
    if run.n_tokens > MOST_READ or run.recording.n_encoder_blocks or run.operator.heads or run.start:
        return {}, {}
    found, looks = {}, {}
    for block in run.downwards:
        try:
            mixed = mixing(run.recording, block.n)
        except MethodError:
            return {}, {}
        mixture = next((block.heads_of(write) for write, kind in block.writes if kind == "attention"), None)
        if mixture is None:
            continue
        cotangent = run.cotangents(block.n)[mixture.slot].flatten(0, -3)
        by_pair = mixed.attention * torch.einsum("hic,hjc->hij", cotangent, mixed.values)
        for head, pairs in enumerate(by_pair.cpu()):
            label = Component(block=block.n, kind="attention head", head=head)
            found[label] = pairs.sum(0)
            looks[label] = strongest(pairs, mixed.attention[head])
    return _in_order(found), _in_order(looks)


def _in_order(found: dict[Component, Any]) -> dict[Component, Any]:
    return dict(sorted(found.items(), key=lambda item: (item[0].block, item[0].head)))
