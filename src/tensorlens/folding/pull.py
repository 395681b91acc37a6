r"""Rows, norms and sketches of a frozen model by matrix products alone, all cotangents at once.

Cotangents are kept as (token, cotangent, channel). Weights then act on one tall matrix, token-wise matrices on one
contiguous batch, and heads are strided views that are never copied into another order. Only tokens that an asked output
can see are carried (causal models and sliding windows), and in the last block only the asked output itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tensorlens.axes import Range
from tensorlens.folding.fold import ALIGNED, FoldedBlock, fold_beside, fold_block, norm_rows
from tensorlens.folding.parts import BlockParts
from tensorlens.folding.pull_few import MOST_ROWS_KEPT, KeptPulls, pull_few
from tensorlens.folding.rebuild import held_factors, norm_scale
from tensorlens.folding.search import block_parts, final_norm
from tensorlens.freezing.interpreter import Heads
from tensorlens.freezing.places import Place, Span
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replayed import check_unchanged
from tensorlens.memory import free_bytes
from tensorlens.models.precision import Precision, compute_type, matmul_mode

FEW_COTANGENTS = 64
"""Up to here making tensors and views costs as much as the products; see `few_cotangents`."""

MIXED_TOGETHER = {"cuda": 0, "cpu": 64}
"""Cotangents whose heads are copied side by side and mixed by one product; 0: a strided product for each head."""

SCALED_BYTES = {"cuda": 2**29, "cpu": 2**25}
"""Memory for the scaled weights of as many tokens as are folded at a time."""

CAPTURES = ("cuda",)
"""Devices on which a pull that comes again is replayed as one graph of kernels."""

GRAIN = {"cuda": 8, "cpu": 1}
"""Ranges of tokens begin and end at multiples of this: the matrix units want aligned sizes."""


Way = Literal["states", "many", "matrices", "few", "captured"]
"""How cotangents went through the blocks: as whole states, or as rows by products, by matrices formed for each token,
in buffers made once, or by a graph of kernels. Each is proved by itself."""


class Rows(NamedTuple):
    """Cotangents (token, cotangent, channel) at some block, zero for all other tokens, and how they got there."""

    values: Tensor
    tokens: Range
    way: Way = "many"


class FoldedRows:
    """The adjoint of a frozen model over a range of blocks, folded.

    Costs a copy of the blocks' weights in `precision`, if a quarter of the free memory holds them; else each block is
    folded again when it is needed.

    Raises:
        AnatomyError: a block, or what comes after the last one, cannot be taken apart.
    """

    def __init__(self, recording: Recording, span: Span, heads: Heads, precision: Precision | None = None) -> None:
        self.recording, self.span, self.heads, self.precision = recording, span, heads, precision
        self.device = recording.states[span.start].device
        self.dtype = compute_type(precision, recording.states[span.start].dtype)
        self.parts = {n: block_parts(recording, n) for n in range(span.start, span.stop)}
        self.tail = final_norm(recording) if span.stop == recording.n_blocks else None
        self.n_tokens = recording.states[span.start].shape[1]
        self._like: FoldedRows | None = None
        self._forget()

    def _forget(self) -> None:
        self._blocks: dict[int, FoldedBlock] = {}
        self._token_matrices: dict[int, Tensor] = {}
        self._live: dict[tuple[int, Range], Range] = {}
        self._is_checked = False

    def beside(self, recording: Recording) -> FoldedRows:
        """The same for another sample that was recorded together with this one: the folded weights are shared."""
        other = copy(self)
        for name in ("_tail_scale", "_kept_pulls"):  # what was found out of this sample's factors
            other.__dict__.pop(name, None)
        other.recording, other._like = recording, self
        other._forget()
        return other

    @cached_property
    def n_inner(self) -> int:
        """Width of the widest feed-forward, both of its branches counted where both are live."""
        return max(inner_width(self.recording, parts) for parts in self.parts.values())

    @torch.no_grad()
    def pull(
        self, out_tokens: Sequence[int], starts: Tensor, *, keep_matrices: bool = False, few: bool | None = None
    ) -> Rows:
        """Cotangents `starts` (output, cotangent, out_channel) of the given outputs, all pulled to the input together.

        Args:
            out_tokens: The outputs, one for each entry of `starts`.
            starts: What to pull.
            keep_matrices: Whether the token-wise matrices stay in memory for another call.
            few: Whether they count as few; by their number if None.
        """
        self._is_checked = False
        with matmul_mode(self.precision):
            last = self.span.stop - 1
            pulled = self._leave_last(last, out_tokens, starts.to(self.dtype))
            before = range(last - 1, self.span.start - 1, -1)
            is_few = pulled.values.shape[1] <= FEW_COTANGENTS if few is None else few
            if is_few and self._is_closed(before, pulled.tokens):
                return self._pull_few(before, pulled)
            for n in before:
                pulled = self._through(n, pulled, keep_matrices=keep_matrices)
            return pulled

    @torch.no_grad()
    def pull_states(self, states: Tensor) -> Tensor:
        """Cotangents (token, cotangent, out_channel) of whole states, pulled to (token, cotangent, in_channel)."""
        self._is_checked = False
        with matmul_mode(self.precision):
            if self.tail is not None:
                states = norm_rows(self.tail, states) * self._tail_scale[:, None, None].to(states)
            pulled = Rows(states.contiguous(), Range(0, self.n_tokens))
            for n in range(self.span.stop - 1, self.span.start - 1, -1):
                pulled = self._through(n, pulled, keep_matrices=False)
            return pulled.values

    def block(self, n: int) -> FoldedBlock:
        """The matrices of one block."""
        if n in self._blocks:
            return self._blocks[n]
        parts = self.parts[n]
        if not self._is_checked:  # once for the blocks of a pull: it looks at every module
            check_unchanged(self.recording)
            self._is_checked = True
        with torch.no_grad():
            factors = held_factors(self.recording, parts)
            if self._like is not None:
                self._blocks[n] = fold_beside(self._like.block(n), parts, factors, self.heads.get(n))
                return self._blocks[n]
            folded = fold_block(parts, factors, self.dtype, self.heads.get(n))
        if folded.n_bytes * (self.span.stop - self.span.start - len(self._blocks)) < 0.25 * free_bytes(self.device):
            self._blocks[n] = folded
        return folded

    def forget_matrices(self) -> None:
        """Let go of the token-wise matrices."""
        self._token_matrices.clear()

    def live(self, n: int, tokens: Range) -> Range:
        """The tokens that some of `tokens` see through block n."""
        if (n, tokens) not in self._live:
            (firsts, lasts), grain = self.block(n).reach, GRAIN.get(self.device.type, 1)
            first = min(firsts[slice(*tokens)]) // grain * grain
            last = -(-(max(lasts[slice(*tokens)]) + 1) // grain) * grain
            self._live[n, tokens] = Range(first, min(last, self.n_tokens))
        return self._live[n, tokens]

    def _pull_few(self, blocks: Sequence[int], pulled: Rows) -> Rows:
        is_small = pulled.tokens.size * pulled.values.shape[1] <= MOST_ROWS_KEPT
        if self.device.type in CAPTURES and is_small and all(n in self._blocks for n in blocks):
            found, is_graph = self._kept_pulls.pull_noted(pulled.values, pulled.tokens.start)
            return Rows(found, pulled.tokens, "captured" if is_graph else "few")
        return Rows(pull_few(map(self.block, blocks), pulled.values, pulled.tokens.start), pulled.tokens, "few")

    @cached_property
    def _kept_pulls(self) -> KeptPulls:
        """Through all blocks but the last, which are in memory for good."""
        return KeptPulls([self._blocks[n] for n in range(self.span.stop - 2, self.span.start - 1, -1)])

    def _is_closed(self, blocks: Iterable[int], tokens: Range) -> bool:
        """Whether `tokens` see no others in any of the blocks."""
        return all(self.live(n, tokens) == tokens for n in blocks)

    # The last block: each cotangent has one live token ----------------------------------------------------------------

    def _leave_last(self, n: int, out_tokens: Sequence[int], starts: Tensor) -> Rows:
        r"""Cotangents (output, cotangent, channel) of single outputs to (token, cotangent, channel).

        What reaches input j is $\sum_h A_{h,ij} W_{value,h} u_h$, and y besides where j is i: y goes as one more head.
        """
        block, tokens = self.block(n), self.live(n, Range(min(out_tokens), max(out_tokens) + 1))
        at = _positions(out_tokens, self.device)
        c = self._before_tail(at, starts)
        y = _token_wise(block, c, at, torch.empty_like(c))
        n_outputs, n_cotangents, d = y.shape
        n_heads, d_in = block.n_heads, len(block.value)
        u = torch.mm((c if block.is_parallel else y).flatten(0, 1), block.transposed.out).view(
            -1, n_heads, block.d_head
        )
        parts = y.new_empty(-(-(n_heads + 1) // ALIGNED) * ALIGNED, n_outputs, n_cotangents, d_in)
        torch.bmm(u.transpose(0, 1), block.value_heads, out=parts[:n_heads].flatten(1, 2))
        parts[n_heads] = y
        parts[n_heads + 1 :].zero_()
        weights = y.new_zeros(n_outputs, tokens.size, len(parts))
        weights[:, :, :n_heads] = block.mix[:, slice(*tokens), at].permute(2, 1, 0)
        if isinstance(at, slice):  # the outputs lie on a diagonal
            weights[:, :, n_heads].diagonal(at.start - tokens.start).fill_(1)
        else:
            weights[:, :, n_heads] = at[:, None] == torch.arange(*tokens, device=self.device)
        rows = y.new_empty(tokens.size, n_outputs * n_cotangents, d_in)
        by_output = rows.view(tokens.size, n_outputs, -1).transpose(0, 1)
        torch.bmm(weights, parts.flatten(2).transpose(0, 1), out=by_output)
        return Rows(rows, tokens)

    def _before_tail(self, at: Tensor | slice, starts: Tensor) -> Tensor:
        if self.tail is None:
            return starts.contiguous()
        return norm_rows(self.tail, starts) * self._tail_scale[at][:, None, None].to(starts)

    @cached_property
    def _tail_scale(self) -> Tensor:
        assert self.tail is not None, "asked of a model with a final norm"
        scale = norm_scale(self.recording, Place(self.recording.n_blocks - 1), self.tail)
        assert scale is not None, "the survey found the final norm by its scale"
        return scale

    # All other blocks ------------------------------------------------------------------------------------------------

    def _through(self, n: int, pulled: Rows, *, keep_matrices: bool) -> Rows:
        block, (c, tokens, way), live = self.block(n), pulled, self.live(n, pulled.tokens)
        whole = c.new_empty if live == tokens else c.new_zeros
        y = whole(live.size, c.shape[1], len(block.value))
        inside = y[tokens.start - live.start :][: tokens.size]
        if self._pass_tokens(n, block, c, tokens, inside, keep_matrices=keep_matrices):
            way = "matrices"
        u = torch.mm((c if block.is_parallel else inside).flatten(0, 1), block.transposed.out).view(*c.shape[:2], -1)
        del c, pulled
        mixed = _mix(block, u, tokens, live)
        del u
        y.flatten(0, 1).addmm_(mixed.flatten(0, 1), block.transposed.value)
        return Rows(y, live, way)

    def _pass_tokens(
        self, n: int, block: FoldedBlock, c: Tensor, tokens: Range, into: Tensor, *, keep_matrices: bool
    ) -> bool:
        """$P_l c_l$, with P from an earlier call, formed now, or not at all; whether P was used."""
        matrices = self._token_matrices.get(n)
        if matrices is None and keep_matrices:
            matrices = self._token_matrices[n] = token_matrices(block, Range(0, self.n_tokens))
        if matrices is not None:
            torch.bmm(c, matrices[slice(*tokens)], out=into)
        elif folding_pays(block.up.shape[0], block.up.shape[1], c.shape[1]):
            torch.bmm(c, token_matrices(block, tokens), out=into)
        else:
            _token_wise(block, c, slice(*tokens), into)
            return False
        return True


def inner_width(recording: Recording, parts: BlockParts) -> int:
    """Inner channels of a feed-forward; twice where gate and up are both live."""
    ffn = parts.feed_forward
    both = ffn.gate is not None and recording.rules.gate == "half"
    return ffn.up.weight.shape[1] * (2 if both else 1)


def folding_pays(n_channels: int, n_inner: int, n_cotangents: int) -> bool:
    """Whether forming P, then using it, takes fewer operations than the feed-forward's two products."""
    return n_channels * (n_inner + n_cotangents) < 2 * n_inner * n_cotangents


