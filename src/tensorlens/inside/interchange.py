"""Graphs in the format of other tools: the JSON of circuit-tracer, which its own page and Neuronpedia draw."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from tensorlens.inside.stream import Component

if TYPE_CHECKING:
    from tensorlens.inside.graph import ComponentGraph

KINDS = {"embedding": "embedding", "target": "logit", "error": "mlp reconstruction error"}
"""circuit-tracer's names for kinds of nodes; every other component is a feature there."""


def circuit_tracer_json(graph: ComponentGraph) -> dict[str, Any]:
    """Metadata, parameters of the page, nodes and links of a graph, under circuit-tracer's names.

    A component is a node of its block's layer, numbered within it, with its own name as its label. Constants and the
    part that was cut off are in `clerp` too, since the format has no place for them.
    """
    blocks = [one.component.block for one in graph.nodes if one.component.block is not None]
    end = max(blocks, default=0) + 2  # layers count from 0, and logits are above the last layer
    numbers = {one: n for n, one in enumerate(dict.fromkeys(node.component for node in graph.nodes))}
    ids = [_id(node.component, node.token, numbers[node.component], end) for node in graph.nodes]
    name = str(graph.meta.get("model") or "model")
    digest = hashlib.sha256(f"{name} {graph.target} {' '.join(graph.tokens)}".encode()).hexdigest()[:8]
    flows = [abs(node.value) for node in graph.nodes]
    largest = max(flows, default=0.0) or 1.0
    return {
        "metadata": {
            "slug": f"tensorlens-{digest}",
            "scan": name,
            "transcoder_list": [],
            "prompt_tokens": list(graph.tokens),
            "prompt": "".join(graph.tokens),
            "node_threshold": graph.share,
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
                "reverse_ctx_idx": len(graph.tokens) - 1 - node.token,
                "jsNodeId": f"{id_}-0",
                "clerp": _label(graph, place),
                "influence": flow / largest,
                "activation": node.value,
            }
            for place, (node, id_, flow) in enumerate(zip(graph.nodes, ids, flows, strict=True))
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
        return f'Output "{graph.target}" = {graph.value:.4g}'
    rest = [f"{name} {part:+.3g}" for name, part in (("constant", node.constant), ("cut", node.cut)) if part]
    return ", ".join([str(node.component), *rest])
