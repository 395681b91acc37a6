"""`Pieces`: a program cut where states enter blocks, each piece run and pulled on its own.

What a piece holds at X comes from running it alone, from the values of what it reads; cotangents go from the last piece
to the first, and wait at whatever slot of an earlier piece they belong to. So a question about every block needs the
memory of one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cached_property

from torch import Tensor

from tensorlens.program.program import Program

Cotangents = dict[int, Tensor]
"""Cotangents by slot."""


class Pieces:
    """A program in pieces, one after the other.

    Args:
        program: All of it.
        ends: How many steps come before the end of each piece but the last.
        known: Values at X of some slots, its inputs among them.
    """

    def __init__(self, program: Program, ends: Sequence[int], known: Mapping[int, Tensor]) -> None:
        self.program, self._known = program, known
        self.programs = program.cut(ends)

    def scaled(self, factors: Mapping[int, Tensor]) -> Pieces:
        """The same pieces with what some slots hold multiplied by constants, for all who read them."""
        found = copy(self)
        found.__dict__.pop("at_cuts", None)
        found.programs = [
            piece.scaled({slot: factor for slot, factor in factors.items() if slot in piece.makers})
            for piece in self.programs
        ]
        return found

    def values(self, n: int, slots: Collection[int]) -> dict[int, Tensor]:
        """What some slots hold at X: slots that piece n makes or reads."""
        piece = self.programs[n]
        given = {slot: self.at_cuts[slot] for slot in piece.inputs}
        made = [slot for slot in slots if slot in piece.makers]
        found = piece.part(piece.inputs, made).observe(list(given.values()), made) if made else {}
        # A state that nothing after it depends on was dropped with its steps.
        return {slot: found[slot] if slot in found else self.at_cuts[slot] for slot in slots}

    @cached_property
    def at_cuts(self) -> Mapping[int, Tensor]:
        """Values at X of what pieces read of earlier ones and of the end; unknown ones by one run from the start."""
        found = dict(self._known)
        missing = {slot for piece in self.programs for slot in piece.inputs}.union(self.program.outputs) - found.keys()
        for piece in self.programs if missing else ():
            here = missing.intersection(piece.outputs)
            if here:
                found |= piece.observe([found[slot] for slot in piece.inputs], here)
        return found

    def pull(
        self, n: int, waiting: Cotangents, slots: Collection[int] = (), *, stop: Collection[int] = ()
    ) -> tuple[Cotangents, Cotangents]:
        """Pull cotangents back through one piece.

        Args:
            n: Which piece.
            waiting: Cotangents of slots of this piece and of earlier ones.
            slots: Where in this piece they are asked for.
            stop: Slots through which nothing goes further back.

        Returns:
            The cotangents that were asked for; what waits at earlier pieces then.
        """
        piece = self.programs[n]
        here = {slot: u for slot, u in waiting.items() if slot in piece.makers}
        waiting = {slot: u for slot, u in waiting.items() if slot not in here}
        if not here:
            return piece.cotangents({}, slots), waiting
        found = piece.cotangents(here, {*slots, *piece.inputs}, stop=stop)
        for slot in piece.inputs:
            waiting[slot] = waiting[slot] + found[slot] if slot in waiting else found[slot]
        return {slot: found[slot] for slot in slots}, waiting
