r"""The affine function of a model at an input: with all factors if memory allows, and block by block if not.

What goes block by block is proved where it is used. No second way through a long input is affordable, so the first few
tokens of it stand in: the same model in the same state, recorded both ways, must give the same $T^\top u$ and $T v$.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.long_inputs import LongInput, record_long
from tensorlens.freezing.places import Span
from tensorlens.freezing.proof import Proof, known_proof, remember_proof, tolerance_of
from tensorlens.freezing.record import record
from tensorlens.freezing.replay import FactorReplay, Replay
from tensorlens.memory import free_bytes
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.precision import in_float64, tf32_allowed

FACTOR_SHARE = 0.3
"""Part of the free memory that held factors may take; beyond it they are not kept."""

N_STANDING_IN = 24
"""Tokens that stand in for a long input."""


def replay_of(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None) -> Replay:
    """Record a model at an input, with all factors if memory allows and block by block if not."""
    if factor_bytes(anatomy, inputs) > FACTOR_SHARE * free_bytes(next(anatomy.model.parameters()).device):
        long_input = record_long(anatomy, inputs, rules)
        if long_input is not None:
            proof = _proof_of(long_input)
            if not proof.holds:
                long_input.distrust(proof)
            return long_input
    return FactorReplay(record(anatomy, inputs, rules))


def factor_bytes(anatomy: Anatomy, inputs: dict[str, Any]) -> int:
    """About how much held factors would take; 0 where the inputs do not say how many tokens there are."""
    tokens = _tokens(inputs)
    return 0 if tokens is None else anatomy.bytes_per_token * tokens.shape[0] * tokens.shape[1]


def _tokens(inputs: dict[str, Any]) -> Tensor | None:
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    return tokens if isinstance(tokens, Tensor) else None


def _proof_of(long_input: LongInput) -> Proof:
    """That long inputs of this kind are right, found out for the first of them."""
    recording = long_input.recording
    key = ("streamed", recording.fingerprint, recording.rules, recording.signature, recording.states[0].device.type)
    known = None if recording.fingerprint is None else known_proof(recording.model, key)
    return known or remember_proof(recording.model, key, _prove(long_input))


def _prove(long_input: LongInput) -> Proof:
    recording = long_input.recording
    dtype, is_cuda = recording.states[0].dtype, recording.states[0].is_cuda
    accepted = tolerance_of(dtype, dtype, is_tf32=is_cuda and tf32_allowed())
    inputs = beginning(recording.inputs, N_STANDING_IN)
    try:
        streamed = record_long(recording.anatomy, inputs, recording.rules)
        whole = FactorReplay(record(recording.anatomy, inputs, recording.rules))
        return Proof(math.inf if streamed is None else _difference(streamed, whole), accepted)
    except Exception:  # noqa: BLE001  whatever the model's code makes of fewer tokens
        return Proof(math.inf, accepted)


def beginning(inputs: dict[str, Any], n: int) -> dict[str, Any]:
    """The first `n` tokens: every axis over tokens, of ids, positions, masks and embeddings, is cut."""
    tokens = _tokens(inputs)
    length = 0 if tokens is None else tokens.shape[1]
    return {name: _cut(value, length, n) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _cut(value: Tensor, length: int, n: int) -> Tensor:
    # Of (sample, token, channel) the last axis may be as long as the input by chance.
    axes = (1,) if value.is_floating_point() and value.dim() == 3 else range(value.dim())
    for axis in axes:
        if value.shape[axis] == length:
            value = value.narrow(axis, 0, min(n, length))
    return value


def _difference(streamed: LongInput, whole: FactorReplay) -> float:
    """The largest relative difference of pushes, and of pulls from the output, from what the head reads, of a range."""
    for n in list(streamed.edges)[::2]:
        del streamed.edges[n]  # so that blocks of both kinds answer: by their graph, and run again
    span, generator = Span(0, streamed.recording.n_blocks), torch.Generator().manual_seed(0)
    x, differences = _normal(whole.recording.states[0], generator), list[float]()
    states = (0 * x, x)
    alone = [whole.push(one, span) for one in states]
    for found in ([streamed.push(one, span) for one in states], streamed.push(torch.cat(states), span).split(1)):
        differences += [_relative(one, other) for one, other in zip(found, alone, strict=True)]
    inner = Span(1, span.stop - 1) if span.stop > 2 else span  # which begins and ends elsewhere
    for part, to_logits in ((span, False), (span, True), (inner, False)):
        with whole.graph(part, to_logits=to_logits) as (start, end, _):
            u = torch.cat([_normal(end, generator), _normal(end, generator)])  # two at once
            expected = torch.cat([torch.autograd.grad(end, start, one[None], retain_graph=True)[0] for one in u])
        differences.append(_relative(streamed.pull(u, part, to_logits=to_logits), expected))
    return max(differences)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like)


def _relative(found: Tensor, expected: Tensor) -> float:
    tiny = torch.finfo(torch.float64).tiny
    return float((in_float64(found) - in_float64(expected)).norm() / in_float64(expected).norm().clamp_min(tiny))
