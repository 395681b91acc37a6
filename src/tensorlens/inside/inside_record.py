r"""`Inside`: heads, feed-forwards, flow and graph of one target, as one record and one page.

The amount that a head read from token j, summed over the tokens where it wrote:

    r_{h,j} = Σ_i A_{h,ij} ⟨λ_{h,i}, v_{h,j}⟩,   Σ_j r_{h,j} = e_h

The strongest reading of a head is the pair of tokens with the largest $|A_{h,ij}⟨λ_{h,i}, v_{h,j}⟩|$: at i it
attended to j, and what it read there moved the target most. The attention score of this look says why. A token that
could attend to one token only, such as the first one of a causal model, had no choice and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec
import torch
from jaxtyping import Float
from msgspec.structs import replace
from rich.console import RenderableType
from torch import Tensor

from tensorlens.errors import InputError, MethodError
from tensorlens.inside.components import ComponentMap, Effect, find_components
from tensorlens.inside.graph import ComponentGraph, Growth, check_growth, page_writer
from tensorlens.inside.score import By, score_map
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Explained, Pass
from tensorlens.maps.groups import find_words
from tensorlens.maps.token_map import TokenMap
from tensorlens.operators.attention_matrices import mixing
from tensorlens.operators.operator import FrozenOperator
from tensorlens.records import Index, Record, Writer
from tensorlens.views.table import Table

MOST_READ = 1024
"""Largest number of tokens for which the record lists what heads read, which needs their attention matrices."""


MOST_ROWS = 16
"""How many rows and columns of a pair map a picture shows; the others are summed into one."""


class Look(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a head attended: from which token to which, and with what weight."""

    query: Index
    key: Index
    attention: float


