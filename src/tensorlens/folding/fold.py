r"""One frozen block as a handful of matrices: what the adjoint needs, with every norm folded in.

Every layout is, for a column of cotangents $c_l$ at token l,

    y_l = P_l c_l,   u_l = W_out (y_l, or c_l in a parallel block),   m = mix(u),   result_l = y_l + W_value m_l

where only `mix` moves anything between tokens. $P_l = diag(s_l) + W_{up}\,diag(\psi_l)\,W_{down}$; centring and gains
of norms are inside the weights, their scales inside s, ψ and the attention matrices. Queries and keys do not appear.
Weights act on columns (y = W c with W as (in, out)), because cotangents travel backwards.

The two norms around a post-LN feed-forward, passed by the residual, are a diagonal and two outer products (centring):
the diagonal is s, and the products are two more inner channels. So P has one form everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tensorlens.folding.parts import BlockParts, NormPart, Projection
from tensorlens.folding.rebuild import Factors
from tensorlens.models.precision import at_least_float32

ALIGNED = 16
"""Inner channels are added in multiples of this: 16 numbers of any type used here start on 16 bytes."""

DOWN_BY_COLUMN = {"cuda": True, "cpu": False}
"""Whether W_down lies column by column in memory: which way round the matrix units like it has to be measured."""


class Transposes(NamedTuple):
    """Weights of a block for products with rows: W_up as (inner, channel), and so on."""

    up: Tensor
    down: Tensor
    out: Tensor
    value: Tensor


class HeldFactors(NamedTuple):
    """ψ, s and the mixing attention of a block as in `FoldedBlock`; of several samples as in `rebuild.Factors`."""

    gain: Tensor
    skip: Tensor | None
    mix: Tensor


@dataclass(frozen=True, kw_only=True)
class FoldedBlock:
    """The matrices of one block.

    Attributes:
        up: W_up (channel, inner).
        down: W_down (inner, channel).
        gain: ψ with the norms' scales, (token, inner).
        skip: s (token, channel), or None for ones.
        out: W_out (head · head_channel, channel).
        value: W_value (channel, kv_head · head_channel).
        mix: Attention with the norms' scales, (head, in_token, out_token).
        is_parallel: Whether attention takes the block's cotangents and not those behind the feed-forward.
        sees_all: Whether every output counts as seeing every token: looking would wait for the device.
    """

    up: Tensor
    down: Tensor
    gain: Tensor
    skip: Tensor | None
    out: Tensor
    value: Tensor
    mix: Tensor
    is_parallel: bool
    sees_all: bool = False

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.mix.shape[0]

    @property
    def n_bytes(self) -> int:
        """Memory of all the matrices."""
        values = [getattr(self, field.name) for field in fields(self)]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    @cached_property
    def reach(self) -> tuple[list[int], list[int]]:
        """First and last input that each output attends to in any head, itself included."""
        n = self.mix.shape[-1]
        if self.sees_all:
            return [0] * n, [n - 1] * n
        touched = (self.mix != 0).any(0) | torch.eye(n, dtype=torch.bool, device=self.mix.device)
        last = n - 1 - touched.flip(0).int().argmax(0)
        return touched.int().argmax(0).tolist(), last.tolist()

    # Views, made once: with few cotangents, making them takes longer than the products.

    @cached_property
    def transposed(self) -> Transposes:
        """The weights as they act on rows."""
        return Transposes(up=self.up.T, down=self.down.T, out=self.out.T, value=self.value.T)

    @cached_property
    def row_factors(self) -> tuple[Tensor, Tensor | None]:
        """ψ and s with an axis for the cotangents: (token, 1, …)."""
        return self.gain[:, None], None if self.skip is None else self.skip[:, None]

    @cached_property
    def n_kv_heads(self) -> int:
        """Value heads."""
        return self.value.shape[1] * self.n_heads // self.out.shape[0]

    @cached_property
    def d_head(self) -> int:
        """Channels of a head."""
        return self.out.shape[0] // self.n_heads

    @cached_property
    def out_heads(self) -> Tensor:
        """W_out as it acts on rows, by head: (head, channel, head_channel)."""
        return self.out.unflatten(0, (self.n_heads, -1)).mT

    @cached_property
    def value_heads(self) -> Tensor:
        """W_value as (head, head_channel, channel), value heads repeated for the query heads that share them."""
        by_head = self.value.T.unflatten(0, (self.n_kv_heads, -1))
        return by_head.repeat_interleave(self.n_heads // len(by_head), 0) if len(by_head) != self.n_heads else by_head


def fold_block(parts: BlockParts, factors: Factors, dtype: torch.dtype, heads: Tensor | None = None) -> FoldedBlock:
    """Put norms, scales and multipliers of heads into the weights and the attention of a block.

    Args:
        parts: The block's weights.
        factors: What the recording holds of it.
        dtype: Type of the matrices; they are folded in float32 or better.
        heads: A multiplier for each head, or None.
    """
    post_ln = parts.layout == "post_ln"
    before, after = (parts.norm_1, parts.norm_2) if post_ln else (parts.norm_2, parts.post_norm_2)
    ffn, r, branches = parts.feed_forward, parts.residual_multiplier, _branches(parts, factors)
    up = torch.cat([before_weight(projection, before) for projection, _ in branches], 1)
    down = after_weight(ffn.down, after, parts.layer_scale_2, r).repeat(len(branches), 1)
    gain, skip = _token_factors(parts, factors, up)
    if post_ln:
        _, outer, inner = _norm_pair(parts.norm_1, parts.norm_2, up)
        up, down = torch.cat([up, outer], 1), torch.cat([down, inner])
    mix = _mixing(factors, "" if post_ln else "norm_1", "post_norm_1", heads)
    return FoldedBlock(
        up=_packed(up, dtype),
        down=_packed(down.T, dtype).T if DOWN_BY_COLUMN.get(down.device.type) else _packed(down, dtype),
        gain=_packed(gain, dtype),
        skip=None if skip is None else _packed(skip, dtype),
        out=_packed(after_weight(parts.out, parts.post_norm_1, parts.layer_scale_1, r), dtype),
        value=_packed(before_weight(parts.value, None if post_ln else parts.norm_1), dtype),
        mix=_packed(mix, dtype),
        is_parallel=parts.layout == "parallel",
    )


def fold_beside(like: FoldedBlock, parts: BlockParts, factors: Factors, heads: Tensor | None = None) -> FoldedBlock:
    """The same block for another sample that was recorded with it: the weights are shared.

    Args:
        like: The block as it was folded for the other sample.
        parts: The block's weights.
        factors: What the recording holds of it for this sample.
        heads: A multiplier for each head, or None.
    """
    held = fold_factors(like, parts, factors, heads)
    return replace(like, gain=held.gain, skip=held.skip, mix=held.mix, sees_all=True)


def fold_factors(like: FoldedBlock, parts: BlockParts, factors: Factors, heads: Tensor | None = None) -> HeldFactors:
    """What of a block is not weights, for another sample or for all that were recorded with it; see `fold_beside`."""
    gain, skip = _token_factors(parts, factors, at_least_float32(like.up[:, :1]))
    mix = _mixing(factors, "" if parts.layout == "post_ln" else "norm_1", "post_norm_1", heads)
    dtype = like.up.dtype
    return HeldFactors(_packed(gain, dtype), None if skip is None else _packed(skip, dtype), _packed(mix, dtype))


def _branches(parts: BlockParts, factors: Factors) -> list[tuple[Projection, Tensor]]:
    """The live branches of the feed-forward, each with its factor."""
    ffn = parts.feed_forward
    both = ((ffn.up, factors.up), (ffn.gate, factors.gate))
    return [(weight, factor) for weight, factor in both if weight is not None and factor is not None]


def _token_factors(parts: BlockParts, factors: Factors, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """ψ on the inner channels, and in post-LN s on the skip: (token, …)."""
    post_ln = parts.layout == "post_ln"
    gain = torch.cat([factor for _, factor in _branches(parts, factors)], 1)
    scale = _scales(factors, *(("norm_1", "norm_2") if post_ln else ("norm_2", "post_norm_2")))
    gain = gain if scale is None else gain * scale[:, None]
    if not post_ln:
        return gain, None
    scale = gain.new_ones(len(gain)) if scale is None else scale
    skip, _, inner = _norm_pair(parts.norm_1, parts.norm_2, like)
    return torch.cat([gain, scale[:, None].expand(-1, len(inner))], 1), scale[:, None] * skip


def _packed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Row by row in memory, whichever way the model keeps it: products by strided operands can be far slower."""
    return matrix.to(dtype).contiguous()


