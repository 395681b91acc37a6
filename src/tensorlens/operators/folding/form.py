r"""The paths of a block, sorted into the form that folding takes. Nothing is copied here.

V: matrices, then gains by head      O: gains, then matrices      C: scales alone
E: branches W_down diag(ψ_l) W_up, and streams without a matrix: diag(s_l) and outer products
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from tensorlens.models.precision import at_least_float32
from tensorlens.operators.folding.pieces import Path, Pieces
from tensorlens.operators.folding.reading import AttentionStep, NotFoldable
from tensorlens.operators.folding.wiring import Wiring, naming_block, wiring
from tensorlens.recording.recording import Heads, Recording


class Chain(NamedTuple):
    """A path with what depends on the token set apart.

    Attributes:
        before: Pieces before the gains; without gains, those before the last matrix.
        gains: Factors that vary with the channel too: (row, channel), or (channel,) in among them.
        after: Pieces after the gains.
        tokens: Factors (row,). They may stand anywhere.
    """

    before: Pieces
    gains: tuple[Tensor, ...]
    after: Pieces
    tokens: tuple[Tensor, ...]

    @property
    def pieces(self) -> Pieces:
        """What is the same for all tokens."""
        return self.before + self.after


class Form(NamedTuple):
    """A block, sorted: each is a sum of chains.

    Attributes:
        mixing: The attention.
        value: V.
        head_gain: The gains of V, (sample, token, head), or None.
        out: O.
        carry: C.
        branches: What of E goes through matrices.
        streams: What of E does not.
        is_parallel: Whether E takes the block's input, as V does.
        n_channels: Channels of a state.
    """

    mixing: AttentionStep
    value: tuple[Chain, ...]
    head_gain: Tensor | None
    out: tuple[Chain, ...]
    carry: tuple[Chain, ...]
    branches: tuple[Chain, ...]
    streams: tuple[Chain, ...]
    is_parallel: bool
    n_channels: int

    @property
    def n_inner(self) -> int:
        """Inner channels of the feed-forward, those of all branches counted."""
        return sum(next(p.by.shape[1] for p in chain.after if p.kind == "weight") for chain in self.branches)


def form_of(recording: Recording, n: int, heads: Heads | None = None) -> Form:
    """The form of block n of a recorded pass.

    Raises:
        AnatomyError: it cannot be folded; says why.
    """
    found = wiring(recording, n, heads)
    with naming_block(recording, n):
        return in_form(found)


def in_form(found: Wiring) -> Form:
    """The paths of a block, sorted.

    Raises:
        NotFoldable: they have another form.
    """
    inner = [_chain(path) for path in found.inner]
    value, out, carry = (tuple(map(_chain, paths)) for paths in (found.value, found.out, found.carry))
    _check_alike(value), _check_alike(out)
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


def _chain(path: Path) -> Chain:
    tokens = tuple([piece.by for piece in path.pieces if piece.kind == "token"])
    rest = tuple([piece for piece in path.pieces if piece.kind != "token"])
    _check(not _has(rest, "mean"), "a mean of channels")
    gains = [place for place, piece in enumerate(rest) if piece.kind == "gain"]
    if not gains:
        last = max([place for place, piece in enumerate(rest) if piece.kind == "weight"], default=len(rest))
        return Chain(rest[:last], (), rest[last:], tokens)
    first, last = gains[0], gains[-1]
    _check(not _has(rest[first:last], "weight take centre"), "two activations that follow each other")
    return Chain(rest[:first], tuple([piece.by for piece in rest[first : last + 1]]), rest[last + 1 :], tokens)


def _head_gain(value: Chain, mixing: AttentionStep) -> Tensor | None:
    """Gains of values that are one number for each token and head, which attention can take along."""
    if not value.gains:
        return None
    gain = product(value.gains)
    for piece in value.after:
        gain = gain[:, piece.by] if piece.kind == "take" else gain
    n_samples, n_heads, n_tokens, _ = mixing.shape
    gain = gain.view(n_samples, n_tokens, n_heads, -1)
    _check(bool((gain == gain[..., :1]).all()), "a gain for each channel of its values")
    return gain[..., 0]


def product(factors: Sequence[Tensor]) -> Tensor:
    """The product of one factor or more, in float32 or better."""
    return reduce(torch.mul, map(at_least_float32, factors))


def _has(pieces: Pieces, kinds: str) -> bool:
    return any(piece.kind in kinds.split() for piece in pieces)


def _check_alike(chains: Iterable[Chain]) -> None:
    """Chains that add up to one matrix have the same factors on their tokens."""
    factors = {tuple(map(id, (*chain.tokens, *chain.gains))) for chain in chains}
    _check(len(factors) == 1, "attention whose branches are scaled apart")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotFoldable(f"it has {otherwise}")
