r"""What becomes of $q_iᵀk_j$ on its way to the softmax: $c·q_iᵀk_j + m$, read from the program.

A fused kernel has scale and mask as arguments of its step. Where attention is spelled out, c is the derivative of what
enters the softmax by the product, and m what enters it where the product is zero.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.inside.block import Block
from tensorlens.program.marks import Meeting
from tensorlens.program.nodes import Held
from tensorlens.program.program import Program, SideChannelError
from tensorlens.recording.recording import Recording


class Place(NamedTuple):
    """Which head looks, from where, to where."""

    head: int
    query: int
    key: int

    def of(self, x: Tensor) -> Tensor:
        """Its entry of scores (…, head, query, key). A view."""
        return x.flatten(0, -3)[self.head, self.query, self.key]


class Affine(NamedTuple):
    """A score before any soft cap: the factor of $q_iᵀk_j$, what is added to it, and whether the key is masked."""

    factor: float
    added: float
    is_masked: bool


def meetings_of(recording: Recording, block: int) -> list[Meeting]:
    """Where queries and keys of a block meet before a softmax."""
    return [one for one in recording.meetings if one.block == block and (one.is_fused or _ends(recording.program, one))]


def _ends(program: Program, meeting: Meeting) -> bool:
    """Whether what enters the softmax may be the product."""
    if meeting.end is None or meeting.slot not in program.makers:
        return False
    first, last = (program.specs[slot].shape for slot in (meeting.slot, meeting.end))
    return first[-2:] == last[-2:] and math.prod(first) == math.prod(last)


def sizes(program: Program, meeting: Meeting) -> tuple[int, int, int]:
    """How many heads, queries and keys there are."""
    query, key = (program.specs[slot].shape for slot in (meeting.query, meeting.key))
    return math.prod(query[:-2]), query[-2], key[-2 if meeting.is_fused else -1]


def affine(block: Block, meeting: Meeting, place: Place) -> Affine:
    """What becomes of one product.

    Raises:
        MethodError: what enters the softmax at a place does not come from the product at that place alone.
    """
    return _fused(block, meeting, place) if meeting.is_fused else _spelled_out(block, meeting, place)


def _fused(block: Block, meeting: Meeting, place: Place) -> Affine:
    program = block.recording.program
    step, (_, n_queries, n_keys) = program.makers[meeting.slot], sizes(program, meeting)
    args: Any = step.args if step.operation == "attention" else (*step.args[4], *step.args[5:])
    mask, causal, scale = args[3:6]
    query = program.specs[meeting.query].shape
    added, is_masked = 0.0, causal and place.key > place.query
    if mask is not None:
        entry = place.of(program.constants[mask.index].broadcast_to(*query[:-2], n_queries, n_keys))
        is_masked |= not bool(entry) if entry.dtype == torch.bool else _is_lowest(entry)
        added = 0.0 if entry.dtype == torch.bool else float(entry)
    return Affine(1 / math.sqrt(query[-1]) if scale is None else scale, added, is_masked)


def _spelled_out(block: Block, meeting: Meeting, place: Place) -> Affine:
    assert meeting.end is not None, "a product that enters a softmax"
    program = _between(block.program, meeting.slot, meeting.end)
    at_x = list(block.values_of(program.inputs).values())
    at_zero = place.of(program.run(torch.zeros_like(at_x[0]), *at_x[1:])[0])
    unit = torch.zeros_like(program.run(*at_x)[0])
    place.of(unit).fill_(1)
    by_product = program.cotangents({meeting.end: unit}, (meeting.slot,))[meeting.slot]
    factor = float(place.of(by_product))
    if int(by_product.count_nonzero()) != (factor != 0):
        raise MethodError(
            f"In block {block.n} of `{block.recording.name}`, queries and keys meet before a softmax 0 times in a way "
            "that can be followed. Use `tensor.in_class`."
        )
    cap = _slope_of_cap(program, at_x, place)
    # Where a mask puts in another number, nothing is left of the product.
    is_masked = factor == 0 or _is_lowest(at_zero)
    return Affine(factor, float(at_zero), is_masked) if cap is None else Affine(factor / cap, 0.0, is_masked)


def _between(program: Program, start: int, end: int) -> Program:
    """From the product to what enters the softmax, and from whatever live is added to it."""
    try:
        return program.part((start,), (end,))
    except SideChannelError as error:
        return program.part((start, *sorted(error.slots)), (end,))


def _slope_of_cap(program: Program, at_x: list[Tensor], place: Place) -> float | None:
    """By what a soft cap, a tanh, multiplies one score; None where there is none."""
    for step in program.steps:
        factors = [arg for arg in step.args[1:] if type(arg) is Held and step.operation in ("mul", "gain")]
        shape = program.specs[step.out].shape
        if factors and program.constants[factors[0].index].shape[-2:] == shape[-2:]:
            slope = place.of(program.constants[factors[0].index].broadcast_to(shape))
            z = place.of(program.observe(at_x, step.slots)[step.slots[0]])
            tanh = z.tanh()
            if any(torch.isclose(slope.to(z), one, rtol=1e-2) for one in (tanh / z, 1 - tanh.square())):
                return float(slope)
    return None


def _is_lowest(entry: Tensor) -> bool:
    """Whether something added is so low that a softmax leaves nothing of it."""
    return bool(entry <= torch.finfo(entry.dtype).min / 2)
