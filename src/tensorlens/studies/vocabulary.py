r"""T collapsed with both embedding matrices: which input word supports which output word?

For an input j and an output i, $U\,T_{ij}\,E^\top$ has an entry for each pair of words: how much the word v at j, by
its embedding $e_v$, adds to the logit of the word w at i, with the pass kept fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.models.precision import in_float64
from tensorlens.operators.operator import check_token
from tensorlens.tensor import AttentionTensor

CHUNK = 1024
"""Rows of the vocabulary at a time: all pairs at once would not fit in memory."""


def word_pairs(T: AttentionTensor, in_token: int, out_token: int = -1, k: int = 10) -> list[tuple[str, str, float]]:
    r"""The pairs of words with the largest $u_w^\top T_{ij} e_v$: the word v at the input, the word w at the output.

    Args:
        T: At any input of a language model.
        in_token: The input j.
        out_token: The output i.
        k: How many pairs.

    Returns:
        Word at the input, word at the output and score, the largest first. Where something stands between the
        embedding and the first block (a norm, a scale, positions), $e_v$ is the embedding before it.

    Raises:
        MethodError: The model has no embedding or no unembedding of words.
    """
    anatomy = T.operator.recording.anatomy
    table, head = getattr(anatomy.embedding, "weight", None), anatomy.unembedding
    i, j = check_token(out_token, T.shape[0]), check_token(in_token, T.shape[2])
    if table is None or head is None or table.shape[1] != T.shape[3]:
        raise MethodError(
            "Pairs of words need a language model whose embedding and unembedding have the size of the states."
        )
    block = T.rows(i)[:, j]  # (out_channel, in_channel)
    best: list[tuple[float, int, int]] = []
    with torch.no_grad():
        pulled = head.weight.to(block) @ block  # (word at the output, in_channel)
        for start in range(0, len(pulled), CHUNK):
            scores = pulled[start : start + CHUNK] @ table.to(block).T
            best += _largest(scores, start, k)
            best = sorted(best, reverse=True)[:k]
    name: Any = T.context.classes.name if T.context.classes is not None else str
    return [(name(v), name(w), score) for score, w, v in best]


def _largest(scores: Tensor, start: int, k: int) -> list[tuple[float, int, int]]:
    """Score, output word and input word of the k largest entries."""
    values, places = in_float64(scores.flatten()).topk(min(k, scores.numel()))
    n = scores.shape[1]
    return [(float(v), start + p // n, p % n) for v, p in zip(values, places.tolist(), strict=True)]
