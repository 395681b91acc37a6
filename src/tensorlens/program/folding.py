r"""Blocks as matrices: a rewrite of the program for many cotangents, used to compute rows, norms and sketches.

With every norm folded in, a block takes a column of cotangents $c_l$ at token l backwards as

    y_l = P_l c_l,   u_l = γ_l ⊙ W_out (y_l, or c_l in a parallel block),   m = mix(u),   r_l = a_l ⊙ y_l + W_value m_l

where `mix` alone moves anything between tokens, and $P_l = diag(s_l) + W_{up}\,diag(\psi_l)\,W_{down}$. Centring and
gains of norms are inside the weights, their scales inside s, ψ and the attention matrices. Queries and keys do not
appear. Weights act on columns (y = W c with W as (in, out)), because cotangents travel backwards.

Norms that the residual stream itself passes through, those of a post-LN block and the final one, are a diagonal and an
outer product for each centring: the diagonal is s, and the products are more inner channels. So P has one form.

If the paths of a block do not fit this form, `NotFoldable` says why, and `Program.pull` answers questions instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorlens.axes import Range
from tensorlens.memory import BYTES_OF_SCALED, SHARE_OF_FOLDED, bytes_on, fitting, free_bytes
from tensorlens.program.paths import AttentionStep, Chain, NotFoldable, Path, Piece, Wiring, naming_block, wiring
from tensorlens.program.program import Program
from tensorlens.program.steps import at_least_float32

ALIGNED = 16
"""Inner channels are added in multiples of this: 16 numbers of any type used here start on 16 bytes."""

MIXED_TOGETHER = {"cuda": 1024, "cpu": 64}
"""Cotangents whose heads are copied side by side and mixed by one product."""

TOKENS_IN_A_BAND = {"cuda": 16, "cpu": 8}
"""Tokens that are pushed together: fewer save more of the work above the diagonal, more make larger products."""


# The form of a block: nothing is copied here --------------------------------------------------------------------------


class Factored(NamedTuple):
    """A path, with the factors that depend on the token apart.

    Attributes:
        before: Pieces before the gains; without gains, those before the last matrix.
        gains: Factors that vary with the channel too: (row, channel), and (channel,) between them.
        after: Pieces after the gains.
        tokens: Factors (row,). They may stand anywhere.
    """

    before: Chain
    gains: tuple[Tensor, ...]
    after: Chain
    tokens: tuple[Tensor, ...]

    @property
    def pieces(self) -> Chain:
        """The pieces that are the same for all tokens."""
        return self.before + self.after


class Form(NamedTuple):
    r"""A block in the form that folding takes: V, O, C and E of `paths`, each a sum.

    Attributes:
        mixing: The attention.
        value: V: matrices, then gains by head.
        head_gain: The gains of V, (sample, token, head), or None.
        out: O: gains, then matrices.
        carry: C: scales alone.
        branches: The part of E that goes through matrices: $W_{down}\,diag(ψ_l)\,W_{up}$.
        streams: The other part of E: $diag(s_l)$ and outer products.
        is_parallel: Whether E takes the block's input, as V does.
        n_channels: Channels of a state.
    """

    mixing: AttentionStep
    value: tuple[Factored, ...]
    head_gain: Tensor | None
    out: tuple[Factored, ...]
    carry: tuple[Factored, ...]
    branches: tuple[Factored, ...]
    streams: tuple[Factored, ...]
    is_parallel: bool
    n_channels: int

    @property
    def n_inner(self) -> int:
        """Inner channels of the feed-forward, summed over branches."""
        return sum(next(p.by.shape[1] for p in one.after if p.kind == "weight") for one in self.branches)


def in_form(found: Wiring) -> Form:
    """The paths of a block, sorted.

    Raises:
        NotFoldable: they have another form.
    """
    inner = [_factored(path) for path in found.inner]
    value, out, carry = (tuple(map(_factored, paths)) for paths in (found.value, found.out, found.carry))
    _check_alike(value)
    _check_alike(out)
    _check(all(_has(one.pieces, "weight") for one in (*value, *out)), "attention without a matrix before or after it")
    _check(not any(one.gains and _has(one.after, "weight") for one in value), "a gain before the values' matrix")
    _check(not any(one.gains and _has(one.before, "weight take") for one in out), "a gain after the output's matrix")
    _check(bool(carry) or found.is_parallel, "no residual around its attention")
    _check(not any(one.gains or _has(one.pieces, "centre take") for one in carry), "a norm in that residual")
    streams = tuple([one for one in inner if not _has(one.pieces, "weight")])
    branches = tuple([one for one in inner if _has(one.pieces, "weight")])
    _check(not any(one.gains or _has(one.pieces, "take") for one in streams), "a gain in the residual stream")
    _check(bool(streams), "no residual around its feed-forward")
    is_two = all(_has(one.before, "weight") and _has(one.after, "weight") for one in branches)
    _check(is_two, "a matrix in the residual stream")
    return Form(
        mixing=found.mixing,
        value=value,
        head_gain=_head_gain(value[0], found.mixing),
        out=out,
        carry=carry,
        branches=branches,
        streams=streams,
        is_parallel=found.is_parallel,
        n_channels=found.program.specs[found.program.inputs[0]].shape[-1],
    )


def _factored(path: Path) -> Factored:
    tokens = tuple([piece.by for piece in path.pieces if piece.kind == "token"])
    rest = tuple([piece for piece in path.pieces if piece.kind != "token"])
    gains = [place for place, piece in enumerate(rest) if piece.kind == "gain"]
    if not gains:
        last = max([place for place, piece in enumerate(rest) if piece.kind == "weight"], default=len(rest))
        return Factored(rest[:last], (), rest[last:], tokens)
    first, last = gains[0], gains[-1]
    _check(not _has(rest[first:last], "weight take centre"), "two activations that follow each other")
    return Factored(rest[:first], tuple([piece.by for piece in rest[first : last + 1]]), rest[last + 1 :], tokens)


def _head_gain(value: Factored, mixing: AttentionStep) -> Tensor | None:
    """Gains of values that are one number for each token and head, which attention can take along."""
    if not value.gains:
        return None
    gain = product_of(value.gains)
    for piece in value.after:
        gain = gain[:, piece.by] if piece.kind == "take" else gain
    n_samples, n_heads, n_tokens, _ = mixing.shape
    gain = gain.view(n_samples, n_tokens, n_heads, -1)
    _check(bool((gain == gain[..., :1]).all()), "a gain for each channel of its values")
    return gain[..., 0]


def product_of(factors: Sequence[Tensor]) -> Tensor:
    """The product of one factor or more, in float32 or better."""
    return reduce(torch.mul, map(at_least_float32, factors))


def _has(pieces: Chain, kinds: str) -> bool:
    return not {piece.kind for piece in pieces}.isdisjoint(kinds.split())


def _check_alike(paths: Iterable[Factored]) -> None:
    """Refuse paths that add up to one matrix unless they have the same factors on their tokens."""
    factors = {tuple(map(id, (*one.tokens, *one.gains))) for one in paths}
    _check(len(factors) == 1, "attention whose branches are scaled apart")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotFoldable(f"it has {otherwise}")


# The matrices of a block ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedBlock:
    """The matrices of one block, for every sample that was recorded.

    Attributes:
        up: W_up (channel, inner).
        down: W_down (inner, channel).
        out: W_out (head · head_channel, channel).
        value: W_value (channel, kv_head · head_channel).
        gain: ψ with the norms' scales, (sample, token, inner).
        skip: s, (sample, token, channel), or None for ones.
        carry: a, in the same shape, or None for ones.
        gate: γ, (sample, token, head · head_channel), or None for ones.
        mix: Attention with the norms' scales, (sample, head, in_token, out_token).
        is_parallel: Whether attention takes the block's cotangents instead of those from before the feed-forward.
    """

    up: Tensor
    down: Tensor
    out: Tensor
    value: Tensor
    gain: Tensor
    skip: Tensor | None
    carry: Tensor | None
    gate: Tensor | None
    mix: Tensor
    is_parallel: bool

    @property
    def n_bytes(self) -> int:
        """Memory of everything."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    @property
    def n_kv_heads(self) -> int:
        """Value heads: as many as there are groups of query heads that share them."""
        return self.value.shape[1] * self.mix.shape[-3] // len(self.out)

    def of(self, sample: int) -> FoldedBlock:
        """The matrices of one sample, without an axis for samples; nothing is copied."""
        gain, skip, carry, gate, mix = (
            None if factor is None else factor[sample]
            for factor in (self.gain, self.skip, self.carry, self.gate, self.mix)
        )
        return replace(self, gain=gain, skip=skip, carry=carry, gate=gate, mix=mix)  # type: ignore[arg-type]

    @cached_property
    def reach(self) -> tuple[list[int], list[int]]:
        """First and last input that each output attends to in any head of any sample, itself included."""
        n = self.mix.shape[-1]  # touched: (in_token, out_token), True where the output attends to the input
        touched = (self.mix != 0).flatten(0, 1).any(0) | torch.eye(n, dtype=torch.bool, device=self.mix.device)
        last = n - 1 - touched.flip(0).int().argmax(0)
        return touched.int().argmax(0).tolist(), last.tolist()

    def seen_by(self, tokens: Range) -> Range:
        """The tokens that some of `tokens` see."""
        firsts, lasts = self.reach
        return Range(min(firsts[slice(*tokens)]), max(lasts[slice(*tokens)]) + 1)


