"""The vectors of inputs that share one recording, split by groups of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tensorlens.batches import Batch
from tensorlens.errors import InputError
from tensorlens.maps.groups import Group
from tensorlens.memory import fitting, in_parts
from tensorlens.models.pictures import cells
from tensorlens.operators.operator import FrozenOperator
from tensorlens.pairs.pair_map import BIAS
from tensorlens.pairs.pooling import Pooling
from tensorlens.program.program import of_each
from tensorlens.recording.recording import Span

AT_A_TIME = {"cuda": 2048, "cpu": 64}
"""Inputs of a batch times groups pushed, or vectors pulled, before they are pooled."""


class Vectors:
    """The vector of each input of a batch, `whole` (sample, place, channel), split over groups of tokens.

    There is one place, or one per token with late interaction. Vectors are float64 on the CPU.

    Args:
        batch: The inputs.
        pooling: How states become a vector.
        groups: The groups of each input.
    """

    def __init__(self, batch: Batch, pooling: Pooling, groups: Sequence[Sequence[Group]]) -> None:
        self.batch, self.pooling, self.groups = batch, pooling, groups
        self.recording = recording = batch.recording
        self.input = recording.states[0]
        self.members = torch.zeros(max(map(len, groups)), *self.input.shape[:2], dtype=torch.bool)
        """(group, sample, token): the tokens of each group."""
        for i, of_sample in enumerate(groups):
            for k, group in enumerate(of_sample):
                self.members[k, i, list(group.tokens)] = True
        if pooling.slot is None:
            self.program = recording.part(Span(0, recording.n_blocks))
            self.states = recording.states[-1]
        else:
            self.program = recording.program.part(recording.slots[0], (pooling.slot,))
            self.states = self.program.run(self.input)[0]
        self.mask = self._mask().to(self.states.device)
        self.weights = pooling.weights(self.states, self.mask)
        self.whole, self.gains = self._pooled(self.states), list[Tensor]()
        for projection in pooling.projections:
            self.whole, gain = projection(self.whole)
            self.gains.append(gain)

    def _mask(self) -> Tensor:
        """(sample, token): the outputs that take part: all but padding, or fewer by an attention mask."""
        n_out = self.recording.states[-1].shape[1]
        mask = torch.zeros(len(self.batch), n_out, dtype=torch.bool)
        for i, one in enumerate(self.batch.prepared):
            n = self.batch.lengths[i] if n_out == self.input.shape[1] else n_out
            given = one.arguments.get("attention_mask")
            mask[i, :n] = True
            if isinstance(given, Tensor) and given.shape == (1, n) and bool(given.any()):
                mask[i, :n] = given[0].cpu() != 0
        return mask

    def labels(self, i: int) -> tuple[str, ...]:
        """The groups of one input, and the bias."""
        return (*(group.label for group in self.groups[i]), BIAS)

    def pictures(self, i: int) -> list[dict[str, Any]]:
        """The picture of one input, with the group and the box of each patch; empty for a text."""
        meta = self.batch.context(i).meta
        grid = meta.get("grid")
        if not isinstance(grid, dict):
            return []
        group_of = self.members[:, i].double().argmax(0).tolist()
        boxes = cells(grid["rows"], grid["columns"])
        places = [[group_of[grid["first"] + k], *box] for k, box in enumerate(boxes)]
        return [{"image": meta.get("image"), "places": places}]

    def norms(self, by_norm: bool) -> Tensor:
        """(sample, place, 1): the held norms that vectors are divided by."""
        if not by_norm and not self.pooling.normalised:
            return torch.ones_like(self.whole[..., :1])
        norms = self.whole.norm(dim=-1, keepdim=True)
        if not bool((norms > 0).all()):
            raise InputError('The vector of an input is zero and has no cosine. Pass `measure="dot"`.')
        return norms

    # Taking vectors apart ---------------------------------------------------------------------------------------------

    @property
    def n_pushes(self) -> int:
        """Number of pushes for the parts of an input."""
        return 0 if "parts" in self.__dict__ else len(self.members)

    @cached_property
    def parts(self) -> Tensor:
        """(group + 1, sample, place, channel): the contribution of each group, and last the bias."""
        parts = self._projected(self._pushed())
        bias = self.whole - parts.sum(0) if self.bias is None else self.bias
        return torch.cat([parts, bias[None]])

    @cached_property
    def bias(self) -> Tensor | None:
        """(sample, place, channel): the bias; None if it is the remainder, so that rounding cancels."""
        if self.states.dtype is not torch.float64:
            return None
        at_zero = self._pooled(self.program.run(*self.program.zeros())[0])
        return self.whole - self._projected(self._pooled(self.states) - at_zero)

    def _projected(self, parts: Tensor) -> Tensor:
        """Parts (…, sample, place, channel) of pooled states as parts of vectors."""
        for projection, gain in zip(self.pooling.projections, self.gains, strict=True):
            parts = parts @ projection.weight.to(parts).T * gain
        return parts

    def carried(self, u: Tensor) -> Tensor:
        """(group + 1, vector, sample): products of some vectors (vector, sample, place, channel) with each part."""
        pulled = u
        for projection, gain in zip(reversed(self.pooling.projections), reversed(self.gains), strict=True):
            pulled = pulled * gain @ projection.weight.to(u)
        found = torch.einsum("kst,vst->kvs", self.members.double(), self._pull_back(pulled))
        of_bias = (u * (self.whole if self.bias is None else self.bias)).sum((2, 3))
        return torch.cat([found, (of_bias - found.sum(0) if self.bias is None else of_bias)[None]])

    def _pooled(self, states: Tensor) -> Tensor:
        """(…, token, channel) to (…, place, channel), in float64 on the CPU."""
        if self.weights is not None:
            states = (states * self.weights).sum(-2, keepdim=True, dtype=_exact(states))
        elif self.pooling.kind == "late":
            states = states[..., self.mask[0], :]
        else:
            states = states[..., None, :]
        return states.cpu().double()

    def _pushed(self) -> Tensor:
        """One push per group."""

        def push(some: Tensor) -> Tensor:
            alone = self.input * some[..., None].to(self.input)
            return self._pooled(self._several(self.program.linear.run_each, alone))

        return self._some_at_a_time(self.members, push)

    def _pull_back(self, u: Tensor) -> Tensor:
        """(vector, sample, token): the part of ⟨u, y⟩ that each token carries, for u (vector, sample, …)."""

        def pull(some: Tensor) -> Tensor:
            some = some.to(self.states)
            if self.weights is not None:
                some = some * self.weights
            elif self.pooling.kind == "late":
                some = some.new_zeros(len(some), *self.states.shape).index_copy_(2, self.mask[0].nonzero()[:, 0], some)
            else:
                some = some[:, :, 0]
            pulled = self._several(self.program.pull_each, some)
            return (pulled * self.input).sum(-1, dtype=_exact(pulled)).cpu().double()

        return self._some_at_a_time(u, pull)

    def _several(self, each: Callable[[Any], list[tuple[Tensor, ...]]], items: Tensor) -> Tensor:
        """Several states or cotangents through the program: block by block in a long input, otherwise together."""
        if self.recording.is_streamed:
            return torch.stack([found for (found,) in each([(item,) for item in items])])
        return of_each(lambda item: each([(item,)])[0][0], items)

    def _some_at_a_time(self, items: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        device, n = self.input.device, len(self.batch)
        most = max(1, AT_A_TIME.get(device.type, 64) // n)
        each = 4 * n * FrozenOperator(self.recording).bytes_per_cotangent
        return torch.cat(in_parts(items.to(device), fitting(each, most, device), work))


def _exact(x: Tensor) -> torch.dtype:
    """The type of sums: float64 if the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64
