"""The laws that a certificate measures on the program, each a number, and how much of the input passes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from tensorlens.errors import AnatomyError, InputError
from tensorlens.models.precision import in_float64, tf32
from tensorlens.operators.operator import FrozenOperator
from tensorlens.recording.recording import Recording, Span
from tensorlens.tolerances import TINY

N_CLASSES = 5
"""Classes whose logits are tried."""

N_BLOCKS = 4
"""Blocks of a half-precision model whose laws are measured in float32."""


def normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of a tensor's type, drawn where the generator is."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)


class Probes:
    """Random states and cotangents, and the laws that need them."""

    def __init__(self, operator: FrozenOperator, n_probes: int, generator: torch.Generator) -> None:
        self.operator, self._generator = operator, generator
        n_out, d_out, n_in, d_in = operator.shape
        self.u = self.normal(n_probes, n_out, d_out)
        self.v = operator.input.square().mean().sqrt() * self.normal(n_in, d_in)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers of the operator's type."""
        return normal(shape, self.operator.input, self._generator)

    def mismatch(self, y: Tensor, pulled: Tensor, x: Tensor, scale: Tensor | None = None) -> float:
        """Root mean square of ⟨u, y⟩ - ⟨pulled, x⟩, relative to the norm of y."""
        differences = in_float64(self.u * y).sum((1, 2)) - in_float64(pulled * x).sum((1, 2))
        norm = in_float64(y if scale is None else scale).norm().clamp_min(TINY)
        return float(differences.square().mean().sqrt() / norm)

    def composition(self, at_once: Tensor) -> float | None:
        """Relative error of blocks in two steps against all at once; None where a range in the middle is refused.

        Args:
            at_once: The affine map at v.
        """
        recording, (start, stop), heads = self.operator.recording, self.operator.span, self.operator.heads
        if stop - start < 2:
            return 0.0
        middle = (start + stop) // 2
        try:
            recording.part(Span(middle, stop), heads)
        except AnatomyError:
            return None
        halfway = recording.push(self.v[None], Span(start, middle), heads)
        return relative(recording.push(halfway, Span(middle, stop), heads)[0] - at_once, at_once)

    def logits(self) -> float:
        r"""Relative error of $⟨w, T_{logits} V⟩ = ⟨T_{logits}^\top w, V⟩$ for weights w of a few classes."""
        operator, recording = self.operator, self.operator.recording
        out_token = last_read(recording, operator.shape[0])
        end = operator.push_to_head(self.v[None], linear=True)
        weights = torch.zeros(recording.logits_at(out_token).shape, dtype=operator.dtype, device=operator.device)
        some = torch.randperm(len(weights), generator=self._generator)[:N_CLASSES].to(weights.device)
        weights[some] = self.normal(len(some))
        u = recording.head_cotangent(weights, out_token)
        pulled = operator.pull_from_head(u)[0]
        difference = in_float64(u * end).sum() - in_float64(pulled * self.v).sum()
        return float(difference.abs() / (in_float64(u).norm() * in_float64(end).norm()).clamp_min(TINY))


def last_read(recording: Recording, n_tokens: int) -> int:
    """The last output that the head reads: it may read fewer places than the body ends with."""
    readout = recording.readout
    if recording.head is None:
        n_read = n_tokens if readout is None or readout.dim() < 3 else readout.shape[1]
        return min(n_tokens, n_read) - 1
    for token in reversed(range(n_tokens)):
        with suppress(InputError):
            recording.place_read(token)
            return token
    return n_tokens - 1


def relative(difference: Tensor, scale: Tensor) -> float:
    """The norm of a difference by that of what it is a difference of."""
    return float(in_float64(difference).norm() / in_float64(scale).norm().clamp_min(TINY))


