"""Which inputs a picture sets aside: those asked for, or a decoder's first token where it exceeds all others.

Attention that has nothing to look at looks at the first token; its score then says little, and hides the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def sink_columns(scores: Tensor, meta: Mapping[str, Any]) -> tuple[int, ...]:
    """The inputs to leave out of the colours.

    Args:
        scores: (out_token, in_token).
        meta: Of the map: `set_aside` if someone chose, `causal` if it is known.
    """
    n_out, n_in = scores.shape
    chosen = meta.get("set_aside")
    if isinstance(chosen, list):
        return tuple(j for j in chosen if type(j) is int and 0 <= j < n_in)
    is_by_token = meta.get("grid") is None and "grouped" not in meta
    if n_out == 0 or n_in < 3 or not is_by_token or not _is_causal(scores, meta):
        return ()
    rows = (scores if n_out == 1 else scores[1:]).abs().nan_to_num(nan=0.0)
    drowned = rows[:, 0] > rows[:, 1:].amax(1)
    return (0,) if int(drowned.sum()) * 2 > len(rows) else ()


def _is_causal(scores: Tensor, meta: Mapping[str, Any]) -> bool:
    """As `meta` says; if it says nothing, whether nothing stands above the diagonal of a square map."""
    if isinstance(meta.get("causal"), bool):
        return meta["causal"]
    is_square = scores.shape[0] == scores.shape[1] > 1
    return is_square and not bool(torch.triu(scores, 1).nan_to_num(nan=1.0).any())
