"""The laws of a half-precision model in float32, one block cast at a time: structure apart from rounding.

In bfloat16 every law holds to a few per cent alone, and a fault of one per cent would hide. A block is cast with what
it holds, replayed at random states, and put back; no more than one block is ever there twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.freezing.interpreter import Heads
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import FactorReplay
from tensorlens.operators.laws import relative

HALF = (torch.bfloat16, torch.float16)


def errors_in_float32(
    recording: Recording, span: Span, heads: Heads, seed: int = 0
) -> tuple[dict[str, float], tuple[int, ...]]:
    """The largest error of linearity and of the adjoint over the blocks of a range, and the blocks left out.

    A block is left out where torch refuses its code two types at once: what follows the last one stays as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    worst: dict[str, float] = {}
    left_out = []
    for n in range(*span):
        block = recording.anatomy.blocks[min(n, len(recording.anatomy.blocks) - 1)]
        try:
            with _in_float32(block):
                found = _laws(FactorReplay(_widened(recording, n)), n, heads, generator)
        except RuntimeError:
            left_out.append(n)
            continue
        worst = {law: max(error, worst.get(law, 0.0)) for law, error in found.items()}
    return worst, tuple(left_out)


def _laws(replay: FactorReplay, n: int, heads: Heads, generator: torch.Generator) -> dict[str, float]:
    span, state = Span(n, n + 1), replay.recording.states[n]
    size = state.square().mean().sqrt()
    v, w = (size * torch.randn(state.shape, generator=generator).to(state) for _ in range(2))
    of_v, of_w, of_both, at_zero = (
        replay.push(x, span, heads).float() for x in (v, w, 2 * v - 3 * w, torch.zeros_like(v))
    )
    moved = of_v - at_zero
    both = of_both - at_zero
    with replay.graph(span, heads) as (x, y, _):
        u = torch.randn(y.shape, generator=generator).to(y)
        pulled = torch.autograd.grad(y, x, u)[0]
    difference = (u * moved).sum() - (pulled * v).sum()
    return {
        "linearity": relative(both - 2 * moved + 3 * (of_w - at_zero), both),
        "adjoint": float(difference.abs() / moved.norm().clamp_min(torch.finfo(torch.float32).tiny)),
    }


def _widened(recording: Recording, n: int) -> Recording:
    """The recording with what block n holds and takes in float32; its fingerprint would no longer be the model's."""
    factors = {site: _wide(factor) if site.place.block == n else factor for site, factor in recording.factors.items()}
    states = tuple(_wide(state) if at == n else state for at, state in enumerate(recording.states))
    return replace(recording, factors=factors, states=states, fingerprint=None, graph=None)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    return type(value)(map(_wide, value)) if type(value) in (tuple, list) else value


@contextmanager
def _in_float32(block: nn.Module) -> Iterator[None]:
    """The parameters and buffers of one block in float32; afterwards they are the tensors that they were."""
    kept = [(t, t.data) for t in (*block.parameters(), *block.buffers()) if t.dtype in HALF]
    try:
        for tensor, data in kept:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
