r"""The target of an answer, and how much each group of inputs contributes to it.

An answer $y_1 … y_r$ after a prompt of p tokens is predicted at positions $p - 1 … p + r - 2$. For each of its tokens
q the target is a linear function $c_q$ of the head's input at one position.

$R_{q,k} = ⟨c_q, T (m_k ⊙ X)⟩ = Σ_{j ∈ G_k} ⟨(T^\top c_q)_j, X_j⟩$, with $m_k$ the mask of group $G_k$. It comes from
one push for each group or from one pull for each row, whichever takes fewer passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tensorlens.errors import MethodError, check_choice
from tensorlens.maps.groups import Group, group_sums
from tensorlens.maps.tensor_maps import BY_COMPLETENESS
from tensorlens.memory import in_parts
from tensorlens.operators.operator import FrozenOperator
from tensorlens.recording.recording import Recording
from tensorlens.tolerances import in_float64

Engine = Literal["pulls", "pushes"]

TargetKind = Literal["centred", "logit", "runner_up"]
"""The logit minus the mean over the vocabulary, the logit, or the logit minus that of the runner-up."""

POSITIONS = 64
"""Positions whose logits are in memory at a time."""

TOGETHER = 32
"""Groups whose inputs, or rows whose cotangents, are in memory at a time."""


# Targets --------------------------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    """One target for each token of an answer.

    Attributes:
        positions: The position at which each token is predicted.
        vectors: $c_q$, (token, channel) of the head's input.
        constants: The contribution of the head's own bias to each.
    """

    positions: Tensor
    vectors: Tensor
    constants: Tensor

    def cotangents(self, rows: Tensor, readout: Tensor) -> Tensor:
        """Cotangents (row, position, channel) of the head's input, for sums of targets (row, token)."""
        u = torch.zeros(len(rows), *readout.shape[1:], dtype=readout.dtype, device=readout.device)
        u[:, self.positions] = (rows[..., None] * self.vectors.to(rows)).to(u)
        return u

    def read(self, state: Tensor) -> Tensor:
        r"""$⟨c_q, F_q⟩$ (…, token) from the ends of passes (…, position, channel), without the constants."""
        fine = torch.promote_types(state.dtype, self.vectors.dtype)  # summed over channels, even in half precision
        return (state[..., self.positions, :].to(fine) * self.vectors.to(fine)).sum(-1)


def make_targets(recording: Recording, ids: Sequence[int], first: int, kind: TargetKind) -> Targets:
    """The targets of the tokens `ids`, the first of them predicted at position `first`."""
    check_choice(kind, "target", get_args(TargetKind))
    readout = recording.readout
    assert readout is not None and readout.dim() == 3, "only for a model with logits for each token"
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
    """At each position the token with the highest logit, except the answer's own token."""
    found = []
    for some, here in zip(states.detach().split(POSITIONS), ids.split(POSITIONS), strict=True):
        logits = some @ weight.T.to(some) + bias.to(some)
        found.append(logits.scatter(1, here[:, None], -torch.inf).argmax(1))
    return torch.cat(found)


