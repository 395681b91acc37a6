r"""The attention of a block as matrices: $A_h$ and the values $v_h$ that it mixed, read from the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.program.marks import Mixture
from tensorlens.program.steps import OPERATIONS, Held, Slot

if TYPE_CHECKING:
    from tensorlens.recording.recording import Recording


@dataclass(frozen=True, kw_only=True)
class Mixing:
    r"""The attention of one block: $\sum_j A_{h,ij} v_{h,j}$ for each head.

    Attributes:
        attention: $A_h$; rows sum to one unless the model has a sink.
        values: $v_{h,j}$, including biases and the norm before them; a value head that several query heads share is
            repeated.

    With several samples both have an axis for samples in front.
    """

    attention: Float[Tensor, "*sample head out_token in_token"]
    values: Float[Tensor, "*sample head in_token head_channel"]


def mixing(recording: Recording, block: int) -> Mixing:
    """The attention of one block as the model used it.

    Raises:
        MethodError: the block has no softmax attention from tokens to tokens, or more than one.
    """
    n_axes = 3 if recording.n_samples == 1 else 4
    found = [pair for pair in _pairs(recording, block) if all(part.dim() == n_axes for part in pair)]
    if len(found) != 1:
        raise MethodError(
            f"Block {block} of `{recording.name}` has {len(found)} softmax attention layers; expected one. Use a "
            "method that needs no attention matrix, such as `tensor.norm`."
        )
    attention, values = found[0]
    return Mixing(attention=attention, values=values.repeat_interleave(attention.shape[-3] // values.shape[-3], -3))


def _pairs(recording: Recording, block: int) -> list[tuple[Tensor, Tensor]]:
    mixtures = [mixture for mixture in recording.mixtures if mixture.block == block]
    slots = [part.index for one in mixtures for part in (one.values, one.weights) if type(part) is Slot]
    at_x, constants = recording.values(block, slots), recording.program.constants

    def value(part: Slot | Held) -> Tensor:
        found = at_x[part.index] if type(part) is Slot else constants[part.index]
        return found[0] if len(found) == 1 else found

    return [
        (_formed(recording, one) if one.weights is None else value(one.weights), value(one.values)) for one in mixtures
    ]


class FusedAttention(NamedTuple):
    """The held arguments of a fused kernel."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    grouped: bool


def fused_attention(recording: Recording, slot: int) -> FusedAttention:
    """The arguments of the fused kernel that made a slot.

    Raises:
        MethodError: no fused kernel made it.
    """
    step, constants = recording.program.makers[slot], recording.program.constants
    args: Any = step.args
    if step.operation == "live_attention":
        args = (*args[4][:2], None, *args[5:9])
    elif step.operation != "attention":
        raise MethodError("Queries and keys need fused attention; load the model with `attention='sdpa'`.")
    held: list[Any] = [constants[arg.index] if type(arg) is Held else arg for arg in args]
    query, key, _, mask, causal, scale, grouped = held
    return FusedAttention(query, key, mask, causal, query.shape[-1] ** -0.5 if scale is None else scale, grouped)


def _formed(recording: Recording, mixture: Mixture) -> Tensor:
    """A of a fused kernel: its result for the unit matrix."""
    query, key, *options = fused_attention(recording, mixture.slot)
    units = torch.eye(key.shape[-2], dtype=query.dtype, device=query.device).expand(*key.shape[:-1], -1)
    found = OPERATIONS["attention"].run(query, key, units, *options)
    return found[0] if len(found) == 1 else found
