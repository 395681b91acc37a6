r"""Corrections for what attribution patching overlooks (AtP*: Kramár et al. 2024).

A saturated softmax has no derivative, so a query or a key that would move attention looks idle: its effect is taken by
the *true* softmax instead, with only what follows linear,

    ⟨λ_h, (softmax(q' kᵀ) − softmax(q kᵀ)) v⟩.

Effects that cancel along different ways look idle too: with the cotangent of one block dropped at a time they no longer
cancel, and the mean of the magnitudes shows them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.inside.block import Part
from tensorlens.inside.seats import Edit, edited_logits
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Pass
from tensorlens.operators.attention_matrices import FusedAttention, fused_attention, mixing
from tensorlens.program.composite import rows_of_attention
from tensorlens.recording.recording import Recording

SUBSETS = 16
"""Random halves of what was not patched that are patched together."""


def queries_and_keys(run: Pass, other: Recording) -> dict[Component, Tensor]:
    """The effects of all queries of a head, and of all its keys, by the true softmax.

    Raises:
        MethodError: a block has attention that is not one fused call.
    """
    found = dict[Component, Tensor]()
    for block in reversed(run.downwards):
        mixtures, twins = ([m for m in one.mixtures if m.block == block.n] for one in (run.recording, other))
        if len(mixtures) != 1 or len(twins) != 1:
            raise MethodError(
                f"Block {block.n} has {len(mixtures)} attention layers; queries and keys need exactly one."
            )
        ours, theirs = fused_attention(run.recording, mixtures[0].slot), fused_attention(other, twins[0].slot)
        values = mixing(run.recording, block.n).values
        cotangent = run.cotangents(block.n)[mixtures[0].slot].flatten(0, -4).squeeze(0)  # (head, token, channel)
        before = _attention(ours)
        for name in ("query", "key"):
            moved = (_attention(ours._replace(**{name: getattr(theirs, name)})) - before) @ values
            for head, effect in enumerate((cotangent * moved).sum((1, 2)).unbind()):
                found[Component(block=block.n, kind=f"attention {name}", head=head)] = effect
    return found


def _attention(held: FusedAttention) -> Tensor:
    key = held.key.repeat_interleave(held.query.shape[-3] // held.key.shape[-3], -3)
    found = rows_of_attention(held.query, key, held.mask, held.causal, held.scale)
    return found.flatten(0, -4).squeeze(0) if found.dim() > 3 else found


def with_blocks_dropped(run: Pass, moved: Callable[[Part], Tensor]) -> Tensor:
    r"""$\frac{1}{N-1}\sum_n |⟨λ^{(n)}, y' - y⟩|$ for each part, with $λ^{(n)}$ pulled past all that block n writes.

    A part of block n itself has no effect there, so it is the mean over the other blocks.
    """
    parts, total = [*run.parts.values()], torch.zeros(())
    for left_out in range(run.start, run.stop):
        block = run.block(left_out)
        silent = {write.slot: torch.zeros_like(block.values[write.slot]) for write, _ in block.writes}
        found = torch.stack(run.effects(parts, moved, silent)).abs()
        total = total.to(found) + found * torch.tensor([part.block != left_out for part in parts]).to(found)
    return (total / max(1, run.stop - run.start - 1)).cpu()


def missed(run: Pass, edits: list[Edit], seed: int = 0) -> float:
    """The largest true effect of random halves of some patches together: an estimate of what they hide."""
    if not edits:
        return 0.0
    generator = torch.Generator().manual_seed(seed)
    size = (len(edits) + 1) // 2
    drawn = [torch.randperm(len(edits), generator=generator)[:size].tolist() for _ in range(SUBSETS)]
    halves = [[edits[i] for i in some] for some in drawn]
    effects = [abs(run.read(one) - run.value) for one in edited_logits(run, halves) if one is not None]
    return max(effects, default=float("nan"))