# Shares ---------------------------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """The contributions: rows are sums of targets, columns groups of inputs.

    Attributes:
        scores: (row, group).
        bias: The contribution of the biases to each row.
        values: The value of each row: its scores and its bias sum to it.
        engine: How it was computed, in words.
        bias_from: How the bias was found.
        sink: The part of each row's bias that comes from a held attention sink; None if none is held.
    """

    scores: Tensor
    bias: Tensor
    values: Tensor
    engine: str
    bias_from: str
    sink: Tensor | None = None


def cheaper(n_rows: int, n_groups: int) -> Engine:
    """The engine that takes fewer passes; a push of zero gives the bias."""
    return "pushes" if n_groups + 1 < n_rows else "pulls"


def shares(
    operator: FrozenOperator, targets: Targets, rows: Tensor, groups: Sequence[Group], engine: Engine | None = None
) -> Shares:
    """Rows against groups of inputs.

    Args:
        operator: T of prompt and answer.
        targets: One for each token of the answer.
        rows: (row, answer token): the weight of each token's target in each row.
        groups: Disjoint groups that cover the inputs.
        engine: ``"pulls"`` or ``"pushes"``; the cheaper one if None.
    """
    readout = operator.recording.readout
    assert readout is not None, "only for a model with a head"
    values = rows @ (targets.read(readout[0].detach().to(rows)) + targets.constants).to(rows)
    engine = engine or cheaper(len(rows), len(groups))
    found = (_pulled if engine == "pulls" else _pushed)(operator, targets, rows, groups, values)
    end = operator.recording.bias_of_sinks(operator.span, operator.heads, to_logits=True)
    return found if end is None else found._replace(sink=rows @ targets.read(end[0]).to(rows))


def _pulled(
    operator: FrozenOperator, targets: Targets, rows: Tensor, groups: Sequence[Group], values: Tensor
) -> Shares:
    recording = operator.recording
    readout = recording.readout
    assert readout is not None, "only for a model with a head"
    parts = in_parts(rows, TOGETHER, lambda some: operator.pull_from_head(targets.cotangents(some, readout)))
    by_token = torch.cat([(pulled.to(rows) * operator.input.to(rows)).sum(-1) for pulled in parts])
    n_before = recording.split(0)  # tokens of an encoder
    if bool(by_token[:, n_before + int(targets.positions[-1]) + 1 :].any()):
        raise MethodError(
            f"`{recording.name}` is not causal, so an answer cannot be attributed to the tokens before it. Use "
            "`tensor.in_class` on the whole text."
        )
    scores = group_sums(by_token, groups)
    passes = f"{len(rows)} pull{'s'[: len(rows) != 1]}"
    return Shares(scores, values - in_float64(by_token).sum(1).to(rows), values, passes, BY_COMPLETENESS)


def _pushed(
    operator: FrozenOperator, targets: Targets, rows: Tensor, groups: Sequence[Group], values: Tensor
) -> Shares:
    x = operator.input

    def push(some: Tensor) -> Tensor:
        """The targets (push, target) of the linear part applied to the inputs of some groups alone."""
        alone = x.new_zeros(len(some), *x.shape)
        for state, k in zip(alone, some.tolist(), strict=True):
            tokens = list(groups[k].tokens)
            state[tokens] = x[tokens]
        return targets.read(operator.push_to_head(alone, linear=True))

    pushed = torch.cat(in_parts(torch.arange(len(groups)), TOGETHER, push)).to(rows)
    bias = rows @ (
        targets.read(operator.push_to_head(0 * operator.input[None])).to(rows)[0] + targets.constants.to(rows)
    )
    return Shares(rows @ pushed.T, bias, values, f"{len(groups) + 1} pushes", "a push of zero")


def through(found: Shares, n_prompt_groups: int) -> Tensor:
    r"""Token rows, with contributions of the answer's own tokens traced to the prompt: $(I - A)^{-1} P$.

    Rows are divided by their totals of magnitudes, $|A| + |P| + |bias|$, and multiplied by them again at the end. A is
    strictly lower, so that the inverse is a finite sum. This is a convention: the rows do not sum to the target.

    Args:
        found: Rows are the tokens of an answer, columns groups of the prompt and then each of these tokens.
        n_prompt_groups: How many of the columns are the prompt's.
    """
    scores = in_float64(found.scores)
    # (token, 1): all magnitudes of a row, by which it is divided
    totals = scores.abs().sum(1, keepdim=True) + in_float64(found.bias).abs()[:, None]
    parts = scores / totals.clamp_min(torch.finfo(torch.float64).tiny)
    prompt, answer = parts[:, :n_prompt_groups], parts[:, n_prompt_groups:]
    eye = torch.eye(len(answer), dtype=answer.dtype, device=answer.device)
    return totals * torch.linalg.solve_triangular(eye - answer.tril(-1), prompt, upper=False, unitriangular=True)
