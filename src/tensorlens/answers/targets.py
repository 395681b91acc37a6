r"""What of an answer is explained: for each token q a linear function $c_q$ of what the head reads at one position.

An answer $y_1 … y_r$ after a prompt of p tokens is predicted at positions $p - 1 … p + r - 2$.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.recording.recording import Recording

TargetKind = Literal["centred", "logit", "runner_up"]
"""The logit less the mean over the vocabulary, the logit, or the logit less that of the runner-up."""

TOGETHER = 64
"""Positions whose logits are in memory at a time."""


class Targets(NamedTuple):
    """One target for each token of an answer.

    Attributes:
        positions: Where each is predicted.
        vectors: $c_q$, (token, channel) of what the head reads.
        constants: What the head's own bias gives of each.
    """

    positions: Tensor
    vectors: Tensor
    constants: Tensor

    def cotangents(self, rows: Tensor, readout: Tensor) -> Tensor:
        """Cotangents (row, position, channel) of what the head reads, for sums of targets (row, token)."""
        u = torch.zeros(len(rows), *readout.shape[1:], dtype=readout.dtype, device=readout.device)
        u[:, self.positions] = (rows[..., None] * self.vectors.to(rows)).to(u)
        return u

    def read(self, state: Tensor) -> Tensor:
        r"""$⟨c_q, F_q⟩$ (…, token) of what passes ended with (…, position, channel), the constants left out."""
        fine = torch.promote_types(state.dtype, self.vectors.dtype)  # a sum over channels, of half-precision states too
        return (state[..., self.positions, :].to(fine) * self.vectors.to(fine)).sum(-1)


def make_targets(recording: Recording, ids: Sequence[int], first: int, kind: TargetKind) -> Targets:
    """The targets of the tokens `ids`, the first of them predicted at position `first`.

    Raises:
        InputError: There is no such kind.
    """
    if kind not in get_args(TargetKind):
        raise InputError(f"`target` must be one of {', '.join(get_args(TargetKind))}; got {kind!r}.")
    readout = recording.readout
    assert readout is not None and readout.dim() == 3, "asked of a model with logits for each token"
    chosen = torch.tensor(ids, device=readout.device)
    positions = torch.arange(first, first + len(ids), device=readout.device)
    weight, bias = _head(recording, readout)
    fine = torch.promote_types(weight.dtype, torch.float32)
    vectors, constants = weight[chosen].to(fine), bias[chosen].to(fine)
    if kind == "centred":
        vectors, constants = vectors - weight.mean(0, dtype=fine), constants - bias.mean(dtype=fine)
    if kind == "runner_up":
        others = _runners_up(readout[0, positions], weight, bias, chosen)
        vectors, constants = vectors - weight[others], constants - bias[others]
    return Targets(positions, vectors, constants)


def _head(recording: Recording, readout: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the head; the identity where the readout is the logits themselves."""
    if recording.head is None:
        weight, bias = torch.eye(readout.shape[-1], dtype=readout.dtype, device=readout.device), None
    else:
        weight, bias = recording.head.weight, recording.head.bias
    return weight, weight.new_zeros(len(weight)) if bias is None else bias


def _runners_up(states: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    """At each position the token with the highest logit but the one that is there."""
    found = []
    for some, here in zip(states.detach().split(TOGETHER), ids.split(TOGETHER), strict=True):
        logits = some @ weight.T.to(some) + bias.to(some)
        found.append(logits.scatter(1, here[:, None], -torch.inf).argmax(1))
    return torch.cat(found)