def token_matrices(block: FoldedBlock, tokens: Range) -> Tensor:
    r"""$P_l^\top$ as (token, channel, channel): scaled weights of some tokens, then one product for all of them."""
    d, n_inner = block.up.shape
    most = SCALED_BYTES.get(block.up.device.type, 2**25) // (d * n_inner * block.up.element_size())
    n_steps = -(-tokens.size // max(1, most))
    step = -(-tokens.size // n_steps)
    into = block.up.new_empty(tokens.size, d, d)
    scaled = block.up.new_empty(step, d, n_inner)
    for gain, part in zip(block.gain[slice(*tokens)].split(step), into.split(step), strict=True):
        torch.mul(block.up, gain[:, None], out=scaled[: len(gain)])
        torch.mm(scaled[: len(gain)].flatten(0, 1), block.down, out=part.flatten(0, 1))
    into.diagonal(dim1=1, dim2=2).add_(1 if block.skip is None else block.skip[slice(*tokens)])
    return into.mT


def _token_wise(block: FoldedBlock, c: Tensor, at: Tensor | slice, into: Tensor) -> Tensor:
    """$P_l c_l$ of the tokens `at`, without forming P."""
    inner = torch.mm(c.flatten(0, 1), block.transposed.down)
    inner.view(*c.shape[:2], -1).mul_(block.gain[at][:, None])
    if block.skip is None:
        torch.addmm(c.flatten(0, 1), inner, block.transposed.up, out=into.flatten(0, 1))
    else:
        torch.mul(c, block.skip[at][:, None], out=into)
        into.flatten(0, 1).addmm_(inner, block.transposed.up)
    return into


def _positions(tokens: Sequence[int], device: torch.device) -> Tensor | slice:
    """Tokens as an index: a slice if they are in a row, since a copy to the device would wait for it."""
    first = tokens[0]
    if list(tokens) == list(range(first, first + len(tokens))):
        return slice(first, first + len(tokens))
    return torch.tensor(tokens, device=device)


def _mix(block: FoldedBlock, u: Tensor, tokens: Range, live: Range) -> Tensor:
    """Attention backwards: (token, cotangent, head · head_channel) to (token, cotangent, kv_head · head_channel)."""
    mix = block.mix[:, live.start : live.stop, tokens.start : tokens.stop]
    n_heads, n_kv, n_cotangents = block.n_heads, block.n_kv_heads, u.shape[1]
    u = u.view(tokens.size, n_cotangents, n_heads, -1)
    mixed = u.new_empty(live.size, n_cotangents, n_kv, u.shape[3])
    step = MIXED_TOGETHER.get(u.device.type, 0)
    if step:
        for part, into in zip(u.split(step, 1), mixed.split(step, 1), strict=True):
            gathered = part.permute(2, 0, 1, 3).reshape(n_heads, tokens.size, -1)
            by_head = torch.bmm(mix, gathered).view(n_kv, n_heads // n_kv, live.size, *part.shape[1:4:2])
            into.copy_((by_head[:, 0] if n_kv == n_heads else by_head.sum(1)).permute(1, 2, 0, 3))
        return mixed.flatten(2)
    for head in range(n_heads):
        group, place = divmod(head, n_heads // n_kv)
        into, shared = mixed[:, :, group].transpose(0, 1), mix[head].expand(n_cotangents, -1, -1)
        if place == 0:
            torch.bmm(shared, u[:, :, head].transpose(0, 1), out=into)
        else:
            into.baddbmm_(shared, u[:, :, head].transpose(0, 1))
    return mixed.flatten(2)
