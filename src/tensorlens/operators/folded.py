r"""Rows, norms and sketches of a frozen model by matrix products alone, all cotangents at once.

Cotangents are kept as (channel, token, column): token-wise matrices, weights and attention then act on strided views,
and no head is ever copied into another order. Only tokens that an asked output can see are carried (causal models and
sliding windows), and in the last block only the asked output itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tensorlens.freezing.frozen_model import FrozenModel, Heads, Span
from tensorlens.freezing.rebuilding import held_factors, norm_scale
from tensorlens.freezing.survey import block_parts, final_norm
from tensorlens.operators.budget import Precision, Range, compute_type, free_bytes, matmul_mode
from tensorlens.operators.folding import FoldedBlock, fold_block, norm_columns

FEW_COLUMNS = 64
"""Up to here heads are gathered by a copy; beyond, by one strided product for each head."""


class Columns(NamedTuple):
    """Cotangents (channel, token, column) at some block; zero for all other tokens."""

    values: Tensor
    tokens: Range


class FoldedRows:
    """The adjoint of a frozen model over a range of blocks, folded.

    Costs a copy of the blocks' weights in `precision`, if a quarter of the free memory holds them; else each block is
    folded again when it is needed.

    Raises:
        AnatomyError: a block, or what comes after the last one, cannot be taken apart.
    """

    def __init__(self, frozen: FrozenModel, span: Span, heads: Heads, precision: Precision | None = None) -> None:
        self.frozen, self.span, self.heads, self.precision = frozen, span, heads, precision
        self.device = frozen.hidden[span.start].device
        self.dtype = compute_type(precision, frozen.hidden[span.start].dtype)
        self.parts = {n: block_parts(frozen, n) for n in range(span.start, span.stop)}
        self.tail = final_norm(frozen) if span.stop == frozen.n_blocks else None
        self.n_tokens = frozen.hidden[span.start].shape[1]
        self._blocks: dict[int, FoldedBlock] = {}
        self._token_matrices: dict[int, Tensor] = {}

    @property
    def n_inner(self) -> int:
        """Width of the widest feed-forward."""
        return max(parts.feed_forward.down.weight.shape[0] for parts in self.parts.values())

    @torch.no_grad()
    def pull(self, out_tokens: Sequence[int], starts: Tensor, *, keep_matrices: bool = False) -> Columns:
        """Cotangents `starts` (output, out_channel, column) of the given outputs, all pulled to the input together.

        Args:
            out_tokens: The outputs, one for each entry of `starts`.
            starts: What to pull.
            keep_matrices: Whether the token-wise matrices stay in memory for another call.
        """
        with matmul_mode(self.precision):
            last = self.span.stop - 1
            pulled = self._leave_last(self.block(last), out_tokens, starts)
            for n in range(last - 1, self.span.start - 1, -1):
                pulled = self._through(n, pulled, keep_matrices=keep_matrices)
            return pulled

    @torch.no_grad()
    def pull_states(self, columns: Tensor) -> Tensor:
        """Cotangents (out_channel, token, column) of whole states, pulled to (in_channel, token, column)."""
        with matmul_mode(self.precision):
            if self.tail is not None:
                columns = norm_columns(self.tail, columns) * self._tail_scale[:, None].to(columns)
            pulled = Columns(columns.contiguous(), Range(0, self.n_tokens))
            for n in range(self.span.stop - 1, self.span.start - 1, -1):
                pulled = self._through(n, pulled, keep_matrices=False)
            return pulled.values

    def block(self, n: int) -> FoldedBlock:
        """The matrices of one block."""
        if n in self._blocks:
            return self._blocks[n]
        parts = self.parts[n]
        with torch.no_grad():
            folded = fold_block(parts, held_factors(self.frozen, parts), self.dtype, self.heads.get(n))
        if folded.n_bytes * (self.span.stop - self.span.start - len(self._blocks)) < 0.25 * free_bytes(self.device):
            self._blocks[n] = folded
        return folded

    def forget_matrices(self) -> None:
        """Let go of the token-wise matrices."""
        self._token_matrices.clear()

    # The last block: each column has one live token ------------------------------------------------------------------

    def _leave_last(self, block: FoldedBlock, out_tokens: Sequence[int], starts: Tensor) -> Columns:
        tokens = Range(min(block.first[i] for i in out_tokens), max(block.last[i] for i in out_tokens) + 1)
        width = starts.shape[2]
        shape = (block.value.shape[0], tokens.size, len(out_tokens) * width)
        columns = torch.empty(shape, dtype=self.dtype, device=self.device)
        for slot, (i, start) in enumerate(zip(out_tokens, starts, strict=True)):
            view = columns[:, :, slot * width : (slot + 1) * width]
            self._leave_one(block, i, self._before_tail(i, start.to(self.dtype)), tokens, view)
        return Columns(columns, tokens)

    def _before_tail(self, out_token: int, start: Tensor) -> Tensor:
        if self.tail is None:
            return start
        return norm_columns(self.tail, start) * self._tail_scale[out_token].to(start)

    @cached_property
    def _tail_scale(self) -> Tensor:
        assert self.tail is not None, "asked of a model with a final norm"
        scale = norm_scale(self.frozen, f"after block {self.frozen.n_blocks - 1}", self.tail)
        assert scale is not None, "the survey found the final norm by its scale"
        return scale

    def _leave_one(self, block: FoldedBlock, i: int, c: Tensor, tokens: Range, into: Tensor) -> None:
        """Cotangents (channel, column) of one output to (channel, token, column) of everything it sees."""
        y = _token_wise(block, c[:, None], Range(i, i + 1))[:, 0]
        u = (block.out @ (c if block.is_parallel else y)).unflatten(0, (block.n_heads, -1))
        by_head = torch.empty(len(y), block.n_heads, y.shape[1], dtype=y.dtype, device=y.device)
        torch.bmm(_value_heads(block), u, out=by_head.transpose(0, 1))
        seen = block.mix[:, tokens.start : tokens.stop, i].T  # (in_token, head)
        torch.bmm(seen.expand(len(y), -1, -1), by_head, out=into)
        into[:, i - tokens.start] += y

    # All other blocks ------------------------------------------------------------------------------------------------

    def _through(self, n: int, pulled: Columns, *, keep_matrices: bool) -> Columns:
        block, c, tokens = self.block(n), pulled.values, pulled.tokens
        y = self._token_wise(n, block, c, tokens, keep_matrices=keep_matrices)
        u = torch.mm(block.out, (c if block.is_parallel else y).flatten(1)).unflatten(1, c.shape[1:])
        del c, pulled
        live = Range(min(block.first[tokens.start : tokens.stop]), max(block.last[tokens.start : tokens.stop]) + 1)
        mixed = _mix(block, u, tokens, live)
        del u
        if live != tokens:
            wider = y.new_zeros(y.shape[0], live.size, y.shape[2])
            wider[:, tokens.start - live.start :][:, : tokens.size] = y
            y = wider
        y.flatten(1).addmm_(block.value, mixed.flatten(1))
        return Columns(y, live)

    def _token_wise(self, n: int, block: FoldedBlock, c: Tensor, tokens: Range, *, keep_matrices: bool) -> Tensor:
        matrices = self._token_matrices.get(n)
        if matrices is not None:
            matrices = matrices[:, tokens.start : tokens.stop]
        elif keep_matrices:
            self._token_matrices[n] = token_matrices(block, Range(0, self.n_tokens))
            matrices = self._token_matrices[n][:, tokens.start : tokens.stop]
        elif folding_pays(block.up.shape[0], block.up.shape[1], c.shape[2]):
            matrices = token_matrices(block, tokens)
        else:
            return _token_wise(block, c, tokens)
        y = torch.empty_like(c)
        torch.bmm(matrices.transpose(0, 1), c.transpose(0, 1), out=y.transpose(0, 1))
        return y


def folding_pays(n_channels: int, n_inner: int, n_columns: int) -> bool:
    """Whether forming P, then using it, takes fewer operations than the feed-forward's two products."""
    return n_channels * (n_inner + n_columns) < 2 * n_inner * n_columns


