"""A few cotangents through many blocks: the steps of `pull`, in buffers and views that are made once.

With some dozen cotangents the products are so small that making tensors and views for them takes as long as computing
them. All tokens in sight must be live already, so that every block works on the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tensorlens.operators.folding.fold import FoldedBlock

HEADS_APART = {"cuda": True, "cpu": False}
"""Whether W_out acts on each head by itself, which saves a copy: where launching costs more than the products do."""


def pull_few(blocks: Iterable[FoldedBlock], rows: Tensor, first: int) -> Tensor:
    """Pull (token, cotangent, channel) back through `blocks`, in the order they come.

    Args:
        blocks: Each as wide at its input as at its output.
        rows: Cotangents of tokens `first` on, which see no others; overwritten.
        first: The first token.
    """
    buffers: _Buffers | None = None
    for block in blocks:
        if buffers is None or not buffers.fit(block):
            buffers = _Buffers(block, rows if buffers is None else buffers.rows, first)
        buffers.step(block)
    return rows if buffers is None else buffers.rows


class _Buffers:
    """What one block after another writes into."""

    def __init__(self, block: FoldedBlock, rows: Tensor, first: int) -> None:
        n_tokens, n_cotangents, _ = rows.shape
        n_mixed, n_values = len(block.out), block.value.shape[1]
        self.shapes = _shapes(block)
        self.at = slice(first, first + n_tokens)
        self.is_all = n_tokens == len(block.gain)
        self.rows, self.flat = rows, rows.flatten(0, 1)
        self.inner = rows.new_empty(n_tokens, n_cotangents, block.up.shape[1])
        self.inner_flat = self.inner.flatten(0, 1)
        self.mixed = rows.new_empty(n_tokens * n_cotangents, n_values)
        # Attention acts on (head, token, cotangent · head_channel).
        heads = (n_tokens, n_cotangents, -1, n_mixed // block.n_heads)
        self.heads_after = self.mixed.view(heads).permute(2, 0, 1, 3)
        self.gathered = rows.new_empty(block.n_heads, n_tokens, n_cotangents, heads[-1])
        self.attended = torch.empty_like(self.gathered)
        self.gathered_flat, self.attended_flat = self.gathered.flatten(2), self.attended.flatten(2)
        self.grouped = self.attended.unflatten(0, (block.n_kv_heads, -1))
        self.apart = HEADS_APART.get(rows.device.type, False)
        if self.apart:
            self.flat_again, self.gathered_rows = self.flat.expand(block.n_heads, -1, -1), self.gathered.flatten(1, 2)
        else:
            self.before_mixing = rows.new_empty(n_tokens * n_cotangents, n_mixed)
            self.heads_before = self.before_mixing.view(heads).permute(2, 0, 1, 3)

    def fit(self, block: FoldedBlock) -> bool:
        """Whether a block works on the same shapes."""
        return self.shapes == _shapes(block)

    def step(self, block: FoldedBlock) -> None:
        """Replace the rows by what the block makes of them, in place."""
        weights, mix = block.transposed, block.mix if self.is_all else block.mix[:, self.at, self.at]
        gain, skip, carry = block.row_factors
        torch.mm(self.flat, weights.down, out=self.inner_flat)
        self._scale(self.inner, gain)
        if block.is_parallel:
            self._leave_attention(block)
        self._scale(self.rows, skip)
        self.flat.addmm_(self.inner_flat, weights.up)
        if not block.is_parallel:
            self._leave_attention(block)
            self._scale(self.rows, carry)
        torch.bmm(mix, self.gathered_flat, out=self.attended_flat)
        if self.grouped.shape[1] == 1:
            self.heads_after.copy_(self.attended)
        else:
            torch.sum(self.grouped, 1, out=self.heads_after)
        self.flat.addmm_(self.mixed, weights.value)

    def _scale(self, rows: Tensor, factor: Tensor | None) -> None:
        """Multiply (token, cotangent, …) by a factor (token, 1, …), in place."""
        if factor is not None:
            rows.mul_(factor if self.is_all else factor[self.at])

    def _leave_attention(self, block: FoldedBlock) -> None:
        """W_out, by head."""
        if self.apart:
            torch.bmm(self.flat_again, block.out_heads, out=self.gathered_rows)
        else:
            torch.mm(self.flat, block.transposed.out, out=self.before_mixing)
            self.gathered.copy_(self.heads_before)
        if block.gate is not None:
            self.gathered.mul_(block.gate[self.at].unflatten(1, (block.n_heads, -1)).transpose(0, 1)[:, :, None])


def _shapes(block: FoldedBlock) -> tuple[object, ...]:
    return block.up.shape, block.out.shape, block.value.shape, block.mix.shape