def before_weight(projection: Projection, norm: NormPart | None) -> Tensor:
    """A weight that comes after a norm, with the norm's gain and centring in front of it."""
    weight = at_least_float32(projection.weight)
    if norm is None:
        return weight
    weight = weight if norm.gain is None else weight * at_least_float32(norm.gain)[:, None]
    return weight - weight.mean(0) if norm.kind == "layer" else weight


def after_weight(projection: Projection, norm: NormPart | None, scale: Tensor | None, multiplier: float) -> Tensor:
    """A weight that comes before a norm, a scale for each channel and a multiplier, with all of them behind it."""
    weight = at_least_float32(projection.weight)
    if norm is not None:
        weight = weight - weight.mean(1, keepdim=True) if norm.kind == "layer" else weight
        weight = weight if norm.gain is None else weight * at_least_float32(norm.gain)
    weight = weight if scale is None else weight * at_least_float32(scale)
    return weight if multiplier == 1 else weight * multiplier


def norm_rows(norm: NormPart, rows: Tensor) -> Tensor:
    """Cotangents (…, channel) behind a norm to cotangents before it, 1/σ left out."""
    rows = rows if norm.gain is None else rows * at_least_float32(norm.gain).to(rows)
    return rows - rows.mean(-1, keepdim=True) if norm.kind == "layer" else rows


