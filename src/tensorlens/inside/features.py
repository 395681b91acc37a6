"""The features of a dictionary at one input: what each reads and writes, and the remaining error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tensorlens.errors import InputError, MethodError
from tensorlens.inside.dictionary import Dictionary
from tensorlens.inside.stream import Component, Write

if TYPE_CHECKING:
    from tensorlens.inside.block import Block


@dataclass(frozen=True, eq=False)
class ActiveFeature:
    """A feature that is active somewhere.

    Attributes:
        component: Its name.
        activation: f_k (token,).
        write: d_k (channel,).
        written: The slot of the write that it is part of.
        read: Its row of the encoder (channel,).
        block: The block that it reads.
        slot: The slot that it reads there.
        place: The sum of that block before which it reads the stream.
    """

    component: Component
    activation: Tensor
    write: Tensor
    written: int
    read: Tensor
    block: int
    slot: int
    place: int


@dataclass(frozen=True, eq=False)
class FeatureParts:
    """The parts of a write: active features, the decoder's bias, and the error (token, channel)."""

    features: tuple[ActiveFeature, ...]
    bias: Tensor
    error: Tensor
    share: float

    @property
    def activations(self) -> Tensor:
        """(feature, token)."""
        return torch.stack([one.activation for one in self.features]) if self.features else self.error.new_zeros(0, 0)

    @property
    def writes(self) -> Tensor:
        """(feature, channel)."""
        return torch.stack([one.write for one in self.features]) if self.features else self.bias.new_zeros(0, 0)


def feature_parts(block: Block, write: Write, dictionary: Dictionary) -> FeatureParts:
    """Split one write of a block into features."""
    y = block.to_tokens(block.values[write.slot])[0]
    if len(dictionary.bias) != y.shape[-1]:
        raise InputError(
            f"Expected a dictionary of {y.shape[-1]} channels for block {block.n}; got {len(dictionary.bias)}."
        )
    found = list[ActiveFeature]()
    rest = y - dictionary.bias.to(y)
    for encoder, decoder in zip(dictionary.encoders, dictionary.decoders, strict=True):
        n = block.n if encoder.block is None else encoder.block
        if not block.run.start <= n <= block.n:
            raise MethodError(
                f"Features of block {block.n} that read block {n} need a range of blocks with both, in this order."
            )
        own = block.run.block(n)
        slot, place = read_slot(own, dictionary.component if own.n == block.n else "feed-forward", encoder.reads)
        f = encoder(own.to_tokens(own.values_of([slot])[slot])[0])
        active = f.any(0).nonzero()[:, 0]
        kind = "feature" if own.n == block.n else f"feature of block {own.n}"
        vectors, rows = decoder.to(y)[active], encoder.weight.to(y)[active]
        rest = rest - f[:, active] @ vectors
        for i, k in enumerate(active.tolist()):
            name = Component(block=block.n, kind=kind, feature=k)
            found.append(ActiveFeature(name, f[:, k], vectors[i], write.slot, rows[i], own.n, slot, place))
    share = float(rest.square().sum() / (y - y.mean(0)).square().sum().clamp_min(torch.finfo(y.dtype).tiny))
    return FeatureParts(tuple(found), dictionary.bias.to(y), rest, share)


def read_slot(block: Block, component: str, reads: str) -> tuple[int, int]:
    """The slot that features of a component read: its output, the stream before it, or the output of its norm.

    Also the place of the sum that it belongs to.
    """
    write = next((one for one, kind in block.writes if kind == component), None)
    if write is None:
        raise MethodError(f"Block {block.n} of `{block.recording.name}` has no {component} that can be told apart.")
    place, one = next((place, one) for place, one in enumerate(block.sums or ()) if write in one.writes)
    slots = {"output": lambda: write.slot, "stream": lambda: one.stream, "input": lambda: _taken_in(block, write)}
    return slots[reads](), place


def _taken_in(block: Block, write: Write) -> int:
    """The one slot that the module behind a write reads."""
    for path in reversed([module.path for module in block.recording.modules if module.slot == write.slot]):
        taken = block.taken_by(path)
        if len(taken) == 1:
            return taken[0]
    raise MethodError(
        f"The feed-forward of block {block.n} does not read a single state; use a dictionary that reads the stream "
        "or the output."
    )


def features_of(block: Block, write: Write, kind: str) -> FeatureParts | None:
    """The parts of a write for which there is a dictionary; kept with the pass."""
    dictionary = block.run.finer.features.get(block.n)
    if dictionary is None or dictionary.component != kind:
        return None
    kept = block.run.kept_features
    if block.n not in kept:
        kept[block.n] = feature_parts(block, write, dictionary)
    return kept[block.n]
