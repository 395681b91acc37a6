"""Components of a target: what each head, feed-forward and bias carries of it, at every token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.inside.block import Finer
from tensorlens.inside.component_map import Component, ComponentMap
from tensorlens.inside.target import Explained, Pass
from tensorlens.inside.walk import Row, Walk, whole_row, write_rows

Effect = Literal["total", "direct"]


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
    run = Pass(asked.operator, asked.weights, asked.out_token, finer)
    found, meta = find(run, effect), asked.meta
    if run.side_channel is not None:
        meta = meta | {"flow": f"of the state alone: {run.side_channel} also reads what earlier blocks left for it"}
    return found.as_map(effect, run, replace(asked, meta=meta))


def find(run: Pass, effect: Effect) -> Found:
    """All components of a pass.

    Args:
        run: The pass.
        effect: ``"total"`` by all paths to the target, ``"direct"`` by the stream alone.
    """
    if effect not in ("total", "direct"):
        raise InputError(f"`effect` must be 'total' or 'direct'; got {effect!r}.")
    return total(run) if effect == "total" else direct(run)


def total(run: Pass) -> Found:
    r"""$e_c = ⟨\partial t/\partial y_c, y_c⟩$ for every component, and $⟨λ^n_j, X^n_j⟩$ for every depth and token."""
    flow, groups = [_after_last(run)], list[list[Row]]()
    for block in run.downwards:
        at = {slot: u[None] for slot, u in run.cotangents(block.n).items()}
        if block.sums is None:
            rows = [whole_row(block, at[block.exit])]
        else:
            rows = [row for write, kind in block.writes for row in write_rows(block, write, kind, at)]
        groups.append([Row(row.component, row.scores[0]) for row in rows])
        flow.append(_carried(run, block.n))
    rows = [row for group in reversed(groups) for row in group]
    return Found([Row(Component(kind="embedding"), flow[-1]), *rows], flow[::-1])


def _carried(run: Pass, n: int) -> Tensor:
    """What depth n carries: the state that enters block n; with an encoder, what waits beside it too."""
    waiting, values, parts = run.waiting(n), run.pieces.at_cuts, []
    for slot in run.recording.slots[n]:
        u = waiting.get(slot, torch.zeros_like(values[slot]))
        parts.append((u * values[slot])[0].sum(-1))
    return torch.cat([part.to(parts[-1].device) for part in parts])


def _after_last(run: Pass) -> Tensor:
    """What the state that leaves the last block carries."""
    block = run.block(run.stop - 1)
    return block.by_token((run.waiting(run.stop)[block.exit] * block.values[block.exit])[None])[0]


# Direct effects -------------------------------------------------------------------------------------------------------


def direct(run: Pass) -> Found:
    r"""$d_c = ⟨λʳ, y_c⟩$ with λʳ pulled along the stream alone, past all components.

    What the constants on the stream itself give (norms after a sum, the final norm, the unembedding) are biases:
    between two places of the stream $s' = A s + c$, they give $⟨λ', s'⟩ - ⟨λ, s⟩$; those of the head stand at the
    output explained. All scores sum to the target.
    """
    walk, reached, head = from_target(run)
    flow, groups = [reached], list[list[Row]]()
    for block in run.downwards:
        if block.n + 1 == run.recording.n_encoder_blocks and block.n + 1 < run.stop:
            break  # the encoder is read by components of the decoder only
        groups.append(walk.block(block.n))
        flow.append(walk.carried(block.n)[0])
    n_missing = run.stop - run.start + 1 - len(flow)
    flow += [flow[-1]] * n_missing  # depths within the encoder: the decoder's embedding is all that crosses
    rows = [Row(row.component, row.scores[0]) for group in reversed(groups) for row in group]
    return Found([Row(Component(kind="embedding"), flow[-1]), *rows, Row(Component(kind="bias"), head)], flow[::-1])


def from_target(run: Pass) -> tuple[Walk, Tensor, Tensor]:
    """A walk down from the target; what the last state carries at each token, and what the constants of the head do."""
    reached = _after_last(run)
    head = torch.zeros_like(reached)
    head[run.out_token] = run.value - reached.sum()
    return Walk(run, run.waiting(run.stop)[run.block(run.stop - 1).exit][None]), reached, head
