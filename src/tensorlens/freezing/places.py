"""Where in a model something happens, as values: a place in the chain of blocks, and the site of a held factor."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Inside block `block`, or after it and before the next one; before the first block, `block` is -1."""

    block: int = -1
    inside: bool = False

    def __str__(self) -> str:
        if self.block < 0:
            return "before block 0"
        return f"block {self.block}" if self.inside else f"after block {self.block}"


class Site(NamedTuple):
    """Where a factor was held: the place in the chain of blocks, the module, the operation, and its occurrence there.

    Keyed this way, and not by a running number, a stray operation cannot shift every factor after it,
    and a block whose weights are shared (ALBERT) has factors of its own at each call.
    """

    place: Place
    module: str
    operation: str
    occurrence: int

    def __str__(self) -> str:
        return f"`{self.operation}` #{self.occurrence} in `{self.module or 'the model'}` ({self.place})"


class Span(NamedTuple):
    """From the state entering block `start` to the state entering block `stop`; `stop` = number of blocks is $X^N$."""

    start: int
    stop: int
