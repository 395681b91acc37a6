"""`Pieces`: a program cut where states enter blocks, each piece run and pulled on its own.

What a piece holds at X comes from running it alone, from the values of what it reads; cotangents go from the last piece
to the first, and wait at whatever slot of an earlier piece they belong to. So a question about every block needs the
memory of one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

    def values(self, n: int, slots: Collection[int]) -> dict[int, Tensor]:
        """What some slots hold at X: slots that piece n makes or reads."""
        piece = self.programs[n]
        given = {slot: self._at_cuts[slot] for slot in piece.inputs}
        made = [slot for slot in slots if slot not in given]
        found = piece.part(piece.inputs, made).observe(list(given.values()), made) if made else {}
        return {slot: given[slot] if slot in given else found[slot] for slot in slots}

    @cached_property
    def _at_cuts(self) -> Mapping[int, Tensor]:
        """Values of what pieces read of earlier ones: of what is not known, by one run from the beginning."""
        found = dict(self._known)
        missing = {slot for piece in self.programs for slot in piece.inputs} - found.keys()
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
