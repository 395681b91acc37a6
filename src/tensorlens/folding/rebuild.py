"""A block from its parts and the held factors: the affine function a fold must equal.

Row convention: a token is a row x, a weight acts on the right. Everything is computed in float32 or better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import Hidden
from tensorlens.errors import AnatomyError
from tensorlens.folding.parts import BlockParts, NormPart, Projection
from tensorlens.freezing.places import Place, Site
from tensorlens.freezing.recording import Recording
from tensorlens.models.precision import at_least_float32


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What the recording holds of one block. Of several samples, the tokens of one follow those of another.

    Attributes:
        attention: $A_h$, with an axis for samples in front where there are several.
        scales: 1/σ for each token and norm, by the name of the norm in `BlockParts`.
        up: Factor on the up branch, (token, inner), or None where that branch is held.
        gate: Factor on the gate branch, or None.
    """

    attention: Float[Tensor, "*sample head out_token in_token"]
    scales: dict[str, Float[Tensor, " token"]]
    up: Float[Tensor, "token inner"] | None
    gate: Float[Tensor, "token inner"] | None


def held_factors(recording: Recording, parts: BlockParts, *, together: bool = False) -> Factors:
    """The factors of a block, in float32 or better: of one sample, or of all that were recorded together."""
    place = Place(parts.index, inside=True)
    norms = {name: getattr(parts, name) for name in ("norm_1", "post_norm_1", "norm_2", "post_norm_2")}
    scales = {name: norm_scale(recording, place, norm) for name, norm in norms.items() if norm is not None}
    up, gate = _held_inner(recording, parts)
    attention = held_attention(recording, parts)
    return Factors(attention=attention if together else attention[0], scales=scales, up=up, gate=gate)  # type: ignore[arg-type]


def norm_scale(recording: Recording, place: Place, norm: NormPart) -> Float[Tensor, " token"] | None:
    """1/σ of each token, or None where there is no such factor."""
    factor = recording.factors.get(Site(place, norm.path, norm.operation, norm.occurrence))
    if not isinstance(factor, Tensor) or factor.shape[-1] != 1:
        return None
    return at_least_float32(factor).flatten()


def held_attention(recording: Recording, parts: BlockParts) -> Float[Tensor, "sample head out_token in_token"]:
    """$A_h$ of a block from held factors alone: the softmax as it is, or queries and keys put together again."""
    place, factors = Place(parts.index, inside=True), recording.factors
    softmax = factors.get(Site(place, parts.attention, "softmax", 0))
    if isinstance(softmax, Tensor):
        return at_least_float32(softmax)
    try:
        q, k, (mask, is_causal, scale) = (
            factors[Site(place, parts.attention, f"attention.{name}", 0)] for name in ("query", "key", "options")
        )
    except KeyError:
        raise AnatomyError(
            f"The recording holds no attention of block {parts.index} in `{parts.attention}`. Expected a softmax, or "
            "the queries and keys of a fused kernel; ask the lens for the input again."
        ) from None
    return attention_matrix(q, k, mask, is_causal=is_causal, scale=scale)


def attention_matrix(
    query: Float[Tensor, "sample head token head_channel"], key: Float[Tensor, "sample kv_head token head_channel"],
    mask: Tensor | None, *, is_causal: bool, scale: float | None,
) -> Float[Tensor, "sample head out_token in_token"]:  # fmt: skip
    """Softmax of scaled products, masked as `scaled_dot_product_attention` does."""
    q, k = at_least_float32(query), at_least_float32(key)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1)


def _held_inner(recording: Recording, parts: BlockParts) -> tuple[Tensor | None, Tensor | None]:
    """Factors on the up and the gate branch: φ(z)/z alone, or by the gate rule."""
    ffn, place, factors = parts.feed_forward, Place(parts.index, inside=True), recording.factors

    def held(path: str | None, operation: str) -> Tensor | None:
        factor = None if path is None else factors.get(Site(place, path, operation, 0))
        return None if factor is None else at_least_float32(factor).reshape(-1, factor.shape[-1])

    gain = held(ffn.activation, ffn.operation)
    gate, up = held(ffn.product, "gate"), held(ffn.product, "up")
    if gate is None and up is None:
        return gain, None
    if up is None or gain is None:
        return gate, None
    return (None, gain * up) if gate is None else (0.5 * gate, 0.5 * gain * up)


def rebuild(parts: BlockParts, factors: Factors, x: Hidden) -> Hidden:
    """The frozen block at x, from its parts: affine in x."""
    x, r = at_least_float32(x), parts.residual_multiplier

    def norm(name: str, v: Tensor) -> Tensor:
        part = getattr(parts, name)
        return v if part is None else rebuild_norm(part, factors.scales[name], v)

    def attend(v: Tensor) -> Tensor:
        out = norm("post_norm_1", _attend(parts, factors, v))
        return r * (out if parts.layer_scale_1 is None else out * parts.layer_scale_1)

    def feed(v: Tensor) -> Tensor:
        out = norm("post_norm_2", _feed(parts, factors, v))
        return r * (out if parts.layer_scale_2 is None else out * parts.layer_scale_2)

    if parts.layout == "post_ln":
        y = norm("norm_1", x + attend(x))
        return norm("norm_2", y + feed(y))
    if parts.layout == "parallel":
        return x + attend(norm("norm_1", x)) + feed(norm("norm_2", x))
    y = x + attend(norm("norm_1", x))
    return y + feed(norm("norm_2", y))


def rebuild_norm(
    norm: NormPart, scale: Float[Tensor, "*token"], v: Float[Tensor, "*token channel"], *, shifted: bool = True
) -> Float[Tensor, "*token channel"]:
    """A norm with 1/σ held; its linear part alone if it is not `shifted`."""
    v = at_least_float32(v)
    v = v - v.mean(-1, keepdim=True) if norm.kind == "layer" else v
    v = v * scale[..., None]
    v = v if norm.gain is None else v * at_least_float32(norm.gain)
    return v if norm.shift is None or not shifted else v + at_least_float32(norm.shift)


def project(projection: Projection, v: Tensor) -> Tensor:
    """A row through a linear layer."""
    y = at_least_float32(v) @ at_least_float32(projection.weight)
    return y if projection.bias is None else y + at_least_float32(projection.bias)


def _attend(parts: BlockParts, factors: Factors, v: Tensor) -> Tensor:
    values = project(parts.value, v).unflatten(-1, (parts.n_kv_heads, -1)).transpose(0, 1)
    values = values.repeat_interleave(parts.n_heads // parts.n_kv_heads, 0)
    mixture = (factors.attention.to(values) @ values).transpose(0, 1).flatten(1)
    return project(parts.out, mixture)


def _feed(parts: BlockParts, factors: Factors, v: Tensor) -> Tensor:
    ffn = parts.feed_forward
    inner = torch.zeros((), dtype=v.dtype, device=v.device)
    if factors.up is not None:
        inner = inner + project(ffn.up, v) * factors.up
    if factors.gate is not None and ffn.gate is not None:
        inner = inner + project(ffn.gate, v) * factors.gate
    return project(ffn.down, inner)
