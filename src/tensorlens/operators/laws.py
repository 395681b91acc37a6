"""The laws that a certificate measures, each a number, and how much of the input an operator passes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from tensorlens.errors import AnatomyError, InputError
from tensorlens.folding.pull import CAPTURES, FoldedRows
from tensorlens.folding.rebuild import held_factors, norm_scale, rebuild, rebuild_norm
from tensorlens.folding.search import block_parts, final_norm
from tensorlens.freezing.places import Place, Span
from tensorlens.freezing.proof import compare
from tensorlens.freezing.recording import Recording
from tensorlens.models.precision import in_float64
from tensorlens.operators.matrix_free import ENOUGH_TO_FOLD, FrozenOperator

N_CLASSES = 5
"""Classes whose logits are tried."""

WAYS = ("states", "few", "many", "matrices")
"""How folded cotangents can go, on any device."""


class Probes:
    """Random states and cotangents, and the laws that need them."""

    def __init__(self, operator: FrozenOperator, n_probes: int, seed: int) -> None:
        self.operator = operator
        self._generator = torch.Generator().manual_seed(seed)
        n_out, d_out, n_in, d_in = operator.shape
        self.u = self.normal(n_probes, n_out, d_out)
        size = operator.input.square().mean().sqrt()
        self.v, self.w = size * self.normal(n_in, d_in), size * self.normal(n_in, d_in)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers of the operator's type."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64).to(self.operator.input)

    def linearity(self) -> float:
        """Relative error of $T(aV + bW) = aTV + bTW$."""
        a, b, bias = 2.0, -3.0, self.operator.bias
        of_v, of_w, of_both = self.operator.push(torch.stack([self.v, self.w, a * self.v + b * self.w])) - bias
        return relative(of_both - a * of_v - b * of_w, of_both)

    def mismatch(self, y: Tensor, pulled: Tensor, x: Tensor, scale: Tensor | None = None) -> float:
        """Root mean square of ⟨u, y⟩ - ⟨pulled, x⟩, relative to the norm of y."""
        differences = (self.u * y).sum((1, 2)) - (pulled * x).sum((1, 2))
        norm = (y if scale is None else scale).norm()
        return float(differences.square().mean().sqrt() / norm.clamp_min(torch.finfo(norm.dtype).tiny))

    def composition(self) -> float:
        """Relative error of blocks in two steps against all at once, away from X."""
        replay, (start, stop), heads = self.operator.replay, self.operator.span, self.operator.heads
        if stop - start < 2:
            return 0.0
        middle = (start + stop) // 2
        halfway = replay.push(self.v[None], Span(start, middle), heads)
        in_two_steps = replay.push(halfway, Span(middle, stop), heads)
        at_once = replay.push(self.v[None], self.operator.span, heads)
        return relative(in_two_steps - at_once, at_once)

    def logits(self) -> float:
        r"""Relative error of $⟨w, T_{\text{logits}} V⟩ = ⟨T_{\text{logits}}^\top w, V⟩$ for weights w of a few classes.

        By the way that maps of a logit go: the recording's own graph, where it is kept.
        """
        operator, (start, _) = self.operator, self.operator.span
        out_token = _last_read(operator.recording, operator.shape[0])
        of_v, of_zero = (
            operator.replay.push_logits(x[None], out_token, start, operator.heads)[0]
            for x in (self.v, torch.zeros_like(self.v))
        )
        moved = of_v - of_zero
        some = torch.randperm(len(moved), generator=self._generator)[:N_CLASSES].to(moved.device)
        weights = torch.zeros_like(moved)
        weights[some] = self.normal(len(some)).to(moved)
        places = torch.tensor([out_token], device=moved.device)
        pulled = operator.replay.pull_logits(weights[None], places, start, operator.heads)[0]
        difference = (weights * moved).sum() - (pulled.to(self.v) * self.v).sum()
        return float(difference.abs() / (weights.norm() * moved[some].norm()).clamp_min(torch.finfo(moved.dtype).tiny))


def _last_read(recording: Recording, n_tokens: int) -> int:
    """The last output that the head reads: it may read fewer places than the body ends with."""
    readout = recording.readout
    if recording.anatomy.unembedding is None:
        n_read = n_tokens if readout is None or readout.dim() < 3 else readout.shape[1]
        return min(n_tokens, n_read) - 1
    for token in reversed(range(n_tokens)):
        with suppress(InputError):
            recording.place_read(token)
            return token
    return n_tokens - 1


def relative(difference: Tensor, scale: Tensor) -> float:
    """The norm of a difference by that of what it is a difference of."""
    size = in_float64(scale).norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float(in_float64(difference).norm() / size)


# Heads ---------------------------------------------------------------------------------------------------------------


def value_with_heads(operator: FrozenOperator) -> float:
    r"""How far blocks with chosen heads are from what their weights and attention matrices give.

    A block that cannot be taken apart is held to $F(m) + F(1 - m) - F(0) = F(1)$ in the multipliers m of its heads,
    with F(1) from the recording.
    """
    recording, replay, errors = operator.recording, operator.replay, [0.0]
    for n, heads in operator.heads.items():
        span = operator.span if recording.side_channels else Span(n, n + 1)
        x = recording.states[span.start]
        found, expected = replay.push(x, span, {n: heads})[0], _rebuilt(operator, n, heads)
        if expected is None:
            others, none = (replay.push(x, span, {n: m})[0] for m in (1 - heads, torch.zeros_like(heads)))
            found, expected = found + others - none, recording.states[span.stop][0]
        errors.append(relative(found - expected, expected))
    return max(errors)


def _rebuilt(operator: FrozenOperator, n: int, heads: Tensor) -> Tensor | None:
    """A block at its recorded input from its weights, heads multiplied into the attention matrices."""
    recording = operator.recording
    if operator.is_streamed or recording.side_channels:
        return None
    try:
        parts = block_parts(recording, n)
        tail = final_norm(recording) if n == recording.n_blocks - 1 else None
    except AnatomyError:
        return None
    held = held_factors(recording, parts)
    held = replace(held, attention=held.attention * heads.to(held.attention)[:, None, None])
    with torch.no_grad():
        y = rebuild(parts, held, recording.states[n][0])
        scale = None if tail is None else norm_scale(recording, Place(n), tail)
        return y if tail is None or scale is None else rebuild_norm(tail, scale, y)


# Engines -------------------------------------------------------------------------------------------------------------


def engine_errors(operator: FrozenOperator, probes: Probes, pulled: Tensor, *, every: bool) -> dict[str, float]:
    """How far each engine is from cotangents pulled one by one through a replay.

    Args:
        operator: The operator.
        probes: Random cotangents.
        pulled: They, pulled one by one.
        every: Whether to try every engine there is; otherwise those that answered, and the one behind single maps.
    """
    errors, slow = {}, operator.engines.slow
    if slow != "replayed":
        two = operator.replay.pull(probes.u[:2], operator.span, operator.heads)  # at once, as many others go
        errors[slow] = relative(two - pulled[:2], pulled[:2])
    ways = [*WAYS, "captured"] if every else list(operator.engines.ways)
    if ways and operator.folded is not None:
        for way, found, u in _folded_answers(operator, operator.folded, probes, ways):
            name = "captured" if way == "captured" else "folded"
            errors[name] = max(errors.get(name, 0.0), compare(found, u, operator.pull_replayed, 0.0).error)
    return errors


def _folded_answers(
    operator: FrozenOperator, folded: FoldedRows, probes: Probes, ways: list[str]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What folded blocks give by each of some ways, and from which cotangents."""
    n_out, d_out = operator.shape[:2]
    if "states" in ways:
        u = probes.normal(ENOUGH_TO_FOLD, n_out, d_out)
        yield "states", operator.adjoint_folded(u), u
    outputs = sorted({n_out // 2, n_out - 1})  # not the first: tokens before it must be found to be in sight
    starts = probes.normal(len(outputs), 2, d_out).to(operator.compute_type)
    for way in ways:
        if way == "states" or way == "captured" and operator.device.type not in CAPTURES:
            continue
        options = {"few": way in ("few", "captured"), "keep_matrices": way == "matrices"}
        for _ in range(3 if way == "captured" else 1):  # launched, captured, replayed
            rows, tokens, _ = folded.pull(outputs, starts, **options)
        folded.forget_matrices()
        yield way, *operator.as_states(rows, tokens, outputs, starts)  # type: ignore[possibly-unbound]
