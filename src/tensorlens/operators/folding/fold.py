r"""One block as a handful of matrices, with every norm folded in: what rows, norms and sketches are computed by.

For a column of cotangents $c_l$ at token l, the block backwards is

    y_l = P_l c_l,   u_l = γ_l ⊙ W_out (y_l, or c_l in a parallel block),   m = mix(u),   r_l = a_l ⊙ y_l + W_value m_l

where `mix` alone moves anything between tokens, and $P_l = diag(s_l) + W_{up}\,diag(\psi_l)\,W_{down}$. Centring and
gains of norms are inside the weights, their scales inside s, ψ and the attention matrices. Queries and keys do not
appear. Weights act on columns (y = W c with W as (in, out)), because cotangents travel backwards.

Norms that the residual stream itself passes through, those of a post-LN block and the final one, are a diagonal and an
outer product for each centring: the diagonal is s, and the products are more inner channels. So P has one form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.models.precision import at_least_float32
from tensorlens.operators.folding.form import Chain, Form, product
from tensorlens.operators.folding.pieces import Piece, Pieces

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """What of a folded block depends on the input, for every sample that was recorded.

    Attributes:
        gain: ψ with the norms' scales.
        skip: s, or None for ones.
        carry: a, or None for ones.
        gate: γ, or None for ones.
        mix: Attention with the norms' scales.
    """

    gain: Float[Tensor, "sample token inner"]
    skip: Float[Tensor, "sample token channel"] | None
    carry: Float[Tensor, "sample token channel"] | None
    gate: Float[Tensor, "sample token head_channels"] | None
    mix: Float[Tensor, "sample head in_token out_token"]

    @cached_property
    def reach(self) -> tuple[list[int], list[int]]:
        """First and last input that each output attends to in any head of any sample, itself included."""
        n = self.mix.shape[-1]
        touched = (self.mix != 0).flatten(0, 1).any(0) | torch.eye(n, dtype=torch.bool, device=self.mix.device)
        last = n - 1 - touched.flip(0).int().argmax(0)
        return touched.int().argmax(0).tolist(), last.tolist()

    def changed(self, change: Callable[[Tensor], Tensor], of_mix: Callable[[Tensor], Tensor]) -> Factors:
        """Something else in the place of each factor, and of the attention."""
        gain, skip, carry, gate = (
            None if factor is None else change(factor) for factor in (self.gain, self.skip, self.carry, self.gate)
        )
        return Factors(gain=gain, skip=skip, carry=carry, gate=gate, mix=of_mix(self.mix))  # type: ignore[arg-type]

    @property
    def n_bytes(self) -> int:
        """Memory of all of them."""
        return sum(f.nbytes for f in (self.gain, self.skip, self.carry, self.gate, self.mix) if f is not None)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedBlock:
    """The matrices of one block, for one of the samples that were recorded.

    Attributes:
        up: W_up (channel, inner).
        down: W_down (inner, channel).
        out: W_out (head · head_channel, channel).
        value: W_value (channel, kv_head · head_channel).
        is_parallel: Whether attention takes the block's cotangents and not those behind the feed-forward.
        factors: What depends on the input, for all samples.
        sample: Which of them this is.
    """

    up: Tensor
    down: Tensor
    out: Tensor
    value: Tensor
    is_parallel: bool
    factors: Factors
    sample: int = 0

    def of_sample(self, sample: int) -> FoldedBlock:
        """The same block for another sample: nothing is copied."""
        return replace(self, sample=sample)

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.factors.mix.shape[1]

    @property
    def n_bytes(self) -> int:
        """Memory of everything."""
        return sum(weight.nbytes for weight in (self.up, self.down, self.out, self.value)) + self.factors.n_bytes

    # Views, made once: with few cotangents, making them takes longer than the products.

    @cached_property
    def gain(self) -> Float[Tensor, "token inner"]:
        """ψ of this sample."""
        return self.factors.gain[self.sample]

    @cached_property
    def skip(self) -> Float[Tensor, "token channel"] | None:
        """The diagonal s, or None for ones."""
        return self._of_sample(self.factors.skip)

    @cached_property
    def carry(self) -> Float[Tensor, "token channel"] | None:
        """The factor a of the residual around attention, or None for ones."""
        return self._of_sample(self.factors.carry)

    @cached_property
    def gate(self) -> Float[Tensor, "token head_channels"] | None:
        """The factor γ of what attention mixed, or None for ones."""
        return self._of_sample(self.factors.gate)

    @cached_property
    def mix(self) -> Float[Tensor, "head in_token out_token"]:
        """Attention with the norms' scales."""
        return self.factors.mix[self.sample]

    def _of_sample(self, factor: Tensor | None) -> Tensor | None:
        return None if factor is None else factor[self.sample]

    @cached_property
    def transposed(self) -> Transposes:
        """The weights as they act on rows."""
        return Transposes(up=self.up.T, down=self.down.T, out=self.out.T, value=self.value.T)

    @cached_property
    def row_factors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """ψ, s and a with an axis for the cotangents: (token, 1, …)."""
        skip, carry = (None if factor is None else factor[:, None] for factor in (self.skip, self.carry))
        return self.gain[:, None], skip, carry

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


