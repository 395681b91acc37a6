"""A few cotangents through many blocks: the steps of `folded`, in buffers and views that are made once.

With some dozen cotangents the products are so small that making tensors and views for them takes as long as computing
them, and on a GPU launching them takes longer: there a pull that comes again is replayed as one graph of kernels. All
tokens in sight must be live already, so that every block works on the same shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tensorlens.folding.fold import FoldedBlock
from tensorlens.models.precision import tf32_allowed

HEADS_APART = {"cuda": True, "cpu": False}
"""Whether W_out acts on each head by itself, which saves a copy: where launching costs more than the products do."""

MOST_ROWS_KEPT = 2**13
"""Rows (token · cotangent) up to which a pull is kept as a graph: with more, the products outlast their launches."""

MOST_GRAPHS = 4
"""Graphs kept at a time, each with buffers of its own; a causal model has a shape for every eight outputs."""


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
        weights = block.transposed
        gain, skip = block.row_factors
        mix = block.mix
        if not self.is_all:
            gain, skip, mix = gain[self.at], None if skip is None else skip[self.at], mix[:, self.at, self.at]
        torch.mm(self.flat, weights.down, out=self.inner_flat)
        self.inner.mul_(gain)
        if block.is_parallel:
            self._leave_attention(block)
        if skip is not None:
            self.rows.mul_(skip)
        self.flat.addmm_(self.inner_flat, weights.up)
        if not block.is_parallel:
            self._leave_attention(block)
        torch.bmm(mix, self.gathered_flat, out=self.attended_flat)
        if self.grouped.shape[1] == 1:
            self.heads_after.copy_(self.attended)
        else:
            torch.sum(self.grouped, 1, out=self.heads_after)
        self.flat.addmm_(self.mixed, weights.value)

    def _leave_attention(self, block: FoldedBlock) -> None:
        """W_out, by head."""
        if self.apart:
            torch.bmm(self.flat_again, block.out_heads, out=self.gathered_rows)
        else:
            torch.mm(self.flat, block.transposed.out, out=self.before_mixing)
            self.gathered.copy_(self.heads_before)


def _shapes(block: FoldedBlock) -> tuple[object, ...]:
    return block.up.shape, block.out.shape, block.value.shape, block.mix.shape


class KeptPulls:
    """`pull_few` through blocks that stay in memory, on a GPU: launched the first time, replayed afterwards.

    The first pull of a shape goes as everywhere; when the shape comes again, its launches are captured into a graph,
    which serves every output from then on. Costs the buffers of a pull for each of a few graphs.

    Args:
        blocks: In the order they are passed; none may be let go of or written to.
    """

    def __init__(self, blocks: Sequence[FoldedBlock]) -> None:
        self.blocks = blocks
        self._seen: set[tuple[object, ...]] = set()
        self._graphs: dict[tuple[object, ...], _Captured | None] = {}
        self._lock = threading.Lock()

    def pull(self, rows: Tensor, first: int) -> Tensor:
        """As `pull_few`; `rows` may be overwritten."""
        return self.pull_noted(rows, first)[0]

    def pull_noted(self, rows: Tensor, first: int) -> tuple[Tensor, bool]:
        """As `pull`, and whether a graph was replayed."""
        stream = torch.cuda.current_stream(rows.device)
        key = (*rows.shape, first, tf32_allowed(), stream.cuda_stream)
        # The kernels of one replay follow each other on the stream, so holding the lock while they are sent is enough.
        with self._lock:
            if key in self._seen and key not in self._graphs and not torch.cuda.is_current_stream_capturing():
                self._capture(key, rows, first)
            self._seen.add(key)
            captured = self._graphs.get(key)
            if captured is None:
                return pull_few(self.blocks, rows, first), False
            return captured.replay(rows), True

    def _capture(self, key: tuple[object, ...], rows: Tensor, first: int) -> None:
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))  # the oldest
        try:
            self._graphs[key] = _Captured(self.blocks, rows, first)
        except RuntimeError:  # for lack of memory, say: a graph saves time alone
            self._graphs[key] = None


class _Captured:
    """The kernels of one pull as a graph, with the memory they work in."""

    def __init__(self, blocks: Sequence[FoldedBlock], rows: Tensor, first: int) -> None:
        self.rows = torch.empty_like(rows)
        self.graph = torch.cuda.CUDAGraph()
        here, aside = torch.cuda.current_stream(rows.device), torch.cuda.Stream(rows.device)
        aside.wait_stream(here)
        # Not `torch.cuda.graph`, which empties the allocator's cache; other threads may go on allocating meanwhile.
        with torch.cuda.stream(aside):
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.result = pull_few(blocks, self.rows, first)
            finally:
                self.graph.capture_end()
        here.wait_stream(aside)

    def replay(self, rows: Tensor) -> Tensor:
        self.rows.copy_(rows)
        self.graph.replay()
        return self.result.clone()