class Why(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attention score of a look, over pairs of tokens and over pairs of components."""

    by_token: TokenMap
    by_component: TokenMap

    def payload(self) -> dict[str, Any]:
        """Both as small tables that sum to the score."""
        score = float(self.by_token.scores.sum())
        return {"score": score, "token": condensed(self.by_token), "component": condensed(self.by_component)}


class HeadRead(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """One head of one input.

    Attributes:
        head: The head.
        read: What it read from each token, summed over the tokens where it wrote.
        look: Where it attended when its reading moved the target most.
        why: Why it attended there; None for all but the strongest heads.
    """

    head: Component
    read: Float[Tensor, " token"]
    look: Look
    why: Why | None = None


class Inside(Record, frozen=True, kw_only=True, tag="tensorlens.inside/2"):
    """The inside of a model at one input, for one target.

    Attributes:
        total: Total effects of all components.
        direct: Direct effects of all components.
        graph: Nodes and edges grown from the target.
        heads: What each head read, and where it attended; empty if heads cannot be told apart or inputs are long.
    """

    total: ComponentMap
    direct: ComponentMap
    graph: ComponentGraph
    heads: tuple[HeadRead, ...] = ()

    def __post_init__(self) -> None:
        """Check that all parts are about the same tokens."""
        super().__post_init__()
        n_tokens = len(self.total.tokens)
        sizes = {len(self.direct.tokens), len(self.graph.tokens), *(len(one.read) for one in self.heads)}
        if sizes != {n_tokens} or any(max(one.look.query, one.look.key) >= n_tokens for one in self.heads):
            raise InputError(f"Expected components, graph and heads of the same {n_tokens} tokens; got different ones.")

    def __repr__(self) -> str:
        """One line: the target and its parts."""
        size = f"{len(self.total.labels)} components, {len(self.graph.nodes)} nodes, {len(self.heads)} heads"
        return f"Inside({self.total.target!r} = {self.total.value:.4g}: {size})"

    @property
    def headline(self) -> str:
        """The question that it answers, such as ``Why “ Paris”?``."""
        return self.total.headline

    def _table(self) -> Table:
        """Total effects of all components."""
        return self.total._table()

    @property
    def reads(self) -> dict[Component, Tensor]:
        """For each head, what it read from each token."""
        return {one.head: one.read for one in self.heads}

    @property
    def looks(self) -> dict[Component, Look]:
        """For each of these heads, where it attended when its reading moved the target most."""
        return {one.head: one.look for one in self.heads}

    @property
    def whys(self) -> dict[Component, Why]:
        """For the strongest heads, why each attended there."""
        return {one.head: one.why for one in self.heads if one.why is not None}

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield from self.total._printed(k)
        yield from self.graph._printed(k)

    def _writers(self) -> Mapping[str, Writer]:
        return {".html": page_writer(self.payload, f"Inside: {self.total.target}"), **super()._writers()}

    def payload(self) -> dict[str, Any]:
        """The data of the page, as plain values."""
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
        heads = {one.head: one for one in self.heads}
        details = [[_detail(cells.get((n, column)), self.total, sums, heads) for column in columns] for n in blocks]
        return {
            **self.graph.payload(),
            "title": self.headline,
            "words": [[word.label, word.start, word.stop] for word in find_words(self.total.tokens, self.total.meta)],
            "components": {
                "blocks": blocks,
                "columns": columns,
                **tables,
                "flow": self.total.flow().tolist(),
                "details": details,
            },
        }


def _detail(
    label: Component | None,
    total: ComponentMap,
    sums: dict[str, dict[Component, float]],
    heads: dict[Component, HeadRead],
) -> dict[str, Any] | None:
    """The data of one component on the page."""
    if label is None:
        return None
    told: dict[str, Any] = {"wrote": total.scores[total.labels.index(label)].tolist(), "read": None, "look": None}
    if label in heads:
        one = heads[label]
        look = msgspec.to_builtins(one.look) | {"why": None if one.why is None else one.why.payload()}
        told |= {"read": one.read.tolist(), "look": look}
    return told | {effect: values.get(label, 0.0) for effect, values in sums.items()}


def _columns(found: ComponentMap) -> list[str]:
    """Heads by number, then all others in order."""
    columns = dict.fromkeys(column for label in found.labels if (column := label.column) is not None)
    heads = sorted((column for column in columns if column.isdigit()), key=int)
    return heads + [column for column in columns if not column.isdigit()]


# Looking -------------------------------------------------------------------------------------------------------------


def look_inside(asked: Explained, share: float, max_nodes: int, n_whys: int) -> Inside:
    """Everything about one target, and why the strongest heads attended where they did."""
    check_growth(share, max_nodes)
    run = asked.run()
    totals, directs = (find_components(run, effect).as_map(effect, run, asked) for effect in get_args(Effect))
    graph = Growth(run).grow(share, max_nodes).as_graph(asked, share, max_nodes)
    heads = head_reads(run)
    worth = dict(zip(totals.labels, totals.scores.sum(1).abs().tolist(), strict=True))
    first = {one.head for one in sorted(heads, key=lambda one: -worth[one.head])[:n_whys]}
    told = [
        replace(one, why=why(asked.operator, one.head, one.look, asked.tokens)) if one.head in first else one
        for one in heads
    ]
    return Inside(total=totals, direct=directs, graph=graph, heads=tuple(told))


def head_reads(run: Pass) -> list[HeadRead]:
    """The amount that each head read from each token, summed over the tokens where it wrote; and its strongest look."""
    if run.n_tokens > MOST_READ or run.recording.n_encoder_blocks or run.operator.heads or run.start:
        return []
    found: list[HeadRead] = []
    for block in run.downwards:
        try:
            mixed = mixing(run.recording, block.n)
        except MethodError:
            return []
        mixture = next((block.heads_of(write) for write, kind in block.writes if kind == "attention"), None)
        if mixture is None:
            continue
        cotangent = run.cotangents(block.n)[mixture.slot].flatten(0, -3)  # (head, out_token, channel)
        by_pair = mixed.attention * torch.einsum("hic,hjc->hij", cotangent, mixed.values)  # (head, out_token, in_token)
        has_choice = (mixed.attention > 0).sum(-1, keepdim=True) > 1  # (head, out_token, 1)
        looks = by_pair.abs() * (has_choice if has_choice.any() else 1)
        for head, (pairs, sizes) in enumerate(zip(by_pair.cpu(), looks.cpu(), strict=True)):
            label = Component(block=block.n, kind="attention head", head=head)
            i, j = divmod(int(sizes.argmax()), pairs.shape[1])
            look = Look(i, j, float(mixed.attention[head, i, j]))
            found.append(HeadRead(head=label, read=pairs.sum(0), look=look))
    return sorted(found, key=lambda one: (one.head.block, one.head.head))


def why(operator: FrozenOperator, head: Component, look: Look, tokens: tuple[str, ...]) -> Why | None:
    """The pair maps of one look; None if queries and keys cannot be followed."""
    asked: Any = operator, (head.block or 0) - operator.span.start, head.head, look.query, look.key
    try:
        return Why(*(score_map(*asked, by=by, tokens=tokens, meta={}) for by in get_args(By)))
    except (MethodError, InputError):
        return None


def condensed(found: TokenMap) -> dict[str, Any]:
    """The strongest rows and columns in their order, and all others as one; empty rows are left out."""
    scores, names = found.scores, {}
    for axis, labels in enumerate((found.out_tokens, found.in_tokens)):
        weight = found.scores.sum(1 - axis).abs()  # its sum over the other side
        is_named = found.meta.get("by") == "component"
        called = [name if is_named or name == "bias" else f"{i} {name}" for i, name in enumerate(labels)]
        n_there = int(found.scores.abs().sum(1 - axis).count_nonzero())
        kept = sorted(weight.topk(min(n_there, MOST_ROWS)).indices.tolist())
        rest = [i for i in range(len(labels)) if i not in set(kept)]
        names[axis] = [called[i] for i in kept] + ([f"{n_there - MOST_ROWS} others"] if n_there > MOST_ROWS else [])
        parts = [scores.index_select(axis, torch.tensor(kept, dtype=torch.long))]
        if n_there > MOST_ROWS:
            parts.append(scores.index_select(axis, torch.tensor(rest)).sum(axis, keepdim=True))
        scores = torch.cat(parts, axis)
    return {"rows": names[0], "columns": names[1], "cells": scores.tolist()}