def _norm_pair(first: NormPart | None, second: NormPart | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two norms in a row, scales left out, as diag(s) + outer · inner: (channel,), (channel, k) and (k, channel).

    With centring C = I - 11ᵀ/D and gains g: C diag(g₁) C diag(g₂) = diag(g₁g₂) - C g₁ g₂ᵀ/D - 1 (g₁g₂)ᵀ/D. The inner
    width is filled up with zeros to a multiple of `ALIGNED`, so that rows stay aligned for the matrix units.
    """
    assert first is not None and second is not None, "post-LN has both norms"
    ones = torch.ones(len(like), dtype=like.dtype, device=like.device)
    g1, g2 = (ones if norm.gain is None else at_least_float32(norm.gain).to(like) for norm in (first, second))
    outer, inner = like.new_zeros(len(like), ALIGNED), like.new_zeros(ALIGNED, len(like))
    if second.kind == "layer":
        outer[:, 0], inner[0] = -(g1 - g1.mean() if first.kind == "layer" else g1), g2 / len(like)
    if first.kind == "layer":
        outer[:, 1], inner[1] = -ones, g1 * g2 / len(like)
    return g1 * g2, outer, inner


def _scales(factors: Factors, *names: str) -> Tensor | None:
    found = [factors.scales[name] for name in names if name in factors.scales]
    return torch.stack(found).prod(0) if found else None


def _mixing(factors: Factors, in_norm: str, out_norm: str, heads: Tensor | None) -> Tensor:
    """Attention as (…, head, in_token, out_token) with 1/σ of the norms on either side, and silenced heads at zero."""
    mix = factors.attention
    samples = mix.shape[:-3]
    if in_norm in factors.scales:
        mix = mix * factors.scales[in_norm].view(*samples, 1, 1, -1)
    if out_norm in factors.scales:
        mix = mix * factors.scales[out_norm].view(*samples, 1, -1, 1)
    if heads is not None:
        mix = mix * heads.to(mix)[:, None, None]
    return mix.mT
