r"""What becomes of $q_iᵀk_j$ before the softmax: factors, additions and masks, read from the program.

A fused kernel has them as arguments of its step. Where attention is spelled out they are the steps between the product
and the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorlens.program.marks import MOVES, Meeting
from tensorlens.program.nodes import Held, Slot, Step
from tensorlens.program.program import Program
from tensorlens.recording.recording import Recording

FOLLOWED = MOVES | {"mul", "div", "add", "gain", "where"}
"""Operations that scores may go through on their way to the softmax."""


class Scores(NamedTuple):
    """The scores of one attention.

    Attributes:
        program: What holds the steps.
        meeting: Where queries and keys meet.
        steps: What becomes of the product, in order; of a fused kernel, its own step.
    """

    program: Program
    meeting: Meeting
    steps: tuple[Step, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many heads, queries and keys there are."""
        query, key = (self.program.specs[slot].shape for slot in (self.meeting.query, self.meeting.key))
        return math.prod(query[:-2]), query[-2], key[-2] if self.meeting.is_fused else key[-1]

    @property
    def slots(self) -> list[int]:
        """The slots whose values at X are needed: what is added live, and the scores on their way."""
        if self.meeting.is_fused:
            return []
        return list(dict.fromkeys([self.meeting.slot, *(s for step in self.steps for s in (*step.slots, step.out))]))

    def affine(self, at_x: Mapping[int, Tensor], head: int, i: int, j: int) -> tuple[float, float]:
        """c and m of the score $c·q_iᵀk_j + m$ before any soft cap."""
        if self.meeting.is_fused:
            _, _, mask, _, scale = self._fused
            width = self.program.specs[self.meeting.query].shape[-1]
            is_added = mask is not None and mask.dtype != torch.bool
            added = float(self._entry(mask, self._fused_shape, head, i, j)) if is_added else 0.0
            return 1 / math.sqrt(width) if scale is None else scale, added
        factor, added, before = 1.0, 0.0, (1.0, 0.0)
        for step in self.steps:
            other, shape = self._other(step, at_x), self.program.specs[step.out].shape
            number = 0.0 if other is None else float(self._entry(other, shape, head, i, j))
            if step.operation == "add":
                added += number
            elif step.operation in ("mul", "gain", "div"):
                if self._is_cap(step, at_x):
                    return before  # what stood there before the division by the cap
                before = factor, added
                number = 1 / number if step.operation == "div" else number
                factor, added = factor * number, added * number
        return factor, added

    def hides(self, at_x: Mapping[int, Tensor], head: int, i: int, j: int) -> bool:
        """Whether a query cannot see a key."""
        if self.meeting.is_fused:
            _, _, mask, causal, _ = self._fused
            if mask is None:
                return causal and j > i
            return causal and j > i or _is_hidden(self._entry(mask, self._fused_shape, head, i, j))
        for step in self.steps:
            shape = self.program.specs[step.out].shape
            if step.operation == "add" and _is_hidden(self._entry(self._other(step, at_x), shape, head, i, j)):
                return True
            if step.operation == "where":
                mask = self.program.constants[step.args[0].index]
                is_first = type(step.args[1]) is Slot
                if bool(self._entry(mask, shape, head, i, j)) != is_first:
                    return True
        return False

    def _other(self, step: Step, at_x: Mapping[int, Tensor]) -> Any:
        """What a step multiplies the scores with, or adds to them; None if it does neither."""
        if step.operation in MOVES or step.operation == "where":
            return None
        place = next(place for place, arg in enumerate(step.args) if not self._is_scores(arg))
        arg = step.args[place]
        return at_x[arg.index] if type(arg) is Slot else self.program.constants[arg.index] if type(arg) is Held else arg

    def _is_scores(self, arg: Any) -> bool:
        return type(arg) is Slot and arg.index in {self.meeting.slot, *(step.out for step in self.steps)}

    def _is_cap(self, step: Step, at_x: Mapping[int, Tensor]) -> bool:
        """Whether a step, with what is added after it, is a tanh."""
        other, source = self._other(step, at_x), at_x[step.slots[0]]
        if not isinstance(other, Tensor) or other.shape[-2:] != source.shape[-2:]:
            return False
        later = self.steps[self.steps.index(step) + 1 :][:1]
        ends = [step.out, *(one.out for one in later if one.operation == "add")]
        expected = source.tanh()
        return any(torch.allclose(at_x[end].to(expected), expected, rtol=1e-2, atol=1e-6) for end in ends)

    @property
    def _fused(self) -> Sequence[Any]:
        """Query, key, mask, whether it is causal, and the scale."""
        args: Any = self.steps[0].args
        if self.steps[0].operation == "live_attention":
            args = (*args[4], *args[5:])
        mask, causal, scale = args[3:6]
        return args[0], args[1], None if mask is None else self.program.constants[mask.index], causal, scale

    @property
    def _fused_shape(self) -> tuple[int, ...]:
        query, key = (self.program.specs[slot].shape for slot in (self.meeting.query, self.meeting.key))
        return *query[:-1], key[-2]

    def _entry(self, value: Any, shape: Sequence[int], head: int, i: int, j: int) -> Any:
        """One entry of what meets the scores, by the rules of broadcasting."""
        return value.broadcast_to(shape).flatten(0, -3)[head, i, j] if isinstance(value, Tensor) else value


def _is_hidden(entry: Any) -> bool:
    """Whether a mask hides a key: False, or added and so low that nothing is left of it."""
    if not isinstance(entry, Tensor):
        return False
    return not bool(entry) if entry.dtype == torch.bool else bool(entry <= torch.finfo(entry.dtype).min / 2)


def find_scores(recording: Recording, block: int) -> list[Scores]:
    """Where queries and keys of a block meet before a softmax, in a way that can be followed."""
    program, found = recording.program, []
    for meeting in [one for one in recording.meetings if one.block == block]:
        steps = (program.makers[meeting.slot],) if meeting.is_fused else _between(program, meeting)
        if steps is not None:
            found.append(Scores(program, meeting, steps))
    return found


def _between(program: Program, meeting: Meeting) -> tuple[Step, ...] | None:
    """The steps from the product to the softmax, in order; None where something else happens to it."""
    if meeting.end is None:
        return None
    made = {meeting.slot}  # of the product
    for step in program.steps:
        if step.block == meeting.block and not made.isdisjoint(step.slots):
            made.add(step.out)
    found, slot = list[Step](), meeting.end
    while slot != meeting.slot:
        step = program.makers.get(slot)
        sources = [] if step is None else [one for one in step.slots if one in made]
        if step is None or step.operation not in FOLLOWED or len(sources) != 1:
            return None
        found.append(step)
        slot = sources[0]
    return tuple(reversed(found))
