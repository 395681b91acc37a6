"""A few cotangents through many blocks: the steps of `folded`, in buffers and views that are made once.

With some dozen cotangents the products are so small that making tensors and views for them takes as long as computing
them. All tokens in sight must be live already, so that every block works on the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tensorlens.operators.folding import FoldedBlock


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
        self.rows, self.next = rows, torch.empty_like(rows)
        self.flat, self.next_flat = self.rows.flatten(0, 1), self.next.flatten(0, 1)
        self.inner = rows.new_empty(n_tokens, n_cotangents, block.up.shape[1])
        self.inner_flat = self.inner.flatten(0, 1)
        self.before_mixing = rows.new_empty(n_tokens * n_cotangents, n_mixed)
        self.mixed = rows.new_empty(n_tokens * n_cotangents, n_values)
        # Attention acts on (head, token, cotangent · head_channel).
        heads = (n_tokens, n_cotangents, -1, n_mixed // block.n_heads)
        self.heads_before = self.before_mixing.view(heads).permute(2, 0, 1, 3)
        self.heads_after = self.mixed.view(heads).permute(2, 0, 1, 3)
        self.gathered = torch.empty_like(self.heads_before, memory_format=torch.contiguous_format)
        self.attended = torch.empty_like(self.gathered)
        self.gathered_flat, self.attended_flat = self.gathered.flatten(2), self.attended.flatten(2)
        self.grouped = self.attended.unflatten(0, (block.n_kv_heads, -1))

    def fit(self, block: FoldedBlock) -> bool:
        """Whether a block works on the same shapes."""
        return self.shapes == _shapes(block)

    def step(self, block: FoldedBlock) -> None:
        """Replace the rows by what the block makes of them."""
        weights = block.transposed
        gain, skip = block.row_factors
        mix = block.mix
        if not self.is_all:
            gain, skip, mix = gain[self.at], None if skip is None else skip[self.at], mix[:, self.at, self.at]
        torch.mm(self.flat, weights.down, out=self.inner_flat)
        self.inner.mul_(gain)
        if skip is None:
            torch.addmm(self.flat, self.inner_flat, weights.up, out=self.next_flat)
        else:
            torch.mul(self.rows, skip, out=self.next)
            self.next_flat.addmm_(self.inner_flat, weights.up)
        torch.mm(self.flat if block.is_parallel else self.next_flat, weights.out, out=self.before_mixing)
        self.gathered.copy_(self.heads_before)
        torch.bmm(mix, self.gathered_flat, out=self.attended_flat)
        if self.grouped.shape[1] == 1:
            self.heads_after.copy_(self.attended)
        else:
            torch.sum(self.grouped, 1, out=self.heads_after)
        self.next_flat.addmm_(self.mixed, weights.value)
        self.rows, self.next, self.flat, self.next_flat = self.next, self.rows, self.next_flat, self.flat


def _shapes(block: FoldedBlock) -> tuple[object, ...]:
    return block.up.shape, block.out.shape, block.value.shape, block.mix.shape
