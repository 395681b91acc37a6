r"""One block's attention taken apart by source token, with every norm on the way held at its actual scale.

For output i and source j, in the words of METHOD and of Kobayashi et al.:

- $c_{ij} = \sum_h A_{h,ij}\, v_{h,j} W_{o,h}$, with the *actual* values, biases and norm before them included;
- $s_{ij}$: the same after what stands between attention and the residual sum (a norm, a layer scale);
- $y_{ij} = \delta_{ij} x_i + s_{ij}$: with the residual; $\sum_j y_{ij}$ and the output bias make the residual stream.

Tensors of this library leave value biases to B; these measures, after their sources, do not. Of several samples that
were recorded together every tensor has an axis for samples in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import AnatomyError, MethodError
from tensorlens.folding.parts import BlockParts, NormPart
from tensorlens.folding.rebuild import norm_scale
from tensorlens.folding.search import block_parts
from tensorlens.freezing.observe import Mixing
from tensorlens.freezing.places import Place
from tensorlens.freezing.recording import Recording
from tensorlens.models.precision import at_least_float32

Vectors = Float[Tensor, "*sample out_token in_token channel"]
CHUNK_BYTES = {"cuda": 2**29, "cpu": 2**26}
"""Vectors of one chunk of rows; all of them would be L²·D numbers for each sample."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm as the linear map it is once its scale is held: no shift."""

    part: NormPart
    inverse_std: Float[Tensor, "*sample out_token"]

    def __call__(self, vectors: Vectors, rows: slice) -> Vectors:
        """Each vector by the scale of its output; each centred by its own mean, where the norm centres."""
        if self.part.kind == "layer":
            vectors = vectors - vectors.mean(-1, keepdim=True)
        vectors = vectors * self.inverse_std[..., rows, None, None].to(vectors)
        return vectors if self.part.gain is None else vectors * at_least_float32(self.part.gain).to(vectors)

    def shift(self, like: Tensor) -> Tensor:
        """β, or zero."""
        return torch.zeros_like(like) if self.part.shift is None else at_least_float32(self.part.shift).to(like)


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    r"""What each source token gives to each output within one block.

    Attributes:
        parts: The block's weights and layout.
        x: The state entering the block.
        attention: $A_h$.
        projected: $v_{h,j} W_{o,h}$.
        norm_1: The norm after the first sum (post-LN), as a linear map; None elsewhere.
        post_norm_1: The norm between attention and the sum, or None.
        norm_2: The norm before the feed-forward, or after the second sum (post-LN), or None.
    """

    parts: BlockParts
    x: Float[Tensor, "*sample token channel"]
    attention: Float[Tensor, "*sample head out_token in_token"]
    projected: Float[Tensor, "*sample head in_token channel"]
    norm_1: Norm | None
    post_norm_1: Norm | None
    norm_2: Norm | None

    def chunks(self) -> Iterator[slice]:
        """Ranges of output tokens small enough to hold vectors for every source."""
        n_tokens, most = self.x.shape[-2], CHUNK_BYTES.get(self.x.device.type, 2**26)
        size = max(1, most // self.x.nbytes)
        return (slice(start, min(start + size, n_tokens)) for start in range(0, n_tokens, size))

    def mixed(self, rows: slice) -> Vectors:
        """$c_{ij}$, the layer scale and residual factor of the model applied: they are part of its output weight."""
        vectors = torch.einsum("...hij,...hjd->...ijd", self.attention[..., rows, :], self.projected)
        return vectors if self.post_norm_1 is not None else self._scaled(vectors)

    def added(self, vectors: Vectors, rows: slice) -> Vectors:
        """$s_{ij}$ from $c_{ij}$: what each source adds to the residual stream."""
        return vectors if self.post_norm_1 is None else self._scaled(self.post_norm_1(vectors, rows))

    def with_residual(self, mixed: Vectors, rows: slice) -> Vectors:
        """$y_{ij} = δ_{ij} x_i + s_{ij}$ from $c_{ij}$, which may be written over."""
        vectors = self.added(mixed, rows)
        vectors.diagonal(rows.start, -3, -2).add_(self.x[..., rows, :].to(vectors).mT)
        return vectors

    def out_bias(self, rows: slice) -> Float[Tensor, "*sample out_token channel"]:
        """What the output bias, and the shift of a norm behind it, add to the residual stream."""
        bias = (
            torch.zeros_like(self.projected[(0,) * (self.projected.dim() - 1)])
            if self.parts.out.bias is None
            else at_least_float32(self.parts.out.bias)
        )
        vectors = bias.to(self.projected).expand(*self.x.shape[:-2], rows.stop - rows.start, 1, -1)
        if self.post_norm_1 is not None:
            vectors = self.post_norm_1(vectors, rows) + self.post_norm_1.shift(bias)
        return self._scaled(vectors)[..., 0, :]

    def _scaled(self, vectors: Tensor) -> Tensor:
        scale = self.parts.layer_scale_1
        vectors = vectors if scale is None else vectors * at_least_float32(scale.detach()).to(vectors)
        return vectors * self.parts.residual_multiplier


def decompose(recording: Recording, block: int, mixing: Mixing) -> Decomposition:
    """Take one block apart.

    Raises:
        MethodError: the block is not made of attention and a feed-forward that are known.
    """
    is_one = recording.n_samples == 1
    try:
        parts = block_parts(recording if is_one else recording.sample(0), block)
    except AnatomyError as error:
        raise MethodError(
            f"This baseline needs the value and output weights of block {block}, which were not found. {error} "
            "`rollout.attn` and `mean.attn` need none."
        ) from error
    values = at_least_float32(mixing.values)
    weight = (
        at_least_float32(parts.out.weight).to(values).unflatten(0, (values.shape[-3], -1))
    )  # (head, head_channel, channel)
    post_ln = parts.layout == "post_ln"
    return Decomposition(
        parts=parts,
        x=at_least_float32(recording.states[block][0] if is_one else recording.states[block]),
        attention=at_least_float32(mixing.attention),
        projected=torch.einsum("...hjc,hcd->...hjd", values, weight),
        norm_1=_norm(recording, block, parts.norm_1) if post_ln else None,
        post_norm_1=_norm(recording, block, parts.post_norm_1),
        norm_2=_norm(recording, block, parts.norm_2),
    )


def _norm(recording: Recording, block: int, part: NormPart | None) -> Norm | None:
    if part is None:
        return None
    scale = norm_scale(recording, Place(block, inside=True), part)
    if scale is None:
        raise MethodError(
            f"The scale of `{part.path}` in block {block} is not one number a token, as this baseline needs. Use "
            "`rollout.attn` or a method of the tensor."
        )
    shape = recording.states[block].shape[:-1]
    return Norm(part=part, inverse_std=scale.reshape(shape[1:] if recording.n_samples == 1 else shape))