@torch.no_grad()
def fold(form: Form, dtype: torch.dtype) -> FoldedBlock:
    """The matrices of a block in a type; they are folded in float32 or better."""
    n_samples, n_heads, n_tokens, d_head = form.mixing.shape
    value = _matrix([_without_repeats(chain, n_heads) for chain in form.value], form.n_channels)
    out = _matrix([chain.pieces for chain in form.out], n_heads * d_head)
    up, down, gain, skip = _inner(form, n_samples * n_tokens, out, dtype)
    carry = _diagonal(form.carry, [_thin(chain, form.n_channels, out) for chain in form.carry], n_samples * n_tokens)

    def by_sample(factor: Tensor | None) -> Any:
        return None if factor is None else _packed(factor, dtype).view(n_samples, n_tokens, -1)

    factors = Factors(
        gain=by_sample(gain),
        skip=by_sample(skip),
        carry=by_sample(carry),
        gate=by_sample(product(form.out[0].gains) if form.out[0].gains else None),
        mix=_packed(_mixing(form), dtype),
    )
    return FoldedBlock(
        up=up,
        down=down,
        out=_packed(out, dtype),
        value=_packed(value, dtype),
        is_parallel=form.is_parallel,
        factors=factors,
    )


def _packed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Row by row in memory, whichever way the model keeps it: products by strided operands can be far slower."""
    return matrix.to(dtype).contiguous()


# Matrices -------------------------------------------------------------------------------------------------------------


def _matrix(chains: Sequence[Pieces], n_in: int) -> Tensor:
    """The sum of some chains, as (in, out)."""
    return reduce(torch.add, [dense(pieces, n_in) for pieces in chains]).T


def dense(pieces: Pieces, n_in: int, into: Tensor | None = None) -> Tensor:
    """The matrix of a chain of pieces with a weight among them, as (out, in); see `_Matrix`."""
    return _Matrix(pieces, n_in, into).value


class _Matrix:
    """A product of pieces: the weight itself until something changes it, then a copy to write to.

    Args:
        pieces: The pieces.
        n_in: The channels that they take.
        into: Where the copy should be made, if that has the right shape and type.
    """

    def __init__(self, pieces: Pieces, n_in: int, into: Tensor | None = None) -> None:
        first = next(place for place, piece in enumerate(pieces) if piece.kind == "weight")
        self.value, self.n_in, self.into = at_least_float32(pieces[first].by), n_in, into
        self.is_own = self.value is not pieces[first].by
        for piece in _with_takes_joined(pieces[first + 1 :]):
            self._multiply(piece, 0)
        for piece in reversed(_with_takes_joined(pieces[:first])):
            self._multiply(piece, 1)

    def _multiply(self, piece: Piece, axis: int) -> None:
        """One more piece, behind the matrix (axis 0) or before it (axis 1)."""
        match piece.kind:
            case "weight":
                self.value, self.is_own = at_least_float32(piece.by) @ self.value, True
            case "scale":
                by = at_least_float32(piece.by).to(self.value)
                self._change(torch.mul, by[:, None] if axis == 0 and by.dim() else by)
            case "centre":
                self._change(torch.sub, self.value.mean(axis, keepdim=True))
            case "take" if axis == 0:
                index = _as_index(piece.by)
                self.value = self.value[index]
                self.is_own = self.is_own or not isinstance(index, slice)
            case "take":
                whole, index = self.value.new_zeros(len(self.value), self.n_in), piece.by.to(self.value.device)
                self.value, self.is_own = whole.index_add_(1, index, self.value), True

    def _change(self, function: Callable[..., Tensor], by: Tensor) -> None:
        """Number by number, in place where the matrix is a copy already."""
        into = self.value if self.is_own else self.into
        fits = into is not None and (into.shape, into.dtype) == (self.value.shape, self.value.dtype)
        self.value, self.is_own = function(self.value, by, out=into if fits else None), True


def _with_takes_joined(pieces: Pieces) -> list[Piece]:
    """The same pieces, in which takes that follow each other are one."""
    found: list[Piece] = []
    for piece in pieces:
        if found and (found[-1].kind, piece.kind) == ("take", "take"):
            piece = Piece("take", found.pop().by[piece.by])
        found.append(piece)
    return found


def _as_index(channels: Tensor) -> Tensor | slice:
    """A slice where channels follow each other, which copies nothing."""
    first = int(channels[0])
    in_a_row = torch.equal(channels, torch.arange(first, first + len(channels)))
    return slice(first, first + len(channels)) if in_a_row else channels


def _without_repeats(chain: Chain, n_heads: int) -> Pieces:
    """The pieces of V, to each value head once: what query heads share is repeated for neighbours, and only there."""
    last = max(place for place, piece in enumerate(chain.pieces) if piece.kind in ("weight", "scale"))
    takes = _with_takes_joined(chain.pieces[last + 1 :])
    if not takes:
        return chain.pieces
    heads = takes[0].by.view(n_heads, -1)
    is_new = torch.cat([torch.ones(1, dtype=torch.bool), (heads[1:] != heads[:-1]).any(1)])
    own = heads[is_new]
    if n_heads % len(own) or not torch.equal(own.repeat_interleave(n_heads // len(own), 0), heads):
        return chain.pieces
    return (*chain.pieces[: last + 1], Piece("take", own.flatten()))


# Factors --------------------------------------------------------------------------------------------------------------


def _mixing(form: Form) -> Tensor:
    """Attention as (sample, head, in_token, out_token), with the factors of tokens on either side."""
    mix = at_least_float32(form.mixing.matrix()).mT.clone(memory_format=torch.contiguous_format)
    n_samples, n_tokens = mix.shape[0], mix.shape[-1]
    if form.value[0].tokens:
        mix *= product(form.value[0].tokens).view(n_samples, 1, n_tokens, 1).to(mix)
    if form.head_gain is not None:
        mix *= form.head_gain.transpose(1, 2)[..., None].to(mix)
    if form.out[0].tokens:
        mix *= product(form.out[0].tokens).view(n_samples, 1, 1, n_tokens).to(mix)
    return mix


class _Thin(NamedTuple):
    """A stream without its factors of tokens: diag(d) + outer · inner, of (channel,), (channel, k) and (k, channel)."""

    diagonal: Tensor
    outer: Tensor
    inner: Tensor


def _thin(chain: Chain, n_channels: int, like: Tensor) -> _Thin:
    r"""Scalings and centrings in a row.

    With $C = I - 1 1^\top/D$ a centring is $(diag(d) + OI)\,C = diag(d) - \tfrac1D d\,1^\top + O\,(IC)$.
    """
    diagonal = like.new_ones(n_channels)
    outer, inner = like.new_zeros(n_channels, 0), like.new_zeros(0, n_channels)
    for piece in chain.pieces:
        if piece.kind == "scale":
            by = at_least_float32(piece.by)
            diagonal, inner = diagonal * by, inner * by
        else:
            outer = torch.cat([outer, -diagonal[:, None] / n_channels], 1)
            inner = torch.cat([inner - inner.mean(1, keepdim=True), torch.ones_like(diagonal)[None]])
    return _Thin(diagonal, outer, inner)


def _diagonal(chains: Sequence[Chain], thin: Sequence[_Thin], n_rows: int) -> Tensor | None:
    """The diagonals of some streams with their factors, added up: (row, channel). None for ones, or for no stream."""
    if len(chains) <= 1 and not any(chain.pieces or chain.tokens for chain in chains):
        return None
    parts = [_of_rows(chain.tokens) * one.diagonal for chain, one in zip(chains, thin, strict=True)]
    return reduce(torch.add, parts).expand(n_rows, -1)


def _of_rows(tokens: Sequence[Tensor]) -> Tensor:
    """A product of factors (row,) as (row, 1); one number for none."""
    return product(tokens)[:, None] if tokens else torch.ones(())


class _Inner(NamedTuple):
    """P: its weights, ψ (row, inner) and s (row, channel)."""

    up: Tensor
    down: Tensor
    gain: Tensor
    skip: Tensor | None


def _inner(form: Form, n_rows: int, like: Tensor, dtype: torch.dtype) -> _Inner:
    """E: its branches side by side, then what its streams have beside a diagonal."""
    n, thin = form.n_channels, [_thin(chain, form.n_channels, like) for chain in form.streams]
    downs = {chain.after: dense(chain.after, -1) for chain in form.branches}  # gate and up may share the way down
    sizes = [downs[chain.after].shape[1] for chain in form.branches] + [len(one.inner) for one in thin]
    sizes.append(-sum(len(one.inner) for one in thin) % ALIGNED)
    # Weights are kept as (out, in), so that the parts of W_up are put together before they are transposed.
    up, down = like.new_empty(sum(sizes), n), like.new_empty(sum(sizes), n, dtype=dtype)
    gain = like.new_empty(n_rows, sum(sizes), dtype=dtype)
    places = zip(up.split(sizes), down.split(sizes), gain.split(sizes, 1), strict=True)
    for chain, (of_up, of_down, of_gain) in zip(form.branches, places, strict=False):
        of_up.copy_(dense(chain.before, n, of_up))
        of_down.copy_(downs[chain.after].T)
        of_gain.copy_(product(chain.gains) * _of_rows(chain.tokens) if chain.gains else _of_rows(chain.tokens))
    for chain, one, (of_up, of_down, of_gain) in zip(form.streams, thin, places, strict=False):
        of_up.copy_(one.outer.T)
        of_down.copy_(one.inner)
        of_gain.copy_(_of_rows(chain.tokens))
    for of_up, of_down, of_gain in places:  # what fills the width up
        of_up.zero_(), of_down.zero_(), of_gain.zero_()
    down = down.T.contiguous().T if DOWN_BY_COLUMN.get(like.device.type) else down
    return _Inner(_packed(up.T, dtype), down, gain, _diagonal(form.streams, thin, n_rows))
