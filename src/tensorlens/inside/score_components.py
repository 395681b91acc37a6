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
from torch.autograd.graph import GradientEdge

from tensorlens.inside.component_map import Component
from tensorlens.inside.target import StreamPass
from tensorlens.inside.walk import Joining, Read, Walk, kinds

ROUNDING = 64
"""Components below this many roundings of the largest wrote nothing: an output projection without a bias."""


class Written(NamedTuple):
    """Of some vectors what each component wrote, (vector, channel, component and constant)."""

    components: tuple[Component, ...]
    parts: Tensor


def written(run: StreamPass, block: int, attention: int, vectors: Tensor) -> Written:
    """What each component wrote of queries and keys of one attention.

    Args:
        run: A replay to the end of the block.
        block: Which one.
        attention: Which attention of the block, from 0.
        vectors: Queries and keys, (vector, channel), with their graph.
    """
    flat = vectors.flatten()
    walk, last = _walk(run, block, attention, flat)
    found: dict[Component, Tensor] = {}
    for component, scores in walk.all_the_way(last):
        by_channel = scores.detach().sum(-1)
        found[component] = found[component] + by_channel if component in found else by_channel
    least = ROUNDING * torch.finfo(flat.dtype).eps * torch.stack([*found.values()]).abs().max()
    found = {component: values for component, values in found.items() if bool((values.abs() > least).any())}
    parts = torch.stack([*found.values()], 1)
    constant = flat.detach() - parts.sum(1)
    return Written(tuple(found), torch.cat([parts, constant[:, None]], 1).unflatten(0, vectors.shape))


def _walk(run: StreamPass, n: int, attention: int, vector: Tensor) -> tuple[Walk, int]:
    """A walk down from where the attention reads the stream, a row for each channel; and the block where it begins."""
    read = _read(run, n, attention)
    sums = run.sums[n]
    to = None if read is None or sums is None else sums[read.place]
    cotangents = None if to is None else _pulled(vector, to.stream)
    aside = None if run.seen.memory is None else run.seen.memory[0]
    memory = None if aside is None else _pulled(vector, aside)
    if read is None or to is None or cotangents is None and memory is None:
        entry, state = run.entry(n)
        at_entry = _pulled(vector, entry)
        return Walk(run, state.new_zeros(len(vector), *state.shape) if at_entry is None else at_entry), n - 1
    if cotangents is None:  # a cross-attention: its keys are the encoder's alone
        cotangents = to.stream_value.new_zeros(len(vector), *to.stream_value.shape)
    elif memory is not None and aside is not None:
        memory = _without(memory, to.stream, cotangents, aside)
    joining = Joining()
    for row, cotangent in enumerate(cotangents):
        joining.add(row, read, cotangent, None if memory is None else memory[row])
    top = run.seen.outputs[n][1]
    return Walk(run, top.new_zeros(len(vector), *top.shape), joining), n


def _read(run: StreamPass, n: int, attention: int) -> Read | None:
    """Where an attention reads the stream; None if its write cannot be told apart."""
    sums = run.sums[n] or []
    writes = [write for write, _ in kinds(run, n, sums) if write.mixtures]
    if attention >= len(writes):
        return None
    return next(Read(n, place) for place, one in enumerate(sums) if any(w is writes[attention] for w in one.writes))


def _pulled(vector: Tensor, to: GradientEdge) -> Tensor | None:
    """The cotangents of each channel at an earlier place; None if nothing was computed from there."""
    units = torch.eye(len(vector), dtype=vector.dtype, device=vector.device)
    return torch.autograd.grad(vector, [to], units, retain_graph=True, allow_unused=True, is_grads_batched=True)[0]


def _without(memory: Tensor, stream: GradientEdge, cotangents: Tensor, edge: GradientEdge) -> Tensor:
    """Cotangents of the encoder's output but for what comes by way of the stream."""
    by_stream = torch.autograd.grad(
        [stream], [edge], [cotangents], retain_graph=True, allow_unused=True, is_grads_batched=True
    )[0]
    return memory if by_stream is None else memory - by_stream


def named(components: Sequence[Component]) -> tuple[str, ...]:
    """Labels, the constant last."""
    return (*map(str, components), "bias")
