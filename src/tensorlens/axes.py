"""Names of axes, and shapes of tensors.

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


class Range(NamedTuple):
    """Positions `start` to `stop` - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many positions."""
        return self.stop - self.start
