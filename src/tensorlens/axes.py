"""Names of axes, shapes of tensors, and the one place that knows how a matrix is flattened.

Axis glossary, the same words everywhere:

| word          | meaning                                                        | paper |
|---------------|----------------------------------------------------------------|-------|
| `out_token`   | position of an output                                          | i     |
| `in_token`    | position of an input                                           | j     |
| `out_channel` | channel of an output                                           | d     |
| `in_channel`  | channel of an input                                            | e     |
| `token`, `channel` | position and channel where input and output play no part  | l, d  |
| `head`        | attention head                                                 | h     |
| `block`       | Transformer block, counted from 0                              | n     |

Results are always ordered (output, input), as in the paper's arrow i ← j.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

Hidden = Float[Tensor, "token channel"]
"""A hidden state X of shape (L, D)."""

HiddenBatch = Float[Tensor, "*batch token channel"]
"""One hidden state, or several along leading axes."""

TensorSlice = Float[Tensor, "out_channel in_token in_channel"]
"""T[i], the slice for one output token."""

FullTensor = Float[Tensor, "out_token out_channel in_token in_channel"]
"""The whole attention tensor T."""

TokenMatrix = Float[Tensor, "out_token in_token"]
"""A token map: one row per output, one column per input."""

Attention = Float[Tensor, "head out_token in_token"]
"""Attention probabilities A_h of one block."""


class Range(NamedTuple):
    """Positions `start` to `stop` - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many positions."""
        return self.stop - self.start


def vec(x: Float[Tensor, "token channel"]) -> Float[Tensor, "token_channel"]:  # noqa: UP037
    r"""Flatten a hidden state row by row: index $l \cdot D + d$.

    Paper: its vec stacks columns, so that $\mathrm{vec}[AXB] = (B^\top \otimes A)\,\mathrm{vec}[X]$.
    Torch stores rows, where the same operator is $A \otimes B^\top$.
    """
    return x.reshape(-1)


def unvec(v: Float[Tensor, "token_channel"], n_tokens: int) -> Float[Tensor, "token channel"]:  # noqa: UP037
    """Undo `vec` for a hidden state of `n_tokens` rows."""
    return v.reshape(n_tokens, -1)


def unfold(tensor: FullTensor) -> Float[Tensor, "rows columns"]:
    r"""The L·D × L·D matrix $T_{mat}$ with $\mathrm{vec}[T(X)] = T_{mat}\,\mathrm{vec}[X]$ (Eq. 5), rows first."""
    n_out, d_out, n_in, d_in = tensor.shape
    return tensor.reshape(n_out * d_out, n_in * d_in)


def fold(matrix: Float[Tensor, "rows columns"], n_tokens: int) -> FullTensor:
    """Undo `unfold` for a square operator on `n_tokens` tokens."""
    n_channels = matrix.shape[0] // n_tokens
    return matrix.reshape(n_tokens, n_channels, n_tokens, n_channels)
