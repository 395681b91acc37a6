r"""Properties of the tensor itself, the paper's open question: rank, entropy, sparsity and bias, over ranges of blocks.

For one output i and each range of blocks, of the slice T[i] and of each of its D × D blocks T[i,:,j,:]:

- stable rank $\Vert\cdot\Vert_F^2/\Vert\cdot\Vert_2^2$ and effective rank $\exp H(\sigma/\sum\sigma)$;
- token perplexity, $\exp$ of the entropy of $\Vert T_{ij}\Vert_F^2$ over j: how many inputs share the output;
- sparsity (Hoyer) of $\Vert T_{ij}\Vert_F$ over tokens, and of all entries of the slice;
- share of the bias, $\langle y_i, B_i\rangle/\Vert y_i\Vert^2$, with y the state at the end of the range.

And T collapsed with both embedding matrices, which input word supports which output word: for an input j and an output
i, $U\,T_{ij}\,E^\top$ has an entry for each pair of words: how much the word v at j, by its embedding $e_v$, adds to
the logit of the word w at i, with the pass kept fixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from tensorlens.axes import TensorSlice
from tensorlens.errors import InputError, MethodError
from tensorlens.operators.operator import check_token
from tensorlens.operators.spectrum import effective_rank, hoyer_sparsity, perplexity, singular_values, stable_rank
from tensorlens.tensor import AttentionTensor
from tensorlens.tolerances import in_float64

KINDS = ("single", "prefix", "suffix")
LINES = ("stable_rank", "effective_rank", "token_perplexity", "token_sparsity", "entry_sparsity", "bias_share")
CHUNK = 1024
"""Rows of the vocabulary at a time: all pairs of words at once would not fit in memory."""


class BlockRange(NamedTuple):
    """Blocks `start` to `stop` - 1, and why: ``"single"`` block n, ``"prefix"`` 0 to n, ``"suffix"`` n to the end."""

    kind: str
    start: int
    stop: int


def block_ranges(n_blocks: int, kinds: Iterable[str] = KINDS, stride: int = 1) -> list[BlockRange]:
    """Ranges of blocks to compare.

    Args:
        n_blocks: Number of blocks.
        kinds: Some of `KINDS`.
        stride: Blocks from one border to the next; the ends are always borders.
    """
    borders = sorted({*range(0, n_blocks, stride), n_blocks})
    starts, stops = borders[:-1], borders[1:]
    made = {
        "single": [(n, n + 1) for n in starts],
        "prefix": [(0, n) for n in stops],
        "suffix": [(n, n_blocks) for n in starts],
    }
    unknown = next((kind for kind in kinds if kind not in made), None)
    if unknown is not None:
        raise InputError(f"Expected ranges of kind {', '.join(made)}; got {unknown!r}.")
    return [BlockRange(kind, *ends) for kind in kinds for ends in made[kind]]


def tensor_properties(
    T: AttentionTensor, out_token: int | None = None, ranges: list[BlockRange] | None = None
) -> list[dict[str, Any]]:
    """Measure each range of blocks at one output.

    Args:
        T: The tensor of a whole model.
        out_token: The output; by default the last token of a language model and the first of any other model.
        ranges: As `block_ranges` makes them; single blocks, prefixes and suffixes by default.

    Returns:
        One record for each range, plain data.
    """
    by_default = T.shape[0] - 1 if T.operator.recording.head is not None else 0
    out_token = by_default if out_token is None else check_token(out_token, T.shape[0])
    return [_measure(T, one, out_token) for one in (block_ranges(T.n_blocks) if ranges is None else ranges)]


def _measure(T: AttentionTensor, blocks: BlockRange, out_token: int) -> dict[str, Any]:
    part = T.blocks(blocks.start, blocks.stop)
    output, bias = in_float64(part.output[out_token]), in_float64(part.bias[out_token])
    return {
        **blocks._asdict(),
        "out_token": out_token,
        **slice_properties(part.rows(out_token)),
        "bias_share": float((output * bias).sum() / output.square().sum().clamp_min(1e-300)),
        "bias_size": float(bias.norm() / output.norm().clamp_min(1e-300)),
    }


def slice_properties(rows: TensorSlice) -> dict[str, Any]:
    """Rank, entropy and sparsity of a slice T[i], and the ranks of its D × D blocks by input token."""
    by_token = rows.transpose(0, 1)  # (in_token, out_channel, in_channel)
    norms = in_float64(by_token).square().sum((1, 2)).sqrt()
    whole = singular_values(rows.flatten(1))
    pairs = [singular_values(block) for block in by_token]  # one at a time: a float64 copy would be twice the slice
    return {
        "frobenius": float(norms.norm()),
        "stable_rank": float(stable_rank(whole)),
        "effective_rank": float(effective_rank(whole)),
        "token_perplexity": float(perplexity(norms.square())),
        "token_sparsity": float(hoyer_sparsity(norms)),
        "entry_sparsity": float(hoyer_sparsity(in_float64(rows.flatten()))),
        "pair_norm": norms.tolist(),
        "pair_stable_rank": [float(stable_rank(one)) for one in pairs],
        "pair_effective_rank": [float(effective_rank(one)) for one in pairs],
    }


def mean_properties(samples: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The same records averaged over inputs; what belongs to a token of an input is left out."""
    found = []
    for records in zip(*samples, strict=True):
        same = {name: records[0][name] for name in ("kind", "start", "stop")}
        numbers = {
            name: sum(record[name] for record in records) / len(records) for name in (*LINES, "frobenius", "bias_size")
        }
        pairs = {
            f"mean_{name}": sum(_weighted(record, name) for record in records) / len(records)
            for name in ("pair_stable_rank", "pair_effective_rank")
        }
        found.append(same | numbers | pairs | {"n_inputs": len(records)})
    return found


def _weighted(record: dict[str, Any], name: str) -> float:
    """Mean over input tokens, weighted by the squared norms of their blocks: the rank of a zero block means nothing."""
    weights = [norm**2 for norm in record["pair_norm"]]
    return sum(w * x for w, x in zip(weights, record[name], strict=True)) / max(sum(weights), 1e-300)


# Pairs of words -------------------------------------------------------------------------------------------------------


def word_pairs(T: AttentionTensor, in_token: int, out_token: int = -1, k: int = 10) -> list[tuple[str, str, float]]:
    r"""The pairs of words with the largest $u_w^\top T_{ij} e_v$: the word v at the input, the word w at the output.

    Args:
        T: At any input of a language model.
        in_token: The input j.
        out_token: The output i.
        k: How many pairs.

    Returns:
        Word at the input, word at the output and score, the largest first. If something comes between the
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
    block, best = T.rows(i)[:, j], list[tuple[float, int, int]]()  # (out_channel, in_channel); score, output, input
    with torch.no_grad():
        pulled = head.weight.to(block) @ block  # (word at the output, in_channel)
        for start in range(0, len(pulled), CHUNK):
            scores = in_float64((pulled[start : start + CHUNK] @ table.to(block).T).flatten())
            values, places = (one.tolist() for one in scores.topk(min(k, len(scores))))
            found = zip(values, (divmod(place, len(table)) for place in places), strict=True)
            best = sorted([*best, *((value, start + w, v) for value, (w, v) in found)], reverse=True)[:k]
    name: Any = T.context.classes.name if T.context.classes is not None else str
    return [(name(v), name(w), score) for score, w, v in best]
