"""`ComponentMap`: how much of a target each head, feed-forward and bias carries at every token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import msgspec
import torch
from jaxtyping import Float
from rich.console import RenderableType
from torch import Tensor

from tensorlens.errors import InputError, check_choice, check_whole
from tensorlens.inside.block import Finer
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Explained, Pass
from tensorlens.inside.walk import Row, whole_row, write_rows
from tensorlens.records import Record, as_array
from tensorlens.views.captions import headline_of
from tensorlens.views.printing import heading, table
from tensorlens.views.table import Table

Effect = Literal["total", "direct"]


class TopComponent(NamedTuple):
    """A component with a large score: the score over all tokens, and the token with the largest part of it."""

    component: Component
    score: float
    token: int


class ComponentMap(Record, frozen=True, kw_only=True, tag="tensorlens.component_map/2"):
    r"""How much of a target each component carries at every token.

    Total effects $e_c = ⟨\partial t/\partial y_c, y_c⟩$ count all paths from a component to the target; a path through
    several components counts in each; at every depth, the flow and the biases after it sum to the target.
    Direct effects count the path along the stream alone and sum to the target.

    Attributes:
        scores: One row per component, one column per token.
        labels: The component of each row.
        tokens: A label for each token.
        effect: ``"total"`` or ``"direct"``.
        target: What is explained.
        value: The number that is explained.
        depths: The flow $⟨λ^n_j, X^n_j⟩$: row n for the state that enters block n, the last row for the final state.
        meta: Model, versions, rules, blocks, output.
    """

    scores: Float[Tensor, "component token"]
    labels: tuple[Component, ...]
    tokens: tuple[str, ...]
    effect: Effect
    target: str
    value: float
    depths: Float[Tensor, "depth token"]
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    loadable: ClassVar[tuple[str, ...]] = (".json", ".safetensors")

    def __post_init__(self) -> None:
        """Check shapes against labels, and labels against the range of blocks."""
        super().__post_init__()
        expected = (len(self.labels), len(self.tokens))
        if tuple(self.scores.shape) != expected or self.depths.shape[1:] != self.scores.shape[1:] or not self.tokens:
            raise InputError(
                f"Expected scores of shape {expected}, at least one token, and a flow with as many columns; got "
                f"{tuple(self.scores.shape)} and {tuple(self.depths.shape)}."
            )
        heads = [label for label in self.labels if label.head is not None]
        if any(label.block not in self._blocks or (label.head or 0) >= len(self.labels) for label in heads):
            raise InputError(f"Expected heads of the blocks {self._blocks}, counted from 0; got different ones.")

    @property
    def _blocks(self) -> range:
        """The number of blocks of the flow: one fewer than its depths."""
        blocks = self.meta.get("blocks")
        first = blocks[0] if isinstance(blocks, list) and blocks and type(blocks[0]) is int else 0
        return range(first, first + len(self.depths) - 1)

    def __repr__(self) -> str:
        """One line: effects on the target."""
        return (
            f"ComponentMap({self.effect} effects of {len(self.labels)} components × {len(self.tokens)} tokens on "
            f"{self.target!r} = {self.value:.4g})"
        )

    @property
    def headline(self) -> str:
        """The question that the map answers, such as ``Why “ Paris” (70 %)?``."""
        return headline_of(self.meta, self.target)

    def _table(self) -> Table:
        return Table(as_array(self.scores), [*map(str, self.labels)], self.tokens)

    def flow(self) -> Float[Tensor, "depth token"]:
        """The part of the target at each depth and token; for total effects, row 0 is the In+Class map."""
        return self.depths.clone()

    def heads(self) -> Float[Tensor, "block head"]:
        """Each head's score over all tokens; NaN for heads that a block does not have, or that cannot be told apart."""
        found = [
            (label, row) for label, row in zip(self.labels, self.scores.sum(1), strict=True) if label.head is not None
        ]
        size = max((label.head for label, _ in found if label.head is not None), default=-1) + 1
        table = torch.full((len(self._blocks), size), float("nan"), dtype=self.scores.dtype)
        for label, score in found:
            assert label.block is not None and label.head is not None, "a head is in a block"
            place = label.block - self._blocks.start, label.head
            table[place] = score + torch.nan_to_num(table[place])
        return table

    def top(self, k: int = 10) -> list[TopComponent]:
        """The components with the largest scores over all tokens, of either sign."""
        k = check_whole(k, "k", 1)
        sums = self.scores.sum(1)
        best = sums.abs().topk(min(k, len(sums))).indices.tolist()
        return [TopComponent(self.labels[i], float(sums[i]), int(self.scores[i].abs().argmax())) for i in best]

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(f"{self.effect} effects on {self.target!r} = {self.value:.4g}")
        rows = [(str(one), f"{score:+.4g}", f"{token} {self.tokens[token]!r}") for one, score, token in self.top(k)]
        yield table(("component", "score", "most at"), rows, numbers=(1,))


