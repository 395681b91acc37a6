"""The laws of a half-precision model in float32, one block cast at a time: structure apart from rounding.

In bfloat16 every law holds to a few per cent alone, and a fault of one per cent would hide. A block is cast with what
it holds, replayed at random states, and put back; no more than one block is ever there twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.freezing.interpreter import Heads
from tensorlens.freezing.long_inputs import LongInput
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import FactorReplay
from tensorlens.operators.laws import relative
from tensorlens.operators.matrix_free import FrozenOperator

HALF = (torch.bfloat16, torch.float16)


def errors_in_float32(operator: FrozenOperator, seed: int = 0) -> tuple[dict[str, float], tuple[int, ...]]:
    """The largest error of linearity and of the adjoint over the blocks of an operator, and the blocks left out.

    The factors of a long input are there for one block at a time. A block is left out where torch refuses its code two
    types at once.
    """
    generator = torch.Generator().manual_seed(seed)
    recording, replay, heads = operator.recording, operator.replay, operator.heads
    worst: dict[str, float] = {}
    left_out = []
    for n in range(*operator.span):
        try:
            with replay.opened(n) if isinstance(replay, LongInput) else nullcontext():
                widened = _widened(recording, n)
                with _in_float32(_weights_from(recording, n)):
                    found = _laws(FactorReplay(widened), n, heads, generator)
        except RuntimeError:
            left_out.append(n)
            continue
        worst = {law: max(error, worst.get(law, 0.0)) for law, error in found.items()}
    return worst, tuple(left_out)


def _weights_from(recording: Recording, n: int) -> list[Tensor]:
    """Parameters and buffers of block n, and of what follows the last one: its norm, a pooler."""
    anatomy = recording.anatomy
    found = [*_tensors(anatomy.blocks[min(n, len(anatomy.blocks) - 1)])]
    if n == recording.n_blocks - 1:
        apart = [*anatomy.blocks, *(part for part in (anatomy.embedding, anatomy.unembedding) if part is not None)]
        apart += [part for part in anatomy.model.modules() if isinstance(part, nn.Embedding)]
        others = {id(tensor) for part in apart for tensor in _tensors(part)}
        found += [tensor for tensor in _tensors(anatomy.model) if id(tensor) not in others]
    return found


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


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
def _in_float32(tensors: list[Tensor]) -> Iterator[None]:
    """Some tensors of a model in float32; afterwards they are what they were."""
    kept = [(t, t.data) for t in tensors if t.dtype in HALF]
    try:
        for tensor, data in kept:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
