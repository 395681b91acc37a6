r"""What a path through a block is made of: maps that act on every token alone.

A path leads from a source (the block's input, what attention mixed, the residual stream) to a slot, and is a chain of
pieces. Each makes of the rows x (row, channel), where a row is a token of a sample:

| kind     | of row l                           | shape of `by`          |
|----------|------------------------------------|------------------------|
| `weight` | $W x_l$, one matrix for all        | (out channel, channel) |
| `scale`  | $g \odot x_l$                      | (channel,) or ()       |
| `token`  | $t_l\,x_l$                         | (row,)                 |
| `gain`   | $\psi_l \odot x_l$                 | (row, channel)         |
| `take`   | some channels, in another order    | (out channel,)         |
| `centre` | $x_l - \mathrm{mean}(x_l)$         |                        |
| `mean`   | $\mathrm{mean}(x_l)$, one channel  |                        |

A norm whose statistic is held is a `centre` (or none), a `token` and a `scale`; an activation is a `gain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["weight", "scale", "token", "gain", "take", "centre", "mean"]

_NOTHING = torch.empty(0)


@dataclass(frozen=True, eq=False)
class Piece:
    """One map of single tokens. Two pieces are the same if they are the same object.

    Attributes:
        kind: What it does.
        by: What it does it with.
        slot: The slot that it filled.
    """

    kind: Kind
    by: Tensor = _NOTHING
    slot: int = -1


Pieces = tuple[Piece, ...]


class Path(NamedTuple):
    """A chain of pieces from a slot."""

    source: int
    pieces: Pieces = ()

    @property
    def has_weights(self) -> bool:
        """Whether it goes through a matrix."""
        return any(piece.kind == "weight" for piece in self.pieces)