def in_float32(operator: FrozenOperator, generator: torch.Generator) -> dict[str, float]:
    """The largest error of the laws over a few blocks of a half-precision model, cast to float32: no rounding hides.

    In bfloat16 every law holds to a few per cent alone. The constants of a block are copied, nothing of the model is.
    """
    start, stop = operator.span
    chosen = sorted({start, (start + stop) // 2, stop - 1, *_some(start, stop, generator)})[:N_BLOCKS]
    worst: dict[str, float] = {}
    wide = operator.input.float()
    with tf32(False):
        for n in chosen:
            try:
                program = operator.recording.part(Span(n, n + 1), operator.heads).to(torch.float32)
            except AnatomyError:  # it reads more than the state
                continue
            v, u = (normal(program.specs[slots[0]].shape, wide, generator) for slots in _ends(program))
            at_v, at_zero = program.run(v)[0], program.run(torch.zeros_like(v))[0]
            of_v, pulled = program.linear.run(v)[0], program.linear.pull(u)[0]
            found = {
                "linearity, float32": relative(at_v - at_zero - of_v, at_v),
                "adjoint, float32": relative((u * of_v).sum() - (pulled * v).sum(), u.norm() * of_v.norm()),
            }
            worst = {law: max(error, worst.get(law, 0.0)) for law, error in found.items()}
    return worst


def _some(start: int, stop: int, generator: torch.Generator) -> list[int]:
    return torch.randint(start, stop, (1,), generator=generator, device=generator.device).tolist()


def _ends(program: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return program.inputs, program.outputs  # type: ignore[attr-defined]


# How much passes on ---------------------------------------------------------------------------------------------------


def passing(operator: FrozenOperator, generator: torch.Generator) -> tuple[float, ...]:
    r"""For each block $\lVert T_n V \rVert / \lVert X^{n+1} \rVert$ at a random V as large as $X^n$.

    By the size of what the block gave: a norm at its end makes any state small. What a block reads beside the state
    is zero.
    """
    recording, found = operator.recording, []
    for n in range(*operator.span):
        state = recording.states[n]
        v = state.square().mean().sqrt() * normal(state.shape, state, generator)
        pushed = recording.push_alone(v, n, operator.heads)
        found.append(relative(pushed, recording.states[n + 1]))
    return tuple(found)


def held_by_module(operator: FrozenOperator) -> dict[str, float]:
    r"""For each module $\lVert Y(0) \rVert / \lVert Y(X) \rVert$, with Y what it gives in a run of the program.

    Zero is a module whose output is all carried by T, one a module whose output is all in B. Empty for a range of
    blocks, for chosen heads, and for a long input.
    """
    recording = operator.recording
    if not operator.is_whole or recording.is_streamed:
        return {}
    # Slots of what nobody reads any more, such as queries that are held, are gone.
    live = {output.slot for output in recording.modules if output.slot is not None} & set(recording.program.specs)
    program = recording.program.part(recording.slots[0], recording.slots[-1], also=live)  # type: ignore[arg-type]
    at_x, at_zero = (_sizes(recording, program, live, x) for x in (recording.states[0], 0 * recording.states[0]))
    squares: dict[str, list[float]] = {}
    for path, slot in recording.modules:
        if slot is None:
            squares.setdefault(path, [0.0, 0.0])  # held whole, unless it also gave something live
        elif slot in live:
            both = squares.setdefault(path, [0.0, 0.0])
            both[0], both[1] = both[0] + at_zero[slot], both[1] + at_x[slot]
    return {
        path: (zero / there) ** 0.5 if there else 1.0
        for path, (zero, there) in squares.items()
        if there or any(output.path == path and output.slot is None for output in recording.modules)
    }


def _sizes(recording: Recording, program: object, slots: set[int], x: Tensor) -> dict[int, float]:
    values = recording._divided(recording.slots[0], x)
    found = program.observe(values, slots)  # type: ignore[attr-defined]
    return {slot: float(in_float64(value.abs()).square().sum()) for slot, value in found.items()}
