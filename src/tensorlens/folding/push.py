r"""Every token alone through all blocks, of many samples at once: $T_{oj} x_j$ for all j by matrix products alone.

This is the transpose of `pull`: with the same matrices a row x_l at token l becomes

    y_l = x_l + (mix(W_value x) W_out)_l,   result_l = s_l y_l + W_down (\psi_l W_up y_l)

(in a parallel block both branches take x). What token j of a causal model carries stays zero before position j. So the
tokens go in bands, each with the positions from its first token on: about half of the work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens.folding.fold import FoldedBlock, HeldFactors, fold_factors
from tensorlens.folding.pull import FoldedRows
from tensorlens.folding.rebuild import held_attention, held_factors, norm_scale, rebuild_norm
from tensorlens.freezing.places import Place
from tensorlens.freezing.recording import Recording
from tensorlens.memory import fitting

BAND = {"cuda": 16, "cpu": 8}
"""Tokens in a band: fewer save more of the work above the diagonal, more make larger products."""

INNER_BYTES = {"cuda": 2**30, "cpu": 2**24}
"""Memory for what the feed-forward makes of as many samples as go through a block at a time."""


class Band(NamedTuple):
    """What some tokens carry, each by itself, at the positions from `start` on."""

    rows: Float[Tensor, "sample position token channel"]
    start: int


@torch.no_grad()
def push_each_token(
    folded: FoldedRows, recording: Recording, out_tokens: Int[Tensor, " sample"]
) -> Float[Tensor, "sample token channel"]:
    r"""$T_{oj} x_j$ for each token j of each sample, at the sample's own output o.

    Args:
        folded: Of one of the samples: its weights serve all of them.
        recording: Of all samples together, all blocks.
        out_tokens: The outputs.
    """
    x = recording.states[0].to(folded.dtype)
    is_causal, n_tokens = not _looks_ahead(folded, recording), x.shape[1]
    most = fitting(x.nbytes, n_tokens, x.device)  # every token takes a state of its own
    ends = [
        _push_some(folded, recording, _bands(x, tokens, is_causal=is_causal), out_tokens.to(x.device))
        for tokens in (range(n_tokens)[first : first + most] for first in range(0, n_tokens, most))
    ]
    return torch.cat(ends, 1)


def _looks_ahead(folded: FoldedRows, recording: Recording) -> bool:
    """Whether a token of any sample attends to a later one. Asked first: from here on nothing waits for the device."""
    ahead = [held_attention(recording, parts).triu(1).any() for parts in folded.parts.values()]
    return bool(torch.stack(ahead).any())


def _push_some(folded: FoldedRows, recording: Recording, bands: list[Band], at: Tensor) -> Tensor:
    """The ends of some bands."""
    n_samples, inner_bytes = len(at), fitting(1, INNER_BYTES.get(at.device.type, 2**24), at.device)
    for n in range(recording.n_blocks):
        block, is_last = _by_column(folded.block(n)), n == recording.n_blocks - 1
        held = fold_factors(block, folded.parts[n], held_factors(recording, folded.parts[n], together=True))
        held = _by_sample(held, n_samples)
        bands = [_through(block, held, band, inner_bytes, at if is_last else None) for band in bands]
    ends = torch.cat([torch.where((at >= band.start)[:, None, None], band.rows[:, 0], 0) for band in bands], 1)
    if folded.tail is not None:
        scale = norm_scale(recording, Place(recording.n_blocks - 1), folded.tail)
        assert scale is not None, "the survey found the final norm by its scale"
        scale = scale.view(n_samples, -1)[torch.arange(n_samples, device=at.device), at]
        ends = rebuild_norm(folded.tail, scale[:, None].expand(ends.shape[:2]), ends, shifted=False)
    return ends


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


def _by_sample(held: HeldFactors, n_samples: int) -> HeldFactors:
    """With an axis for samples in front."""
    gain, skip, mix = held
    return HeldFactors(
        gain.unflatten(0, (n_samples, -1)), None if skip is None else skip.unflatten(0, (n_samples, -1)), mix
    )


def _through(block: FoldedBlock, held: HeldFactors, band: Band, inner_bytes: int, only: Tensor | None) -> Band:
    """One band through one block; to the positions `only`, one for each sample, if they are given."""
    rows, start = band
    n_samples = len(rows)
    gain, mix = held.gain[:, start:], held.mix[:, :, start:, start:]
    skip = None if held.skip is None else held.skip[:, start:]
    here = rows
    if only is not None:
        places = (only - start).clamp(min=0)
        each = torch.arange(n_samples, device=rows.device)
        here, gain = rows[each, places][:, None], gain[each, places][:, None]
        mix, skip = mix[each, :, :, places][..., None], None if skip is None else skip[each, places][:, None]
    per_sample = here[0, :, :, 0].numel() * gain.shape[-1] * rows.element_size()
    most = max(1, inner_bytes // per_sample)
    for first in range(0, n_samples, most):
        part = slice(first, first + most)
        _step(block, HeldFactors(gain[part], None if skip is None else skip[part], mix[part]), rows[part], here[part])
    return Band(here, start)


def _step(block: FoldedBlock, held: HeldFactors, rows: Tensor, here: Tensor) -> None:
    """Replace `here`, rows at the positions asked for, by what the block makes of `rows`, in place."""
    flat = here.flatten(0, 2)
    mixed = _attend(block, held.mix, rows)
    if not block.is_parallel:
        flat.addmm_(mixed, block.out)
    inner = torch.mm(flat, block.up)
    inner.view(*here.shape[:3], -1).mul_(held.gain[:, :, None])
    if held.skip is not None:
        here.mul_(held.skip[:, :, None])
    flat.addmm_(inner, block.down)
    if block.is_parallel:
        flat.addmm_(mixed, block.out)


def _attend(block: FoldedBlock, mix: Tensor, rows: Tensor) -> Tensor:
    """Attention: (sample, position, token, channel) to (sample · out position · token, head · head_channel)."""
    n_samples, n_in, n_tokens, _ = rows.shape
    n_kv, n_out = block.n_kv_heads, mix.shape[-1]
    values = torch.mm(rows.flatten(0, 2), block.value).view(n_samples, n_in, n_tokens, n_kv, -1)
    by_head = values.permute(0, 3, 1, 2, 4).reshape(n_samples * n_kv, n_in, -1)
    weights = mix.mT.reshape(n_samples * n_kv, -1, n_in)  # query heads that share values follow each other
    mixed = torch.bmm(weights, by_head).view(n_samples, n_kv, -1, n_out, n_tokens, values.shape[-1])
    return mixed.permute(0, 3, 4, 1, 2, 5).reshape(n_samples * n_out * n_tokens, -1)
