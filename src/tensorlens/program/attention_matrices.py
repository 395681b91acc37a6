"""Attention matrices of a recorded pass, and the values that they mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.models.precision import at_least_float32
from tensorlens.program.composite import rows_of_attention
from tensorlens.program.marks import Mixture
from tensorlens.program.nodes import Held, Slot, Step, leaves
from tensorlens.program.program import SideChannelError
from tensorlens.recording.recording import Recording


class Mixing(NamedTuple):
    r"""What one block's attention did: $\sum_j A_{h,ij} v_{h,j}$ for each head. One sample has no axis of its own.

    Attributes:
        attention: $A_h$; rows sum to one except where the model has a sink.
        values: $v_{h,j}$, biases and the norm before them included; a value head that several query heads share is
            repeated.
    """

    attention: Float[Tensor, "*sample head out_token in_token"]
    values: Float[Tensor, "*sample head in_token head_channel"]


@torch.no_grad()
def mixing(recording: Recording, block: int) -> Mixing:
    """The attention of one block.

    Raises:
        MethodError: the block has no softmax attention from tokens to tokens, or more than one.
    """
    n_axes = 3 if recording.n_samples == 1 else 4
    found = [_formed(recording, mark) for mark in recording.mixtures if mark.block == block]
    found = [one for one in found if one.attention.dim() == one.values.dim() == n_axes]
    if len(found) != 1:
        raise MethodError(
            f"Block {block} of `{recording.name}` mixes tokens by {len(found)} softmax attentions; expected one. Use a "
            "method that needs no attention matrix, such as `tensor.norm`."
        )
    attention, values = found[0]
    n_shared = attention.shape[-3] // values.shape[-3]
    return Mixing(attention, values if n_shared == 1 else values.repeat_interleave(n_shared, -3))


def _formed(recording: Recording, mark: Mixture) -> Mixing:
    step = next(step for step in recording.program.steps if step.out == mark.slot)
    fused = step.operation in ("attention", "live_attention")
    others = [leaf for leaf in leaves(step.args) if type(leaf) in (Slot, Held) and leaf != mark.values]
    asked = [mark.values] if fused else [mark.values, *others[:1]]
    seen = _observed(recording, mark.block, [one.index for one in asked if type(one) is Slot])
    held = recording.program.constants
    values, *weights = (seen[one.index] if type(one) is Slot else held[one.index] for one in asked)
    return Mixing(_one(_fused(held, step) if fused else weights[0]), _one(values))


def _observed(recording: Recording, block: int, slots: Sequence[int]) -> dict[int, Tensor]:
    """What slots of a block hold at X: from the state before it or, where it reads more than that, from the first."""
    for start in (block, 0):
        try:
            program = recording.program.part(recording.slots[start], slots)
        except SideChannelError:
            continue
        sizes = [program.specs[slot].shape[1] for slot in program.inputs]
        return program.observe(recording.states[start].split(sizes, 1), slots)
    raise AssertionError("a recorded pass can be run from its beginning")


def _fused(held: Sequence[Tensor], step: Step) -> Tensor:
    """The matrix that a fused kernel never formed."""
    is_live = step.operation == "live_attention"
    query, key = step.args[4][:2] if is_live else step.args[:2]
    mask, causal, scale, grouped = step.args[5:9] if is_live else step.args[3:7]
    q, k = (at_least_float32(held[one.index]) for one in (query, key))
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if grouped else k
    mask = held[mask.index] if type(mask) is Held else mask
    return rows_of_attention(q, k, mask, causal, q.shape[-1] ** -0.5 if scale is None else scale)


def _one(tensor: Tensor) -> Tensor:
    """Without an axis for the only sample of a batch."""
    return tensor[0] if len(tensor) == 1 else tensor
