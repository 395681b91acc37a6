"""Collapses: from an attention tensor to a number for each pair of tokens. Mathematics only.

Each function takes an operator and tensors and gives one row for each output asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import Hidden, TokenMatrix
from tensorlens.errors import InputError
from tensorlens.operators.base import TensorOperator
from tensorlens.operators.norms import frobenius_norms, spectral_norms

NormKind = Literal["frobenius", "spectral"]

TOKENS_TOGETHER = 2**14
"""Tokens of all the inputs that are replayed together."""


def norm(T: TensorOperator, out_tokens: Sequence[int], kind: NormKind = "frobenius") -> TokenMatrix:
    r"""$T^{Norm}_{i←j} = \lVert T_{[i,:,j,:]} \rVert$ (Eq. 21), exact, streamed.

    Convention: the paper writes $\lVert·\rVert_2$ of a D×D block, which may mean either norm. Frobenius is the default;
    spectral is what Proposition 1 speaks of.
    """
    if kind not in ("frobenius", "spectral"):
        raise InputError(f"`norm` must be 'frobenius' or 'spectral'; got {kind!r}.")
    return frobenius_norms(T, out_tokens) if kind == "frobenius" else spectral_norms(T, out_tokens)


def in_out(T: TensorOperator, x_in: Hidden, x_out: Hidden, out_tokens: Sequence[int]) -> TokenMatrix:
    r"""$T^{IO}_{i←j} = X^N_{[i]} · T_{[i,:,j,:]} · X^0_{[j]}$ (Eq. 22): one backward pass for each output.

    Rows sum to $⟨X^N_i, X^N_i - B_i⟩$.
    """
    scores = x_in.new_zeros(len(out_tokens), len(x_in))
    for piece in T.pull_outputs(out_tokens, x_out[list(out_tokens), None]):
        tokens = slice(*piece.tokens)
        scores[slice(*piece.outputs), tokens] = weigh(piece.rows.transpose(0, 1).to(x_in), x_in[tokens])
    return scores


def weigh(pulled: Float[Tensor, "row token channel"], x_in: Hidden) -> TokenMatrix:
    r"""$⟨(T^\top u)_j, x_j⟩$ for each row and input token."""
    return (pulled * x_in).sum(-1)


def contribution(T: TensorOperator, x_in: Hidden, out_tokens: Sequence[int]) -> TokenMatrix:
    r"""$\lVert T_{[i,:,j,:]} · X^0_{[j]} \rVert_2$: unlike the norm, it depends on the token that is there.

    One replay for each input token, many of them together, gives all outputs.
    """
    parts = []
    for some in torch.arange(len(x_in), device=x_in.device).split(max(1, TOKENS_TOGETHER // len(x_in))):
        alone = x_in.new_zeros(len(some), *x_in.shape)  # each token by itself
        alone[torch.arange(len(some)), some] = x_in[some]
        parts.append(T.apply(alone)[:, list(out_tokens)].norm(dim=-1))
    return torch.cat(parts).T


def bias_share(x_out: Hidden, bias: Hidden, out_tokens: Sequence[int]) -> Float[Tensor, " out_token"]:
    r"""$⟨X^N_i, B_i⟩ / \lVert X^N_i \rVert^2$: how much of each output the bias carries."""
    rows = list(out_tokens)
    return (x_out[rows] * bias[rows]).sum(-1) / x_out[rows].square().sum(-1)
