r"""Every token alone through all blocks, of many samples at once: $T_{oj} x_j$ for all j by matrix products alone.

This is the transpose of `pull`: with the same matrices a row x_l at token l becomes

    y_l = a_l x_l + W_out (γ_l mix(W_value x)_l),   result_l = s_l y_l + W_down (ψ_l W_up y_l)

(in a parallel block both branches take x). What token j of a causal model carries stays zero before position j. So the
tokens go in bands, each with the positions from its first token on: about half of the work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens.memory import BYTES_OF_INNER, bytes_on, fitting
from tensorlens.operators.folding.fold import Factors, FoldedBlock
from tensorlens.operators.folding.pull import FoldedRows

BAND = {"cuda": 16, "cpu": 8}
"""Tokens in a band: fewer save more of the work above the diagonal, more make larger products."""


class Band(NamedTuple):
    """What some tokens carry, each by itself, at the positions from `start` on."""

    rows: Float[Tensor, "sample position token channel"]
    start: int


@torch.no_grad()
def push_each_token(folded: FoldedRows, out_tokens: Int[Tensor, " sample"]) -> Float[Tensor, "sample token channel"]:
    r"""$T_{oj} x_j$ for each token j of each sample that was recorded, at the sample's own output o.

    Args:
        folded: The folded blocks of a recording, from the first on.
        out_tokens: The outputs.
    """
    folded.check()
    x = folded.recording.states[folded.span.start].to(folded.dtype)
    is_causal, n_tokens = not _looks_ahead(folded), x.shape[1]
    most = fitting(x.nbytes, n_tokens, x.device)  # every token takes a state of its own
    ends = [
        _push_some(folded, _bands(x, tokens, is_causal=is_causal), out_tokens.to(x.device))
        for tokens in (range(n_tokens)[first : first + most] for first in range(0, n_tokens, most))
    ]
    return torch.cat(ends, 1)


def _looks_ahead(folded: FoldedRows) -> bool:
    """Whether a token of any sample attends to a later one. Asked first: from here on nothing waits for the device."""
    return any(last > i for n in range(*folded.span) for i, last in enumerate(folded.block(n).factors.reach[1]))


def _push_some(folded: FoldedRows, bands: list[Band], at: Tensor) -> Tensor:
    """The ends of some bands."""
    inner_bytes = fitting(1, bytes_on(at.device, BYTES_OF_INNER), at.device)
    for n in range(*folded.span):
        block, is_last = _by_column(folded.block(n)), n == folded.span.stop - 1
        bands = [_through(block, band, inner_bytes, at if is_last else None) for band in bands]
    return torch.cat([torch.where((at >= band.start)[:, None, None], band.rows[:, 0], 0) for band in bands], 1)


def _bands(x: Tensor, tokens: range, *, is_causal: bool) -> list[Band]:
    """Each token's own state at its own position, and zeros elsewhere; of a causal model from the first one on."""
    n_samples, n_tokens, n_channels = x.shape
    width = BAND.get(x.device.type, 8) if is_causal else len(tokens)
    found = []
    for first in tokens[::width]:
        some, start = x[:, first : min(first + width, tokens.stop)], first if is_causal else 0
        rows = x.new_zeros(n_samples, n_tokens - start, some.shape[1], n_channels)
        rows.diagonal(start - first, dim1=1, dim2=2).copy_(some.mT)
        found.append(Band(rows, start))
    return found


def _by_column(block: FoldedBlock) -> FoldedBlock:
    """With weights that lie column by column on a GPU: its matrix units read the summed axis fastest."""
    if block.up.device.type != "cuda":
        return block
    up, down, out, value = (w.T.contiguous().T for w in (block.up, block.down, block.out, block.value))
    return replace(block, up=up, down=down, out=out, value=value)


def _through(block: FoldedBlock, band: Band, inner_bytes: int, only: Tensor | None) -> Band:
    """One band through one block; to the positions `only`, one for each sample, if they are given."""
    rows, start = band
    n_samples = len(rows)
    factors = block.factors.changed(lambda factor: factor[:, start:], lambda mix: mix[:, :, start:, start:])
    here = rows
    if only is not None:
        places, each = (only - start).clamp(min=0), torch.arange(n_samples, device=rows.device)
        here = rows[each, places][:, None]
        factors = factors.changed(
            lambda factor: factor[each, places][:, None], lambda mix: mix[each, :, :, places][..., None]
        )
    per_sample = here[0, :, :, 0].numel() * block.up.shape[1] * rows.element_size()
    most = max(1, inner_bytes // per_sample)
    for first in range(0, n_samples, most):
        part = slice(first, first + most)
        some = factors.changed(lambda factor, part=part: factor[part], lambda mix, part=part: mix[part])
        _step(block, some, rows[part], here[part])
    return Band(here, start)


def _step(block: FoldedBlock, factors: Factors, rows: Tensor, here: Tensor) -> None:
    """Replace `here`, rows at the positions asked for, by what the block makes of `rows`, in place."""
    flat = here.flatten(0, 2)
    mixed = _attend(block, factors, rows)
    if not block.is_parallel:
        _scale(here, factors.carry)
        flat.addmm_(mixed, block.out)
    inner = torch.mm(flat, block.up)
    _scale(inner.view(*here.shape[:3], -1), factors.gain)
    _scale(here, factors.skip)
    flat.addmm_(inner, block.down)
    if block.is_parallel:
        flat.addmm_(mixed, block.out)


def _scale(rows: Tensor, factor: Tensor | None) -> None:
    """Multiply (sample, position, token, …) by a factor of each position, in place."""
    if factor is not None:
        rows.mul_(factor[:, :, None])


def _attend(block: FoldedBlock, factors: Factors, rows: Tensor) -> Tensor:
    """Attention: (sample, position, token, channel) to (sample · out position · token, head · head_channel)."""
    n_samples, n_in, n_tokens, _ = rows.shape
    n_kv, n_out = block.n_kv_heads, factors.mix.shape[-1]
    values = torch.mm(rows.flatten(0, 2), block.value).view(n_samples, n_in, n_tokens, n_kv, -1)
    by_head = values.permute(0, 3, 1, 2, 4).reshape(n_samples * n_kv, n_in, -1)
    weights = factors.mix.mT.reshape(n_samples * n_kv, -1, n_in)  # query heads that share values follow each other
    mixed = torch.bmm(weights, by_head).view(n_samples, n_kv, -1, n_out, n_tokens, values.shape[-1])
    mixed = mixed.permute(0, 3, 4, 1, 2, 5).reshape(n_samples, n_out, n_tokens, -1)
    _scale(mixed, factors.gate)
    return mixed.flatten(0, 2)