@torch.no_grad()
def fold_block(form: Form, dtype: torch.dtype) -> FoldedBlock:
    """The matrices of a block in a type; they are folded in float32 or better."""
    n_samples, n_heads, n_tokens, d_head = form.mixing.shape
    value = _sum_of([_without_repeats(one, n_heads) for one in form.value], form.n_channels)
    out = _sum_of([one.pieces for one in form.out], n_heads * d_head)
    carry = _diagonal(form.carry, [_thin(one, form.n_channels, out) for one in form.carry], n_samples * n_tokens)
    up, down, gain, skip = _inner(form, n_samples * n_tokens, out)

    def packed(matrix: Tensor) -> Tensor:
        """A copy in row order, whatever the model's layout: products with strided operands can be far slower."""
        return matrix.to(dtype).contiguous()

    def by_sample(factor: Tensor | None) -> Any:
        return None if factor is None else packed(factor).view(n_samples, n_tokens, -1)

    return FoldedBlock(
        up=packed(up),
        down=packed(down),
        out=packed(out),
        value=packed(value),
        gain=by_sample(gain),
        skip=by_sample(skip),
        carry=by_sample(carry),
        gate=by_sample(product_of(form.out[0].gains) if form.out[0].gains else None),
        mix=packed(_mixing(form)),
        is_parallel=form.is_parallel,
    )