def token_matrices(block: FoldedBlock, tokens: Range, chunk: int = 8) -> Tensor:
    """$P_l$ as (channel, token, channel), a few tokens at a time so that the operand stays in the cache."""
    d = block.up.shape[0]
    into = torch.empty(d, tokens.size, d, dtype=block.up.dtype, device=block.up.device)
    for start in range(tokens.start, tokens.stop, chunk):
        stop = min(start + chunk, tokens.stop)
        scaled = block.gain[:, start:stop, None] * block.down[:, None]  # (inner, token, channel)
        at = start - tokens.start
        into[:, at : at + stop - start] = (block.up @ scaled.flatten(1)).unflatten(1, scaled.shape[1:])
    if block.base is None:
        into.diagonal(dim1=0, dim2=2).add_(1)
    else:
        scale = block.base_scale
        scale = 1 if scale is None else scale[tokens.start : tokens.stop, None]
        into.addcmul_(block.base[:, None], torch.as_tensor(scale, dtype=into.dtype, device=into.device))
    return into


def _token_wise(block: FoldedBlock, c: Tensor, tokens: Range) -> Tensor:
    """$P_l c_l$ without forming P."""
    inner = torch.mm(block.down, c.flatten(1)).unflatten(1, c.shape[1:])
    inner *= block.gain[:, tokens.start : tokens.stop, None]
    if block.base is None:
        return torch.addmm(c.flatten(1), block.up, inner.flatten(1)).view_as(c)
    y = torch.mm(block.base, c.flatten(1)).view_as(c)
    if block.base_scale is not None:
        y *= block.base_scale[tokens.start : tokens.stop, None]
    y.flatten(1).addmm_(block.up, inner.flatten(1))
    return y


