r"""Rows, norms and sketches of a frozen model by matrix products alone, all cotangents at once.

Cotangents are kept as (token, cotangent, channel). Weights then act on one tall matrix, token-wise matrices on one
contiguous batch, and heads are strided views that are never copied into another order. Only tokens that an asked output
can see are carried (causal models and sliding windows), and in the last block only the asked output itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tensorlens.axes import Range
from tensorlens.memory import BYTES_OF_SCALED, SHARE_OF_FOLDED, bytes_on, free_bytes
from tensorlens.models.precision import Precision, compute_type, matmul_mode
from tensorlens.operators.folding.fold import ALIGNED, FoldedBlock, fold
from tensorlens.operators.folding.form import form_of
from tensorlens.operators.folding.pull_few import pull_few
from tensorlens.recording.recording import Heads, Recording, Span

FEW_COTANGENTS = 64
"""Up to here making tensors and views costs as much as the products; see `pull_few`."""

MIXED_TOGETHER = {"cuda": 0, "cpu": 64}
"""Cotangents whose heads are copied side by side and mixed by one product; 0: a strided product for each head."""

GRAIN = {"cuda": 8, "cpu": 1}
"""Ranges of tokens begin and end at multiples of this: the matrix units want aligned sizes."""


class Rows(NamedTuple):
    """Cotangents (token, cotangent, channel) at some block, zero for all other tokens."""

    values: Tensor
    tokens: Range


class FoldedRows:
    """The adjoint of a recorded pass over a range of blocks, folded.

    Costs a copy of the blocks' weights in `precision`, if a quarter of the free memory holds them; else each block is
    folded again when it is needed.

    Args:
        recording: The pass, of one sample or of several.
        span: The range of blocks.
        heads: Multipliers of heads.
        precision: How products are computed.

    Raises:
        AnatomyError: a block cannot be folded.
    """

    def __init__(self, recording: Recording, span: Span, heads: Heads, precision: Precision | None = None) -> None:
        self.recording, self.span, self.heads, self.precision = recording, span, heads, precision
        start = recording.states[span.start]
        self.device, self.n_tokens = start.device, start.shape[1]
        self.dtype = compute_type(precision, start.dtype)
        self.sample = 0
        self._forms = {n: form_of(recording, n, heads) for n in range(*span)}
        self._folded: dict[int, FoldedBlock] = {}
        self._live: dict[tuple[int, Range], Range] = {}
        self._forget()

    def _forget(self) -> None:
        self._blocks: dict[int, FoldedBlock] = {}
        self._token_matrices: dict[int, Tensor] = {}

    def of_sample(self, sample: int) -> FoldedRows:
        """The same for another of the samples that were recorded together: everything folded is shared."""
        other = copy(self)
        other.sample = sample
        other._forget()
        return other

    @cached_property
    def n_inner(self) -> int:
        """Width of the widest feed-forward, both of its branches counted where both are live."""
        return max(form.n_inner for form in self._forms.values())

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
        self.check()
        with matmul_mode(self.precision):
            last = self.span.stop - 1
            pulled = self._leave_last(last, out_tokens, starts.to(self.dtype))
            before = range(last - 1, self.span.start - 1, -1)
            is_few = pulled.values.shape[1] <= FEW_COTANGENTS if few is None else few
            if is_few and self._is_closed(before, pulled.tokens):
                values = pull_few(map(self.block, before), pulled.values, pulled.tokens.start)
                return Rows(values, pulled.tokens)
            for n in before:
                pulled = self._through(n, pulled, keep_matrices=keep_matrices)
            return pulled

    @torch.no_grad()
    def pull_states(self, states: Tensor) -> Tensor:
        """Cotangents (token, cotangent, out_channel) of whole states, pulled to (token, cotangent, in_channel)."""
        self.check()
        with matmul_mode(self.precision):
            pulled = Rows(states.contiguous(), Range(0, self.n_tokens))
            for n in range(self.span.stop - 1, self.span.start - 1, -1):
                pulled = self._through(n, pulled, keep_matrices=False)
            return pulled.values

    def check(self) -> None:
        """Raise if a weight of the range was written to since the pass was recorded."""
        self.recording.part(self.span, self.heads)

    def block(self, n: int) -> FoldedBlock:
        """The matrices of one block, for this sample."""
        if n in self._blocks:
            return self._blocks[n]
        folded = self._folded.get(n)
        if folded is None:
            folded = fold(self._forms[n], self.dtype)
            n_missing = self.span.stop - self.span.start - len(self._folded)
            if folded.n_bytes * n_missing >= SHARE_OF_FOLDED * free_bytes(self.device):
                return folded.of_sample(self.sample)
            self._folded[n] = folded
        self._blocks[n] = folded.of_sample(self.sample)
        return self._blocks[n]

    def forget_matrices(self) -> None:
        """Let go of the token-wise matrices."""
        self._token_matrices.clear()

    def live(self, n: int, tokens: Range) -> Range:
        """The tokens that some of `tokens` see through block n."""
        if (n, tokens) not in self._live:
            (firsts, lasts), grain = self.block(n).factors.reach, GRAIN.get(self.device.type, 1)
            first = min(firsts[slice(*tokens)]) // grain * grain
            last = -(-(max(lasts[slice(*tokens)]) + 1) // grain) * grain
            self._live[n, tokens] = Range(first, min(last, self.n_tokens))
        return self._live[n, tokens]

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
        c = starts.contiguous()
        y = _token_wise(block, c, at, torch.empty_like(c))
        n_outputs, n_cotangents, _ = y.shape
        n_heads, d_in = block.n_heads, len(block.value)
        u = _leave_attention(block, c if block.is_parallel else y, at).view(-1, n_heads, block.d_head)
        parts = y.new_empty(-(-(n_heads + 1) // ALIGNED) * ALIGNED, n_outputs, n_cotangents, d_in)
        torch.bmm(u.transpose(0, 1), block.value_heads, out=parts[:n_heads].flatten(1, 2))
        parts[n_heads] = y if block.carry is None else y * block.carry[at][:, None]
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

    # All other blocks ------------------------------------------------------------------------------------------------

    def _through(self, n: int, pulled: Rows, *, keep_matrices: bool) -> Rows:
        block, (c, tokens), live = self.block(n), pulled, self.live(n, pulled.tokens)
        whole = c.new_empty if live == tokens else c.new_zeros
        y = whole(live.size, c.shape[1], len(block.value))
        inside = y[tokens.start - live.start :][: tokens.size]
        self._pass_tokens(n, block, c, tokens, inside, keep_matrices=keep_matrices)
        u = _leave_attention(block, c if block.is_parallel else inside, slice(*tokens))
        if block.carry is not None:
            inside.mul_(block.carry[slice(*tokens), None])
        del c, pulled
        mixed = _mix(block, u, tokens, live)
        del u
        y.flatten(0, 1).addmm_(mixed.flatten(0, 1), block.transposed.value)
        return Rows(y, live)

    def _pass_tokens(
        self, n: int, block: FoldedBlock, c: Tensor, tokens: Range, into: Tensor, *, keep_matrices: bool
    ) -> None:
        """$P_l c_l$, with P from an earlier call, formed now, or not at all."""
        matrices = self._token_matrices.get(n)
        if matrices is None and keep_matrices:
            matrices = self._token_matrices[n] = token_matrices(block, Range(0, self.n_tokens))
        if matrices is not None:
            torch.bmm(c, matrices[slice(*tokens)], out=into)
        elif folding_pays(block.up.shape[0], block.up.shape[1], c.shape[1]):
            torch.bmm(c, token_matrices(block, tokens), out=into)
        else:
            _token_wise(block, c, slice(*tokens), into)


def folding_pays(n_channels: int, n_inner: int, n_cotangents: int) -> bool:
    """Whether forming P, then using it, takes fewer operations than the feed-forward's two products."""
    return n_channels * (n_inner + n_cotangents) < 2 * n_inner * n_cotangents


def token_matrices(block: FoldedBlock, tokens: Range) -> Tensor:
    r"""$P_l^\top$ as (token, channel, channel): scaled weights of some tokens, then one product for all of them."""
    d, n_inner = block.up.shape
    most = bytes_on(block.up.device, BYTES_OF_SCALED) // (d * n_inner * block.up.element_size())
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


def _leave_attention(block: FoldedBlock, y: Tensor, at: Tensor | slice) -> Tensor:
    """What goes into the mixing, of the tokens `at`: (token, cotangent, head · head_channel)."""
    u = torch.mm(y.flatten(0, 1), block.transposed.out).view(*y.shape[:2], -1)
    return u if block.gate is None else u.mul_(block.gate[at][:, None])


def _positions(tokens: Sequence[int], device: torch.device) -> Tensor | slice:
    """Tokens as an index: a slice where they follow each other, which needs no copy to the device."""
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
