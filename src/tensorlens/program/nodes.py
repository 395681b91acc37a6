"""What a program is made of: live values, held values, and the steps between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A live value: an input of the program, or what a step made."""

    index: int


class Held(msgspec.Struct, frozen=True, gc=False):
    """A constant, by its place in `Program.constants`."""

    index: int


NOT_PLAIN = frozenset([Slot, Held, tuple, list])
"""Types that make a nested argument more than plain values."""

Axes: TypeAlias = tuple[int, ...]
"""Numbers of axes, or sizes along them."""


class Spec(NamedTuple):
    """What kind of tensor a slot holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False, slots=True)
class Step:
    """One operation: `out = operation(*args, **options)`.

    Attributes:
        out: The slot it fills.
        operation: A name in `OPERATIONS`.
        args: `Slot`s, `Held` constants and plain values, nested in tuples and lists.
        options: Plain values by name.
        module: Path of the module that ran.
        block: The block it belongs to, or None outside of blocks.
        note: A convention that decided which factor of a product is held, where the calculus leaves it open.
        slots: The live values it takes, in order; one that it takes twice comes twice.
        held: The constants it takes, in order.
    """

    out: int
    operation: str
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    block: int | None = None
    note: str | None = None
    slots: list[int] = field(init=False, repr=False)
    held: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = leaves(self.args)
        self.slots = [leaf.index for leaf in found if type(leaf) is Slot]
        self.held = [leaf.index for leaf in found if type(leaf) is Held]


def leaves(value: Any) -> list[Any]:
    """The leaves of nested tuples and lists, in order."""
    found: list[Any] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[Any]) -> None:
    if type(value) is tuple or type(value) is list:
        for part in value:
            _gather(part, found)
    else:
        found.append(value)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested tuples and lists with every leaf changed."""
    if type(value) is tuple:
        return tuple([mapped(part, change) for part in value])
    if type(value) is list:
        return [mapped(part, change) for part in value]
    return change(value)


def words(text: str) -> frozenset[str]:
    """Names, from a text with spaces between them."""
    return frozenset(text.split())


def at_least_float32(x: Tensor) -> Tensor:
    """Statistics, held factors and folded weights are computed in float32 or better, whatever the storage."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