def _sum_of(chains: Sequence[Chain], n_in: int) -> Tensor:
    """The sum of some chains, as (in, out)."""
    return reduce(torch.add, [dense(pieces, n_in) for pieces in chains]).T


def dense(pieces: Chain, n_in: int) -> Tensor:
    """The matrix (out, in) of a chain of pieces with a weight among them, in float32 or better.

    Args:
        pieces: The chain.
        n_in: Its number of input channels; needed if the first piece selects channels.
    """
    pieces = _with_takes_joined(pieces)
    first = next(place for place, piece in enumerate(pieces) if piece.kind == "weight")
    # Under autocast some weights have a different type than the states. A single number takes the type of the rest.
    kinds = [piece.by.dtype for piece in pieces if piece.kind in ("weight", "scale") and piece.by.dim()]
    found = pieces[first].by.to(reduce(torch.promote_types, kinds, torch.float32))
    for piece in pieces[first + 1 :]:
        found = _behind(piece, found)
    for piece in reversed(pieces[:first]):
        if piece.kind == "take":
            found = found.new_zeros(len(found), n_in).index_add_(1, piece.by.to(found.device), found)
        else:  # scalings and centrings are their own transposes
            found = _behind(piece, found.T).T
    return found


def _behind(piece: Piece, matrix: Tensor) -> Tensor:
    """Apply a piece to each column of a matrix."""
    if piece.kind == "weight":
        return piece.by.to(matrix) @ matrix
    if piece.kind == "take":
        return matrix[piece.by]
    if piece.kind == "centre":
        return matrix - matrix.mean(0)
    by = piece.by.to(matrix)
    return matrix * (by[:, None] if by.dim() else by)


