r"""The product bound of Eq. 34 for a real model, from its weights: every layout, corrected.

`bounds.py` has the formulas; here they are fed. The parts of each block come from `block_parts`, which has proved that
they rebuild the block, and 1/σ of each norm from the recording. Two readings of what else depends on the input:

- ``"weights"``: $\sqrt L$ for attention, and for a gate the largest value that a normalised row can give it. Only the
  norms' σ are measured, as the paper says. Where a gate reads a row that no norm has bounded (OLMo 2), its measured
  values are used.
- ``"measured"``: the norms of the actual attention matrices, and the actual gates. Smaller, and still a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.folding.parts import BlockParts, NormPart, Projection
from tensorlens.folding.rebuild import Factors, held_factors, norm_scale
from tensorlens.folding.search import block_parts, final_norm
from tensorlens.freezing.places import Place, Span
from tensorlens.freezing.recording import Recording
from tensorlens.models.precision import at_least_float32
from tensorlens.operators import bounds
from tensorlens.operators.bounds import gate_bound, spectral_norm

Reading = Literal["weights", "measured", "printed"]


@dataclass(frozen=True, kw_only=True)
class ProductBound:
    r"""An upper bound of $\Vert T_X\Vert_2$, as its logarithm: thirty blocks multiply to more than a float holds.

    Attributes:
        log10: Of the bound.
        blocks: log10 of the factor of each block, first block first.
        final_norm: log10 of the final norm's factor, 0 without one.
        reading: What was taken from weights and what was measured.
    """

    log10: float
    blocks: tuple[float, ...]
    final_norm: float
    reading: Reading

    @property
    def value(self) -> float:
        """The bound itself, infinite where a float ends."""
        return 10**self.log10 if self.log10 < 308 else math.inf


def product_bound(recording: Recording, span: Span | None = None, reading: Reading = "weights") -> ProductBound:
    r"""$\Vert L_f\Vert\prod_n \Vert T^n\Vert$ over blocks, each bounded by its parts (Eq. 34, corrected and completed).

    Args:
        recording: The model at an input.
        span: Blocks; all of them, and the final norm, if None.
        reading: ``"weights"``, ``"measured"``, or ``"printed"``: the paper's, which is not a bound; post-LN only.

    Raises:
        AnatomyError: A block is not made of one attention, one feed-forward and norms.
    """
    span = span or Span(0, recording.n_blocks)
    factors = [_block(recording, block_parts(recording, n), reading) for n in range(*span)]
    last = final_norm(recording) if span.stop == recording.n_blocks and recording.rules.include_final_norm else None
    tail = 1.0
    if last is not None:
        tail = _norm(last, norm_scale(recording, Place(recording.n_blocks - 1), last), reading)
    logarithms = tuple(math.log10(factor) for factor in factors)
    return ProductBound(
        log10=sum(logarithms) + math.log10(tail), blocks=logarithms, final_norm=math.log10(tail), reading=reading
    )


def _block(recording: Recording, parts: BlockParts, reading: Reading) -> float:
    if reading == "printed" and parts.layout != "post_ln":
        raise MethodError(f"The paper prints a bound for post-LN blocks only; block {parts.index} is {parts.layout}.")
    held = held_factors(recording, parts)
    of = {name: _norm(getattr(parts, name), scale, reading) for name, scale in held.scales.items()}
    attention = _attention(parts, held, reading) * _scale(parts.layer_scale_1, parts)
    ffn = _feed_forward(parts, held, reading) * _scale(parts.layer_scale_2, parts)
    norm_1, norm_2 = of.get("norm_1", 1.0), of.get("norm_2", 1.0)
    post_1, post_2 = of.get("post_norm_1", 1.0), of.get("post_norm_2", 1.0)
    by_layout: dict[str, Callable[[], float]] = {
        "post_ln": lambda: bounds.post_ln_bound(attention, norm_1, ffn, norm_2),
        "pre_ln": lambda: bounds.pre_ln_bound(norm_1, attention, norm_2, ffn),
        "parallel": lambda: bounds.parallel_bound(norm_1, attention, norm_2, ffn),
        "sandwich": lambda: bounds.sandwich_bound(norm_1, attention, post_1, norm_2, ffn, post_2),
        "post_sublayer": lambda: bounds.post_sublayer_bound(attention, post_1, ffn, post_2),
    }
    return by_layout[parts.layout]()


def _norm(norm: NormPart, inverse_std: Tensor | None, reading: Reading) -> float:
    r"""$\Vert\gamma\Vert_\infty \max_l 1/\sigma_l$; the print has the variance for σ."""
    assert inverse_std is not None, "a norm that was found has its scale held"
    gain = 1.0 if norm.gain is None else float(at_least_float32(norm.gain).abs().max())
    largest = float(inverse_std.max())
    return gain * (largest**2 if reading == "printed" else largest)


def _scale(layer_scale: Tensor | None, parts: BlockParts) -> float:
    largest = 1.0 if layer_scale is None else float(at_least_float32(layer_scale).abs().max())
    return largest * abs(parts.residual_multiplier)


def _attention(parts: BlockParts, held: Factors, reading: Reading) -> float:
    r"""$\sum_h \Vert A_h\Vert_2\Vert W_{v,h}W_{o,h}\Vert_2$, with $\Vert A_h\Vert_2 \le \sqrt L$ unless measured."""
    w_value = at_least_float32(parts.value.weight).unflatten(1, (parts.n_kv_heads, -1)).transpose(0, 1)
    w_value = w_value.repeat_interleave(parts.n_heads // parts.n_kv_heads, 0)
    w_out = at_least_float32(parts.out.weight).unflatten(0, (parts.n_heads, -1))
    # ‖W_v W_o‖ = ‖R W_o‖ for W_v = Q R: a head's few channels instead of D rows.
    by_head = spectral_norm(torch.linalg.qr(w_value).R @ w_out)
    if reading == "measured":
        return float((spectral_norm(held.attention).to(by_head) * by_head).sum())
    return float(held.attention.shape[-1] ** 0.5 * by_head.sum())


def _feed_forward(parts: BlockParts, held: Factors, reading: Reading) -> float:
    ffn = parts.feed_forward
    up, gate = _largest_factors(parts, held, reading)
    inner = up * float(spectral_norm(at_least_float32(ffn.up.weight)))
    if ffn.gate is not None and gate:
        inner += gate * float(spectral_norm(at_least_float32(ffn.gate.weight)))
    return inner * float(spectral_norm(at_least_float32(ffn.down.weight)))


def _largest_factors(parts: BlockParts, held: Factors, reading: Reading) -> tuple[float, float]:
    """The largest factors on the up and on the gate branch."""
    measured = tuple(0.0 if factor is None else float(factor.abs().max()) for factor in (held.up, held.gate))
    ffn = parts.feed_forward
    if reading == "measured":
        return measured[0], measured[1]
    if ffn.gate is None:
        # φ(z)/z ≤ 1 for every usual activation; for one that exceeds it there is no constant, and it is measured.
        return (1.0 if reading == "printed" else max(1.0, measured[0])), 0.0
    if parts.norm_2 is None or parts.layout == "post_ln":
        return measured[0], measured[1]
    share = 0.5 if held.up is not None and held.gate is not None else 1.0
    up = share * _longest(ffn.gate, parts.norm_2) if held.up is not None else 0.0
    gate = share * _longest(ffn.up, parts.norm_2) if held.gate is not None else 0.0
    # An activation that exceeds |z| would break the bound on the gate; what was measured then stands.
    return max(up, measured[0]), max(gate, measured[1])


def _longest(projection: Projection, norm: NormPart) -> float:
    """The largest entry that a projection can give on a row that `norm` has normalised."""
    weight = at_least_float32(projection.weight)
    scale = torch.ones_like(weight[:, 0]) if norm.gain is None else at_least_float32(norm.gain)
    shift = torch.zeros_like(scale) if norm.shift is None else at_least_float32(norm.shift)
    bias = torch.zeros_like(weight[0]) if projection.bias is None else at_least_float32(projection.bias)
    return gate_bound(weight, bias, scale, shift)
