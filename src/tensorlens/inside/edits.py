r"""Other values for some components: what T says of it.

With the components of a set S held at other values at once, the frozen target changes by

    Δt = Σ_{c ∈ S} ⟨λ_c^S, y_c' − y_c⟩,   λ_c^S = λ_c − Σ_{c' ∈ S after c} (∂y_{c'}/∂y_c)ᵀ λ_{c'}^S:

a path that passes through another of them is cut there. What the model itself does is in `seats`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tensorlens.inside.block import Block
from tensorlens.inside.seats import Edit, Editable
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Pass


def parts(block: Block) -> Iterator[Editable]:
    """Attention outputs, their heads, and feed-forwards of one block, in the order of the pass."""
    for write, kind in block.writes:
        yield Editable(Component(block=block.n, kind=kind), block.n, write.slot)
        mixture = block.heads_of(write)
        if mixture is None:
            continue
        for head in range(block.specs[mixture.slot].shape[-3]):
            yield Editable(Component(block=block.n, kind=f"{kind} head", head=head), block.n, mixture.slot)


def predicted_change(run: Pass, edits: Sequence[Edit]) -> float:
    """Δt of the frozen model with all edits at once: its cotangents, cut where something is held."""
    left = {part.slot: torch.ones_like(run.values(part.block)[part.slot]) for part, _ in edits}
    for part, _ in edits:
        part.of(left[part.slot]).zero_()
    pieces, waiting, change = run.pieces.scaled(left), run.waiting(run.stop), 0.0
    for n in reversed(range(run.start, run.stop)):
        here = [edit for edit in edits if edit.part.block == n]
        at, waiting = pieces.pull(n - run.start, waiting, {part.slot for part, _ in here})
        for part, value in here:
            change += float((part.of(at[part.slot]) * (value - part.of(run.values(n)[part.slot]))).sum())
    return change
