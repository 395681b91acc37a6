r"""Corrections for what attribution patching overlooks (AtP*: Kramár et al. 2024).

A saturated softmax has no derivative, so a query or a key that would move attention looks idle: its effect is taken by
the *true* softmax instead, with only what follows linear,

    ⟨λ_h, (softmax(q' kᵀ) − softmax(q kᵀ)) v⟩.

Effects that cancel along different ways look idle too: with the cotangent of one block dropped at a time they no longer
cancel, and the mean of the magnitudes shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorlens import cancel
from tensorlens.errors import MethodError
from tensorlens.inside.block import Block
from tensorlens.inside.edits import parts
from tensorlens.inside.seats import Edit, Editable, edited_logits
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Pass
from tensorlens.operators.attention_matrices import mixing
from tensorlens.program.composite import rows_of_attention
from tensorlens.program.nodes import Held
from tensorlens.recording.recording import Recording

SUBSETS = 16
"""Random halves of what was not patched that are patched together."""

Values = Callable[[Block, Editable], Tensor]
"""What a part of a block holds."""


class ScoredComponent(NamedTuple):
    """Queries or keys of a head, and what patching them would do."""

    component: Component
    effect: Tensor


class _Fused(NamedTuple):
    """What a fused attention held: queries, keys (a head for each query head), mask, whether causal, scale."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


def queries_and_keys(run: Pass, other: Recording) -> Iterator[ScoredComponent]:
    """The effects of all queries of a head, and of all its keys, by the true softmax.

    Raises:
        MethodError: a block has attention that is not one fused call.
    """
    for block in reversed(run.downwards):
        mixtures = [one for one in run.recording.mixtures if one.block == block.n]
        twins = [one for one in other.mixtures if one.block == block.n]
        if len(mixtures) != 1 or len(twins) != 1:
            raise MethodError(
                f"Block {block.n} has {len(mixtures)} attention layers; queries and keys need exactly one."
            )
        ours, theirs = _fused(run.recording, mixtures[0].slot), _fused(other, twins[0].slot)
        values = mixing(run.recording, block.n).values
        cotangent = run.cotangents(block.n)[mixtures[0].slot].flatten(0, -4).squeeze(0)  # (head, token, channel)
        before = _attention(ours)
        for kind, changed in (
            ("query", ours._replace(query=theirs.query)),
            ("key", ours._replace(key=theirs.key)),
        ):
            moved = (_attention(changed) - before) @ values
            for head, effect in enumerate((cotangent * moved).sum((1, 2)).unbind()):
                yield ScoredComponent(Component(block=block.n, kind=f"attention {kind}", head=head), effect)


def _attention(held: _Fused) -> Tensor:
    found = rows_of_attention(held.query, held.key, held.mask, held.causal, held.scale)
    return found.flatten(0, -4).squeeze(0) if found.dim() > 3 else found


def _fused(recording: Recording, slot: int) -> _Fused:
    step, constants = recording.program.makers[slot], recording.program.constants
    args: Any = step.args
    if step.operation == "live_attention":
        args = (*args[4][:2], None, *args[5:9])
    elif step.operation != "attention":
        raise MethodError("Queries and keys need fused attention; load the model with `attention='sdpa'`.")
    held: list[Any] = [constants[arg.index] if type(arg) is Held else arg for arg in args]
    query, key, _, mask, causal, scale, _ = held
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return _Fused(query, key, mask, causal, query.shape[-1] ** -0.5 if scale is None else scale)


def with_blocks_dropped(run: Pass, ours: Values, theirs: Values) -> Tensor:
    r"""$\frac{1}{N-1}\sum_n |⟨λ^{(n)}, y' - y⟩|$ for each part, with $λ^{(n)}$ pulled past all that block n writes.

    A part of block n itself has no effect there, so it is the mean over the other blocks.
    """
    total: Tensor | None = None
    for left_out in range(run.start, run.stop):
        cancel.check()
        block = run.block(left_out)
        silent = {write.slot: torch.zeros_like(block.values[write.slot]) for write, _ in block.writes}
        pieces, waiting = run.pieces.scaled(silent), run.waiting(run.stop)
        effects = list[Tensor]()
        for n in reversed(range(run.start, run.stop)):
            own = run.block(n)
            at, waiting = pieces.pull(n - run.start, waiting, own.marked)
            for part in reversed(list(parts(own))):
                moved = theirs(own, part) - ours(own, part)
                effects.append((part.of(at[part.slot]) * moved).sum().abs() * (n != left_out))
        found = torch.stack(effects[::-1])
        total = found if total is None else total + found
    assert total is not None, "there is a block"
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
