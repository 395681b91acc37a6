"""The features of a dictionary at one input: what each read, what it wrote, and what is left over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tensorlens.errors import InputError, MethodError
from tensorlens.inside.dictionary import Dictionary, Encoder
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
        read: Its row of the encoder (channel,).
        encoder: The encoder it belongs to.
    """

    component: Component
    activation: Tensor
    write: Tensor
    read: Tensor
    encoder: Encoder


@dataclass(frozen=True, eq=False)
class FeatureParts:
    """What a write is taken apart into: active features, the decoder's bias, and the error (token, channel)."""

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
    """Take one write of a block apart."""
    y = block.to_tokens(block.values[write.slot])[0]
    if len(dictionary.bias) != y.shape[-1]:
        raise InputError(
            f"Expected a dictionary of {y.shape[-1]} channels for block {block.n}; got {len(dictionary.bias)}."
        )
    found = list[ActiveFeature]()
    rest = y - dictionary.bias.to(y)
    for encoder, decoder in zip(dictionary.encoders, dictionary.decoders, strict=True):
        n = block.n if encoder.block is None else encoder.block
        own = block.run.block(n)
        slot = read_slot(own, write, encoder)
        f = encoder(own.to_tokens(own.values_of([slot])[slot])[0])
        active = f.any(0).nonzero()[:, 0]
        kind = "feature" if n == block.n else f"feature of block {n}"
        vectors, rows = decoder.to(y)[active], encoder.weight.to(y)[active]
        rest = rest - f[:, active] @ vectors
        found += [
            ActiveFeature(Component(block=block.n, kind=kind, feature=k), f[:, k], vectors[i], rows[i], encoder)
            for i, k in enumerate(active.tolist())
        ]
    share = float(rest.square().sum() / (y - y.mean(0)).square().sum().clamp_min(torch.finfo(y.dtype).tiny))
    return FeatureParts(tuple(found), dictionary.bias.to(y), rest, share)


def read_slot(block: Block, write: Write, encoder: Encoder) -> int:
    """The slot that an encoder reads in a block: of the write itself, before its norm, or behind it."""
    if encoder.block is not None and encoder.block != block.n or write not in [one for one, _ in block.writes]:
        write = next(one for one, kind in block.writes if kind == "feed-forward")
    if encoder.reads == "output":
        return write.slot
    sums = block.sums or []
    if encoder.reads == "stream":
        return next(one.stream for one in sums if write in one.writes)
    return _taken_in(block, write)


def _taken_in(block: Block, write: Write) -> int:
    """The one slot that the module behind a write takes in."""
    for path in reversed([module.path for module in block.recording.modules if module.slot == write.slot]):
        steps = [step for step in block.program.steps if f"{step.module}.".startswith(f"{path}.")]
        made = {step.out for step in steps}
        taken = list(dict.fromkeys(slot for step in steps for slot in step.slots if slot not in made))
        if len(taken) == 1:
            return taken[0]
    raise MethodError(
        f"The feed-forward of block {block.n} does not read a single state; use a dictionary that reads the stream "
        "or the output."
    )


def features_of(block: Block, write: Write, kind: str) -> FeatureParts | None:
    """The parts of a write that a dictionary was given for; kept with the pass."""
    dictionary = block.run.finer.features.get(block.n)
    if dictionary is None or dictionary.component != kind:
        return None
    kept = block.run.kept_features
    if block.n not in kept:
        kept[block.n] = feature_parts(block, write, dictionary)
    return kept[block.n]
