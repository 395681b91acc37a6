"""What one block is made of, as weights: the record that folding and the attention baselines read.

Only records live here. They point at the model's own modules and copy nothing until a weight is asked for.
`tensorlens.folding.search.block_parts` finds them, and gives none that do not rebuild the block.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Layout = Literal["post_ln", "pre_ln", "parallel", "sandwich", "post_sublayer"]
"""How norms, attention, feed-forward and residuals are wired; the formulas are in `operators.equations`."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A linear layer, or some of its output channels: x @ weight + bias, x a row.

    Attributes:
        path: Path of the module.
        module: A linear layer; its weight is stored as (out, in), or as (in, out) where `is_row_major`.
        is_row_major: Whether the weight is stored as (in, out), as GPT-2's Conv1D does.
        columns: Output channels taken, or None for all: a third of a fused projection, one head of an interleaved one.
        rows: Order of the input channels, or None for their own.
    """

    path: str
    module: nn.Module
    is_row_major: bool = False
    columns: Int[Tensor, " out_channel"] | None = None
    rows: Int[Tensor, " in_channel"] | None = None

    @property
    def weight(self) -> Float[Tensor, "in_channel out_channel"]:
        """The weight, acting on the right."""
        stored: Tensor = self.module.weight.detach()  # type: ignore[union-attr,operator]
        weight = stored if self.is_row_major else stored.T
        weight = weight if self.columns is None else weight[:, self.columns]
        return weight if self.rows is None else weight[self.rows]

    @property
    def bias(self) -> Float[Tensor, " out_channel"] | None:
        """What is added, or None."""
        bias = getattr(self.module, "bias", None)
        if bias is None:
            return None
        return bias.detach() if self.columns is None else bias.detach()[self.columns]


@dataclass(frozen=True, kw_only=True)
class NormPart:
    r"""A norm: $\gamma ⊙ (v - mean(v))/\sigma + \beta$, or the same without the mean.

    Attributes:
        path: Path of the module.
        module: The module.
        kind: ``"layer"`` centres, ``"rms"`` does not.
        offset: Added to the stored gain to give the effective one: 1 for Gemma, which stores γ - 1.
        operation: Name under which the recording holds 1/σ.
        occurrence: Which of the module's uses in the block this is.
        eps: The stabiliser, where the module tells it.
    """

    path: str
    module: nn.Module
    kind: Literal["layer", "rms"]
    offset: float
    operation: str
    occurrence: int = 0
    eps: float | None = None

    @property
    def gain(self) -> Float[Tensor, " channel"] | None:
        """γ as it acts, or None for ones."""
        weight = getattr(self.module, "weight", None)
        return None if weight is None else weight.detach() + self.offset if self.offset else weight.detach()

    @property
    def shift(self) -> Float[Tensor, " channel"] | None:
        """β, or None."""
        bias = getattr(self.module, "bias", None)
        return None if bias is None else bias.detach()


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    r"""$(\varphi(x W_{gate}) ⊙ x W_{up}) W_{down}$, or $\varphi(x W_{up}) W_{down}$ without a gate; biases included.

    Attributes:
        up: The projection that is multiplied; the only one where there is no gate.
        gate: The projection that the activation sees, or None.
        down: The projection back.
        activation: Path of the module whose activation it is.
        operation: Name under which the recording holds φ(z)/z.
        product: Path of the module in which gate and up meet, or None.
    """

    up: Projection
    gate: Projection | None
    down: Projection
    activation: str
    operation: str
    product: str | None


@dataclass(frozen=True, kw_only=True)
class BlockParts:
    """One block: which weights, in which order. Verified against the frozen block when found.

    Attributes:
        index: The block, counted by call.
        layout: The wiring. In ``"post_ln"``, norm_1 and norm_2 follow the residual sums; elsewhere they come before
            attention and feed-forward.
        value: (channel, kv_head · head_channel), heads in order.
        out: (head · head_channel, channel).
        n_heads: Query heads.
        n_kv_heads: Value heads; query head h uses value head h · n_kv_heads // n_heads.
        norm_1: Before attention (after the first sum for post_ln), or None.
        post_norm_1: After attention and before the sum, or None.
        norm_2: Before the feed-forward (after the second sum for post_ln), or None; may be norm_1 in ``"parallel"``.
        post_norm_2: After the feed-forward and before the sum, or None.
        feed_forward: The feed-forward.
        layer_scale_1: Factor on attention's output for each channel, or None.
        layer_scale_2: The same for the feed-forward.
        residual_multiplier: Factor on both before they are added.
        attention: Path of the module in which attention meets values.
    """

    index: int
    layout: Layout
    value: Projection
    out: Projection
    n_heads: int
    n_kv_heads: int
    norm_1: NormPart | None
    post_norm_1: NormPart | None
    norm_2: NormPart | None
    post_norm_2: NormPart | None
    feed_forward: FeedForward
    layer_scale_1: Tensor | None = None
    layer_scale_2: Tensor | None = None
    residual_multiplier: float = 1.0
    attention: str = ""


def match_columns(
    wanted: Float[Tensor, "token wanted"], offered: Float[Tensor, "token offered"]
) -> Int[Tensor, " wanted"] | None:
    """For each wanted column the offered one with the very same values, or None if one has no twin.

    Of several with the same values each is taken once, in order, before the last is taken again: at an input of one
    token, heads that share their values give the same mixture.
    """
    places: dict[bytes, list[int]] = defaultdict(list)
    for i, column in enumerate(_columns(offered)):
        places[column].append(i)
    found = []
    for column in _columns(wanted):
        if column not in places:
            return None
        twins = places[column]
        found.append(twins.pop(0) if len(twins) > 1 else twins[0])
    return torch.tensor(found, device=wanted.device)


def _columns(matrix: Tensor) -> list[bytes]:
    # A few tokens tell columns apart; through float32 because numpy has no bfloat16.
    values = matrix[:16].T.to(torch.float64 if matrix.dtype is torch.float64 else torch.float32)
    return [column.tobytes() for column in values.contiguous().cpu().numpy()]
