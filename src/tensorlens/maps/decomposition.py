r"""One block's attention taken apart by source token, with every norm on the way held at its actual scale.

For output i and source j, in the notation of Kobayashi et al.:

- $c_{ij} = \sum_h A_{h,ij}\, v_{h,j} W_{o,h}$, with the *actual* values, biases and norm before them included;
- $s_{ij}$: the same after what stands between attention and the residual sum (a norm, a layer scale);
- $y_{ij} = \delta_{ij} x_i + s_{ij}$: with the residual; $\sum_j y_{ij}$ and the output bias make the residual stream.

T leaves value biases to B; these measures, as in the papers they come from, do not. Of several samples that
were recorded together every tensor has an axis for samples in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import AnatomyError, MethodError
from tensorlens.memory import BYTES_OF_VECTORS, bytes_on
from tensorlens.operators.attention_matrices import Mixing
from tensorlens.program.folding import dense
from tensorlens.program.nodes import at_least_float32
from tensorlens.program.paths import Chain, Path, Wiring, before_weight, has_norm, wiring
from tensorlens.recording.recording import Recording, Span

Vectors = Float[Tensor, "*sample out_token in_token channel"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """Norms and scalings on the way, as the linear map they are once statistics are held: no shift.

    Attributes:
        pieces: What they do, without a matrix.
        shape: Samples, if there are several, and tokens.
    """

    pieces: Chain
    shape: tuple[int, ...]

    def __call__(self, vectors: Vectors, rows: slice) -> Vectors:
        """Each vector by the scale of its output; each centred by its own mean, where a norm centres."""
        # vectors: (…, out_token, in_token, channel); a scale belongs to the output, and is the same for every source.
        for piece in self.pieces:
            if piece.kind == "centre":
                vectors = vectors - vectors.mean(-1, keepdim=True)
            else:
                by = at_least_float32(piece.by).to(vectors)
                vectors = vectors * (by.view(self.shape)[..., rows, None, None] if piece.kind == "token" else by)
        return vectors


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    r"""What each source token contributes to each output within one block.

    Attributes:
        recording: The pass.
        block: The block.
        wiring: How it is wired.
        x: The state entering the block, as the residual carries it around attention.
        attention: $A_h$.
        projected: $v_{h,j} W_{o,h}$.
        before: What stands between the mixture and the output weight.
        after: What stands between the output weight and the residual sum.
        first: What the residual stream passes after that sum: the first norm of a post-LN block.
        second: What comes next: the norm before the feed-forward, or the second norm of a post-LN block. None where
            nothing that sees the sum does.
    """

    recording: Recording
    block: int
    wiring: Wiring
    x: Float[Tensor, "*sample token channel"]
    attention: Float[Tensor, "*sample head out_token in_token"]
    projected: Float[Tensor, "*sample head in_token channel"]
    before: Way
    after: Way
    first: Way
    second: Way | None

    def chunks(self) -> Iterator[slice]:
        """Ranges of output tokens small enough to hold vectors for every source."""
        n_tokens, most = self.x.shape[-2], bytes_on(self.x.device, BYTES_OF_VECTORS)
        size = max(1, most // self.x.nbytes)
        return (slice(start, min(start + size, n_tokens)) for start in range(0, n_tokens, size))

    def mixed(self, rows: slice) -> Vectors:
        """$c_{ij}$; layer scales and factors of the model are part of its output weight, unless a norm comes first."""
        vectors = torch.einsum("...hij,...hjd->...ijd", self.attention[..., rows, :], self.projected)
        return self.before(vectors, rows)

    def with_residual(self, rows: slice) -> Vectors:
        """$y_{ij} = δ_{ij} x_i + s_{ij}$."""
        vectors = self.after(self.mixed(rows), rows)
        # The diagonal i = j of (out_token, in_token), its tokens on the last axis: (…, channel, out_token).
        vectors.diagonal(rows.start, -3, -2).add_(self.x[..., rows, :].to(vectors).mT)
        return vectors

    def attended(self, rows: slice) -> Vectors:
        """What each source contributes to the attention sub-block's output, after its norm (post-LN)."""
        return self.first(self.with_residual(rows), rows)

    @cached_property
    def output(self) -> Float[Tensor, "*sample token channel"]:
        """The true output of the attention sub-block, including biases and the norm after it (post-LN)."""
        found = self.wiring
        outs = [path for path in found.own if path.source == found.mixing.slot]
        paths = outs if found.is_parallel else [Path(found.start, self.first.pieces)]
        slot, x = found.slot_of(*paths), self.recording.states[self.block]
        if slot is None:
            raise _not_found(self.block, "no step contains what attention adds to the residual stream.")
        value = at_least_float32(found.program.observe((x,), (slot,))[slot]).reshape(self.x.shape)
        return value + self.x if found.is_parallel else value