# Finding them ---------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Scores by component, and the flow (depth, token)."""

    rows: list[Row] = field(default_factory=list)
    flow: list[Tensor] = field(default_factory=list)

    def as_map(self, effect: Effect, run: Pass, asked: Explained) -> ComponentMap:
        """The record of them."""
        return ComponentMap(
            scores=torch.stack([row.scores for row in self.rows]),
            labels=tuple(row.component for row in self.rows),
            tokens=asked.tokens,
            effect=effect,
            target=asked.name,
            value=run.value,
            depths=torch.stack(self.flow),
            meta=asked.meta,
        )


def component_map(asked: Explained, effect: Effect, finer: Finer | None = None) -> ComponentMap:
    """All components of a target, as a record."""
    run = asked.run(finer)
    found, meta = find_components(run, effect), asked.meta
    if run.side_channel is not None:
        meta = meta | {"flow": f"of the state alone: {run.side_channel} also reads what earlier blocks left for it"}
    return found.as_map(effect, run, replace(asked, meta=meta | run.error_shares))


def find_components(run: Pass, effect: Effect) -> Found:
    """All components of a pass.

    Args:
        run: The pass.
        effect: ``"total"`` by all paths to the target, ``"direct"`` by the stream alone.
    """
    check_choice(effect, "effect", get_args(Effect))
    return total(run) if effect == "total" else direct(run)


def total(run: Pass) -> Found:
    r"""$e_c = ⟨\partial t/\partial y_c, y_c⟩$ for every component, and $⟨λ^n_j, X^n_j⟩$ for every depth and token."""
    flow, groups = [run.reached()], list[list[Row]]()
    for block in run.downwards:
        at = {slot: u[None] for slot, u in run.cotangents(block.n).items()}
        if block.sums is None:
            rows = [whole_row(block, at[block.exit])]
        else:
            rows = [row for write, kind in block.writes for row in write_rows(block, write, kind, at)]
        groups.append([Row(row.component, row.scores[0]) for row in rows])
        flow.append(carried(run, block.n))
    rows = [row for group in reversed(groups) for row in group]
    return Found([Row(Component(kind="embedding"), flow[-1]), *rows], flow[::-1])


def carried(run: Pass, n: int) -> Tensor:
    """The flow at depth n: of the state that enters block n, and with an encoder of the states beside it."""
    waiting, values, parts = run.waiting(n), run.pieces.at_cuts, []
    for slot in run.recording.slots[n]:
        u = waiting.get(slot, torch.zeros_like(values[slot]))
        parts.append((u * values[slot])[0].sum(-1))
    return torch.cat([part.to(parts[-1].device) for part in parts])


# Direct effects -------------------------------------------------------------------------------------------------------


def direct(run: Pass) -> Found:
    r"""$d_c = ⟨λʳ, y_c⟩$ with λʳ pulled along the stream alone, past all components.

    Constants on the stream itself (of norms after a sum, the final norm, the unembedding) count as biases:
    between two places of the stream $s' = A s + c$, they give $⟨λ', s'⟩ - ⟨λ, s⟩$; those of the head stand at the
    output explained. All scores sum to the target.
    """
    walk, head = run.from_target()
    flow, groups = [run.reached()], list[list[Row]]()
    for block in run.downwards:
        if block.n + 1 == run.recording.n_encoder_blocks and block.n + 1 < run.stop:
            break  # the encoder is read by components of the decoder only
        groups.append(walk.block(block.n))
        flow.append(walk.carried(block.n)[0])
    n_missing = run.stop - run.start + 1 - len(flow)
    flow += [flow[-1]] * n_missing  # depths within the encoder: the decoder's embedding is all that crosses
    rows = [Row(row.component, row.scores[0]) for group in reversed(groups) for row in group]
    return Found([Row(Component(kind="embedding"), flow[-1]), *rows, Row(Component(kind="bias"), head)], flow[::-1])