def _with_takes_joined(pieces: Chain) -> Chain:
    """The same pieces, with consecutive takes joined into one."""
    found: list[Piece] = []
    for piece in pieces:
        if found and (found[-1].kind, piece.kind) == ("take", "take"):
            piece = Piece("take", found.pop().by[piece.by])
        found.append(piece)
    return tuple(found)


def _without_repeats(one: Factored, n_heads: int) -> Chain:
    """The pieces of V, to each value head once: what query heads share is repeated for neighbours, and only there."""
    pieces = _with_takes_joined(one.pieces)
    if pieces[-1].kind != "take":
        return pieces
    heads = pieces[-1].by.view(n_heads, -1)  # (head, head_channel): the channel that each number was taken from
    is_new = torch.cat([torch.ones(1, dtype=torch.bool), (heads[1:] != heads[:-1]).any(1)])
    own = heads[is_new]
    if n_heads % len(own) or not torch.equal(own.repeat_interleave(n_heads // len(own), 0), heads):
        return pieces
    return (*pieces[:-1], Piece("take", own.flatten()))


def _mixing(form: Form) -> Tensor:
    """Attention as (sample, head, in_token, out_token), with the token factors of both sides."""
    mix = at_least_float32(form.mixing.matrix()).mT  # factors of V belong to the input token, those of O to the output
    n_samples, n_tokens = mix.shape[0], mix.shape[-1]
    if form.value[0].tokens:
        mix = mix * product_of(form.value[0].tokens).view(n_samples, 1, n_tokens, 1).to(mix)
    if form.head_gain is not None:
        mix = mix * form.head_gain.transpose(1, 2)[..., None].to(mix)
    if form.out[0].tokens:
        mix = mix * product_of(form.out[0].tokens).view(n_samples, 1, 1, n_tokens).to(mix)
    return mix


class _Thin(NamedTuple):
    """A stream without its factors of tokens: diag(d) + outer · inner, of (channel,), (channel, k) and (k, channel)."""

    diagonal: Tensor
    outer: Tensor
    inner: Tensor


def _thin(one: Factored, n_channels: int, like: Tensor) -> _Thin:
    r"""A chain of scalings and centrings.

    With $C = I - 1 1^\top/D$ a centring is $(diag(d) + OI)\,C = diag(d) - \tfrac1D d\,1^\top + O\,(IC)$.
    """
    diagonal = like.new_ones(n_channels)
    outer, inner = like.new_zeros(n_channels, 0), like.new_zeros(0, n_channels)
    for piece in one.pieces:
        if piece.kind == "scale":
            by = at_least_float32(piece.by)
            diagonal, inner = diagonal * by, inner * by
        else:
            outer = torch.cat([outer, -diagonal[:, None] / n_channels], 1)
            inner = torch.cat([inner - inner.mean(1, keepdim=True), torch.ones_like(diagonal)[None]])
    return _Thin(diagonal, outer, inner)


def _diagonal(streams: Sequence[Factored], thin: Sequence[_Thin], n_rows: int) -> Tensor | None:
    """The diagonals of some streams with their factors, added up: (row, channel). None for ones, or for no stream."""
    if len(streams) <= 1 and not any(one.pieces or one.tokens for one in streams):
        return None
    parts = [_by_row(one.tokens) * of.diagonal for one, of in zip(streams, thin, strict=True)]
    return reduce(torch.add, parts).expand(n_rows, -1)


def _by_row(tokens: Sequence[Tensor]) -> Tensor:
    """A product of factors (row,) as (row, 1); one number for none."""
    return product_of(tokens)[:, None] if tokens else torch.ones(())


def _inner(form: Form, n_rows: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """E as W_up, W_down, ψ (row, inner) and s (row, channel).

    Its branches are side by side, followed by the outer products of its streams.
    """
    thin = [_thin(one, form.n_channels, like) for one in form.streams]
    ups = [dense(one.before, form.n_channels) for one in form.branches] + [one.outer.T for one in thin]
    downs = [dense(one.after, -1).T for one in form.branches] + [one.inner for one in thin]
    gains = [product_of(one.gains) if one.gains else torch.ones(()) for one in (*form.branches, *form.streams)]
    tokens = [_by_row(one.tokens) for one in (*form.branches, *form.streams)]
    gains = [(g * t).to(like).expand(n_rows, len(up)) for g, t, up in zip(gains, tokens, ups, strict=True)]
    rest = -sum(len(one.inner) for one in thin) % ALIGNED
    up, down = (torch.cat([*parts, like.new_zeros(rest, form.n_channels)]) for parts in (ups, downs))
    gain = torch.cat([*gains, like.new_zeros(n_rows, rest)], 1)
    return up.T, down, gain, _diagonal(form.streams, thin, n_rows)


# Cotangents through blocks --------------------------------------------------------------------------------------------


class FoldedBlocks:
    """Consecutive blocks, folded. Cotangents are (token, cotangent, channel).

    Weights then act on one tall matrix, and token-wise matrices on one contiguous batch. Only tokens that an asked
    output can see are carried (causal models and sliding windows), and in the last block only the asked output itself.

    Costs a copy of the blocks' weights in `dtype`, if they fit in a quarter of the free memory; otherwise each
    block is folded again when needed.

    Args:
        programs: From each state to the next one.
        first: The number of the first block.
        name: Name of the model, for errors.
        dtype: The type to compute in.

    Raises:
        AnatomyError: a block cannot be folded.
    """

    def __init__(self, programs: Sequence[Program], first: int, name: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._forms = []
        for n, program in enumerate(programs, first):
            found = wiring(program, n, name)
            with naming_block(name, n):
                self._forms.append(in_form(found))
        self.n_tokens, self.device = self._forms[0].mixing.shape[2], programs[0].specs[programs[0].inputs[0]].device
        self._folded: dict[int, FoldedBlock] = {}
        self._of_sample: dict[tuple[int, int], FoldedBlock] = {}
        self._token_matrices: dict[tuple[int, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self._forms)

    @property
    def n_inner(self) -> int:
        """Width of the widest feed-forward; if both of its branches are live, both count."""
        return max(form.n_inner for form in self._forms)

    def block(self, place: int) -> FoldedBlock:
        """The matrices of one block; folded only once if there is room for all blocks."""
        found = self._folded.get(place)
        if found is None:
            found = fold_block(self._forms[place], self.dtype)
            if found.n_bytes * (len(self) - len(self._folded)) < SHARE_OF_FOLDED * free_bytes(self.device):
                self._folded[place] = found
        return found

    def forget_matrices(self) -> None:
        """Drop the token-wise matrices."""
        self._token_matrices.clear()

    @torch.no_grad()
    def pull_outputs(
        self, out_tokens: Sequence[int], starts: Tensor, sample: int = 0, *, keep_matrices: bool = False
    ) -> tuple[Tensor, Range]:
        """Cotangents of single outputs, all pulled to the input together: (token, output · cotangent, channel).

        Args:
            out_tokens: The outputs, one for each entry of `starts`.
            starts: The cotangents to pull: (output, cotangent, out_channel).
            sample: The index of the sample, if several were recorded together.
            keep_matrices: Whether the token-wise matrices stay in memory for another call.

        Returns:
            The cotangents, and the input tokens that they belong to; those of all other tokens are zero.
        """
        last, starts = len(self) - 1, starts.to(self.dtype)
        tokens = self.block(last).seen_by(Range(min(out_tokens), max(out_tokens) + 1))
        # (token, output, cotangent, channel)
        rows = starts.new_zeros(tokens.size, *starts.shape[:2], self._forms[last].n_channels)
        for n, (i, start) in enumerate(zip(out_tokens, starts, strict=True)):  # each output has one live token here
            pulled, seen = self._through(last, start[None], Range(i, i + 1), sample, keep_matrices)
            rows[seen.start - tokens.start : seen.stop - tokens.start, n] = pulled
        return self._back(last, rows.flatten(1, 2), tokens, sample, keep_matrices)

    @torch.no_grad()
    def pull(self, u: Tensor, sample: int = 0, *, keep_matrices: bool = False) -> Tensor:
        """Cotangents (token, cotangent, out_channel) of whole states, pulled to (token, cotangent, in_channel)."""
        return self._back(len(self), u.to(self.dtype).contiguous(), Range(0, self.n_tokens), sample, keep_matrices)[0]

    def _back(self, stop: int, c: Tensor, tokens: Range, sample: int, keep: bool) -> tuple[Tensor, Range]:
        for place in reversed(range(stop)):
            c, tokens = self._through(place, c, tokens, sample, keep)
        return c, tokens

    def _through(self, place: int, c: Tensor, tokens: Range, sample: int, keep: bool) -> tuple[Tensor, Range]:
        """One block backwards: cotangents of some tokens to those of all tokens that they see."""
        whole, key = self.block(place), (place, sample)
        block, live = self._of_sample.get(key) or whole.of(sample), whole.seen_by(tokens)
        if place in self._folded:
            self._of_sample[key] = block  # views: with few cotangents, making them takes longer than the products
        # c is (token, cotangent, channel), y the same for all live tokens; `inside` is the part of y for c's tokens.
        y = (c.new_empty if live == tokens else c.new_zeros)(live.size, c.shape[1], len(block.value))
        inside, at = y[tokens.start - live.start :][: tokens.size], slice(*tokens)
        # y_l = P_l c_l: by a matrix per token, or by the two products of the feed-forward.
        if keep and key not in self._token_matrices:
            self._token_matrices[key] = token_matrices(block, Range(0, self.n_tokens))
        if key in self._token_matrices:
            torch.bmm(c, self._token_matrices[key][at], out=inside)
        elif folding_pays(block.up.shape[0], block.up.shape[1], c.shape[1]):
            torch.bmm(c, token_matrices(block, tokens), out=inside)
        else:
            inner = (c @ block.down.T).mul_(block.gain[at, None])
            inside.copy_(c if block.skip is None else c * block.skip[at, None])
            inside.flatten(0, 1).addmm_(inner.flatten(0, 1), block.up.T)
        # u_l = γ_l ⊙ W_out y_l, (token, cotangent, head · head_channel); then r_l = a_l ⊙ y_l + W_value mix(u)_l.
        u = (c if block.is_parallel else inside) @ block.out.T
        if block.gate is not None:
            u.mul_(block.gate[at, None])
        if block.carry is not None:
            inside.mul_(block.carry[at, None])
        y.flatten(0, 1).addmm_(_mix(block, u, tokens, live).flatten(0, 1), block.value.T)
        return y, live

    # Every token alone, forwards --------------------------------------------------------------------------------------

    @torch.no_grad()
    def push_each_token(self, x: Tensor, out_tokens: Tensor) -> Tensor:
        r"""$T_{oj} x_j$ for each token j of each sample, at the sample's own output o: (sample, token, channel).

        In a causal model, the contribution of token j is zero before position j. So tokens go in bands, each with the
        positions from its first token on.

        Args:
            x: The states (sample, token, channel) that enter the first block.
            out_tokens: The outputs, (sample,).
        """
        x, at = x.to(self.dtype), out_tokens.to(x.device)
        (n_samples, n_tokens, n_channels), ends = x.shape, list[Tensor]()
        is_causal = all(last <= i for place in range(len(self)) for i, last in enumerate(self.block(place).reach[1]))
        width = TOKENS_IN_A_BAND.get(x.device.type, 8) if is_causal else n_tokens
        width = fitting(x.nbytes * (2 + self.n_inner // n_channels), width, x.device)
        for first in range(0, n_tokens, width):
            some, start = x[:, first : first + width], first if is_causal else 0
            # (sample, position, token, channel): the contribution of each token of the band at each position. It
            # begins as x_j at the token's own position and zero elsewhere.
            rows = x.new_zeros(n_samples, n_tokens - start, some.shape[1], n_channels)
            rows.diagonal(start - first, dim1=1, dim2=2).copy_(some.mT)
            for place in range(len(self)):
                rows = _push(self.block(place), rows, start)
            found = rows[torch.arange(n_samples, device=x.device), (at - start).clamp(min=0)]
            ends.append(torch.where((at >= start)[:, None, None], found, 0))
        return torch.cat(ends, 1)


def folding_pays(n_channels: int, n_inner: int, n_cotangents: int) -> bool:
    """Whether forming P, then using it, takes fewer operations than the feed-forward's two products."""
    return n_channels * (n_inner + n_cotangents) < 2 * n_inner * n_cotangents


def token_matrices(block: FoldedBlock, tokens: Range) -> Tensor:
    r"""$P_l^\top$ as (token, channel, channel): scaled weights of some tokens, then one product for all of them."""
    d, n_inner = block.up.shape
    bytes_each = max(1, d * n_inner * block.up.element_size())  # none without a feed-forward
    step = max(1, bytes_on(block.up.device, BYTES_OF_SCALED) // bytes_each)
    found = block.up.new_empty(tokens.size, d, d)
    for gain, part in zip(block.gain[slice(*tokens)].split(step), found.split(step), strict=True):
        # (token · channel, inner) times (inner, channel)
        torch.mm((block.up * gain[:, None]).flatten(0, 1), block.down, out=part.flatten(0, 1))
    found.diagonal(dim1=1, dim2=2).add_(1 if block.skip is None else block.skip[slice(*tokens)])
    return found.mT


def _mix(block: FoldedBlock, u: Tensor, tokens: Range, live: Range) -> Tensor:
    """Attention backwards: (token, cotangent, head · head_channel) to (token, cotangent, kv_head · head_channel)."""
    mix = block.mix[:, slice(*live), slice(*tokens)]
    n_heads, n_kv = len(mix), block.n_kv_heads
    u = u.unflatten(2, (n_heads, -1))
    mixed = u.new_empty(live.size, u.shape[1], n_kv, u.shape[3])
    step = MIXED_TOGETHER.get(u.device.type, 64)
    for part, into in zip(u.split(step, 1), mixed.split(step, 1), strict=True):
        # (token, cotangent, head, head_channel) as (head, token, cotangent · head_channel), and mixed over tokens to
        # (kv_head, query head of it, live token, cotangent, head_channel); query heads of one value head add up.
        side_by_side = part.permute(2, 0, 1, 3).reshape(n_heads, tokens.size, -1)
        by_head = torch.bmm(mix, side_by_side).view(n_kv, n_heads // n_kv, live.size, *part.shape[1:4:2])
        into.copy_((by_head[:, 0] if n_kv == n_heads else by_head.sum(1)).permute(1, 2, 0, 3))
    return mixed.flatten(2)


def _push(block: FoldedBlock, rows: Tensor, start: int) -> Tensor:
    """One block forwards: (sample, position, token, channel), the positions from `start` on.

    The transpose of `_through`: $x_l$ becomes $s_l y_l + W_{down}(ψ_l W_{up} y_l)$ with $y = a_l x_l + W_{out}(γ_l
    mix(W_{value} x)_l)$; in a parallel block both branches take x.
    """
    skip, carry, gate = (
        None if factor is None else factor[:, start:, None] for factor in (block.skip, block.carry, block.gate)
    )
    n_kv, n_positions, n_tokens = block.n_kv_heads, *rows.shape[1:3]
    values = (rows @ block.value).unflatten(-1, (n_kv, -1))
    by_head = values.permute(0, 3, 1, 2, 4).flatten(3)  # (sample, kv_head, position, token · head_channel)
    weights = block.mix[:, :, start:, start:].mT.unflatten(1, (n_kv, -1)).flatten(2, 3)  # (…, query head · out, in)
    mixed = (weights @ by_head).unflatten(2, (-1, n_positions)).unflatten(-1, (n_tokens, -1))
    mixed = mixed.permute(0, 3, 4, 1, 2, 5).flatten(3)  # (sample, out, token, head · head_channel)
    attended = (mixed if gate is None else mixed * gate) @ block.out
    y = rows if carry is None else rows * carry
    y = y if block.is_parallel else y + attended
    inner = (y @ block.up) * block.gain[:, start:, None]
    found = (y if skip is None else y * skip) + inner @ block.down
    return found + attended if block.is_parallel else found