def decompose(recording: Recording, block: int, mixing: Mixing) -> Decomposition:
    """Take one block apart.

    Raises:
        MethodError: the block is not made of attention and a feed-forward that are known.
    """
    try:
        found = wiring(recording.part(Span(block, block + 1)), block, recording.name)
    except AnatomyError as error:
        raise _not_found(block, str(error)) from error
    out, carry, first, second = _sub_layers(found, block)
    shape = tuple(recording.states[block].shape[:2])[recording.n_samples == 1 :]
    last = 1 + max(place for place, piece in enumerate(out) if piece.kind == "weight")
    # Without a norm behind it, all of what follows the output weight is part of it.
    last = last if has_norm(out[last:]) else len(out)
    tokens = tuple([piece for piece in out[:last] if piece.kind == "token"])
    values = at_least_float32(mixing.values)
    weight = dense(tuple([piece for piece in out[:last] if piece.kind != "token"]), -1)
    weight = weight.T.to(values).unflatten(0, (values.shape[-3], -1))  # (head, head_channel, channel)
    x = at_least_float32(recording.states[block]).reshape(*shape, 1, -1)  # (…, token, one source, channel)
    return Decomposition(
        recording=recording,
        block=block,
        wiring=found,
        x=Way(pieces=carry, shape=shape)(x, slice(None))[..., 0, :],
        attention=at_least_float32(mixing.attention),
        projected=torch.einsum("...hjc,hcd->...hjd", values, weight),
        before=Way(pieces=tokens, shape=shape),
        after=Way(pieces=out[last:], shape=shape),
        first=Way(pieces=first, shape=shape),
        second=None if second is None else Way(pieces=second, shape=shape),
    )


def _sub_layers(found: Wiring, block: int) -> tuple[Chain, Chain, Chain, Chain | None]:
    """The output weight with what surrounds it, the residual around attention, and the first and second norm."""
    outs = [path for path in found.own if path.source == found.mixing.slot] if found.is_parallel else list(found.out)
    carries = found.streams if found.is_parallel else found.carry
    if (len(outs), len(carries), len(found.streams)) != (1, 1, 1):
        raise _not_found(block, "attention, residual and feed-forward are joined by more than one sum.")
    if not outs[0].has_weights or any(piece.kind == "gain" for piece in outs[0].pieces):
        raise _not_found(block, "the attention output is gated before the output weight, or there is no output weight.")
    if found.is_parallel:
        return outs[0].pieces, carries[0].pieces, (), None
    stream = found.streams[0].pieces
    second = (
        stream[len(found.first) :] if found.first or not found.branches else before_weight(found.branches[0].pieces)
    )
    return outs[0].pieces, carries[0].pieces, found.first, second if has_norm(second) else None


def _not_found(block: int, why: str) -> MethodError:
    return MethodError(
        f"This baseline needs the value and output weights of block {block}, which were not found. {why} "
        "`rollout.attn` and `mean.attn` need none."
    )