def _value_heads(block: FoldedBlock) -> Tensor:
    """W_value as (head, channel, head_channel), value heads repeated for the query heads that share them."""
    n_channels = block.out.shape[0] // block.n_heads
    by_head = block.value.unflatten(1, (-1, n_channels)).transpose(0, 1)
    return by_head.repeat_interleave(block.n_heads // len(by_head), 0) if len(by_head) != block.n_heads else by_head


def _mix(block: FoldedBlock, u: Tensor, tokens: Range, live: Range) -> Tensor:
    """Attention backwards: (head · head_channel, token, column) to (kv_head · head_channel, token, column)."""
    mix = block.mix[:, live.start : live.stop, tokens.start : tokens.stop]
    n_heads, width = len(mix), u.shape[2]
    n_kv = block.value.shape[1] * n_heads // block.out.shape[0]
    u = u.unflatten(0, (n_heads, -1))  # (head, head_channel, token, column)
    if width <= FEW_COLUMNS:
        gathered = u.transpose(1, 2).reshape(n_heads, tokens.size, -1)
        mixed = (mix @ gathered).view(n_kv, n_heads // n_kv, live.size, -1, width).sum(1)
        return mixed.transpose(1, 2).reshape(-1, live.size, width)
    mixed = torch.empty(n_kv, u.shape[1], live.size, width, dtype=u.dtype, device=u.device)
    group = n_heads // n_kv
    for head in range(n_heads):
        into, shared = mixed[head // group], mix[head].expand(u.shape[1], -1, -1)
        if head % group == 0:
            torch.bmm(shared, u[head], out=into)
        else:
            into.baddbmm_(shared, u[head])
    return mixed.flatten(0, 1)
