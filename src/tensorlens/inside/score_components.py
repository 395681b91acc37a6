r"""Which earlier component wrote what a query and a key read.

Where attention reads the stream, the stream is a sum of what components wrote there, and with norms held a query is
affine in it:

    q_i = Σ_b U_b + u,   U_b = (∂q_i/∂s) y_b along the stream alone,   k_j = Σ_b V_b + v,

so that the score is $Σ_a Σ_b c·U_aᵀV_b$, with one further row and column for the constants u and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tensorlens.inside.block import Block, StreamPass
from tensorlens.inside.component_map import Component
from tensorlens.inside.walk import Joining, Read, Walk
from tensorlens.program.pieces import Cotangents

ROUNDING = 64
"""Components below this many roundings of the largest wrote nothing: an output projection without a bias."""


class Written(NamedTuple):
    """Of some vectors what each component wrote, (vector, channel, component and constant)."""

    components: tuple[Component, ...]
    parts: Tensor


def written(run: StreamPass, block: int, attention: int, starts: Cotangents, vectors: Tensor) -> Written:
    """What each component wrote of queries and keys of one attention.

    Args:
        run: The blocks up to this one.
        block: Which one.
        attention: Which attention of the block, from 0.
        starts: A cotangent (row, …) for each channel of each vector, at the slots of queries and keys.
        vectors: Queries and keys, (vector, channel).
    """
    found: dict[Component, Tensor] = {}
    for component, scores in _walk(run, block, attention, starts).all_the_way(block):
        by_channel = scores.sum(-1)
        found[component] = found[component] + by_channel if component in found else by_channel
    least = ROUNDING * torch.finfo(vectors.dtype).eps * torch.stack([*found.values()]).abs().max()
    found = {component: values for component, values in found.items() if bool((values.abs() > least).any())}
    parts = torch.stack([*found.values()], 1) if found else vectors.new_zeros(vectors.numel(), 0)
    constant = vectors.flatten() - parts.sum(1)
    return Written(tuple(found), torch.cat([parts, constant[:, None]], 1).unflatten(0, vectors.shape))


def _walk(run: StreamPass, n: int, attention: int, starts: Cotangents) -> Walk:
    """A walk down from where the attention reads the stream, a row for each channel."""
    block = run.block(n)
    at_entry = Read(n, len(block.sums or []))
    read = _read(block, attention) or at_entry
    stream = block.entry if read == at_entry else (block.sums or [])[read.place].stream
    memory = None if block.is_encoder else run.memory
    ends = {block.entry, stream, *([] if memory is None else [memory])}
    at, joining = block.cotangents_at(starts, ends, (stream,)), Joining()
    for row in range(len(at[stream])):
        joining.add(row, read, at[stream][row], None if memory is None else at[memory][row])
        if stream != block.entry:  # what it reads beside the stream of its own sum
            joining.add(row, at_entry, at[block.entry][row], None)
    return Walk.from_zero(run, n, len(at[stream]), joining)


def _read(block: Block, attention: int) -> Read | None:
    """Where an attention reads the stream; None if its write cannot be told apart."""
    writes = [write for write, _ in block.writes if write.mixtures]
    places = enumerate(block.sums or [])
    chosen = writes[attention] if attention < len(writes) else None
    return next((Read(block.n, place) for place, one in places if chosen in one.writes), None)


def named(components: Sequence[Component]) -> tuple[str, ...]:
    """Labels, the constant last."""
    return (*map(str, components), "bias")
