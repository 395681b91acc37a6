"""The parts of a program: live values, held values, and the steps between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tensorlens.errors import InputError


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A live value: an input of the program, or the result of a step."""

    index: int


class Held(msgspec.Struct, frozen=True, gc=False):
    """A constant, by its place in `Program.constants`."""

    index: int


NOT_PLAIN = frozenset([Slot, Held, tuple, list])
"""Types that make a nested argument more than plain values."""

Axes: TypeAlias = tuple[int, ...]
"""Numbers of axes, or sizes along them."""


class Spec(NamedTuple):
    """Shape, type and device of the tensor in a slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False, slots=True)
class Step:
    """One operation: `out = operation(*args, **options)`.

    Attributes:
        out: The slot it fills.
        operation: A name in `OPERATIONS`.
        args: `Slot`s, `Held` constants and plain values, nested in tuples and lists; in a program that was rewritten
            also tensors.
        options: Plain values by name.
        module: Path of the module that ran.
        block: The block it belongs to, or None outside of blocks.
        note: The convention that decided which factor of a product is held, if the calculus leaves it open.
        slots: The live values it takes, in order; a value that it takes twice is listed twice.
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


# Constants ------------------------------------------------------------------------------------------------------------

_fused_steps: Counter[int] = Counter()
"""Steps of fused optimisers by the storage they wrote to: torch does not count these writes."""


def _note_fused(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"] if group.get("fused") else ():
            if type(weight) is nn.Parameter:
                _fused_steps[weight.untyped_storage()._cdata] += 1


register_optimizer_step_post_hook(_note_fused)


def versions_of(values: Iterable[Tensor | None]) -> list[int | None]:
    """How often the memory of each tensor was written to, as far as this is counted; -1 if the memory was freed.

    None for a missing tensor, and for one made in inference mode, whose writes are not counted.
    """
    found = list[int | None]()
    for value in values:
        if value is None or value.is_inference():
            found.append(None)
        elif type(value) not in (Tensor, nn.Parameter):
            found.append(value._version)
        elif value.numel() and value.layout is torch.strided and not value.untyped_storage().nbytes():
            found.append(-1)
        else:
            found.append(value._version + (_fused_steps[value.untyped_storage()._cdata] if _fused_steps else 0))
    return found


Remake = Callable[[int], Mapping[int, Tensor]]
"""Recomputes the constants of a block, by their places."""


class Constants(Sequence[Tensor]):
    """Held tensors by their places.

    Weights are there by reference. The other constants of a block may not fit in the memory of a device. They are then
    dropped, and `remake` recomputes them whenever a step of that block reads one. One such block is kept at a time.

    Args:
        values: The tensors.
        names: The names of those that are weights of the model.
    """

    def __init__(self, values: Iterable[Tensor | None], names: Mapping[int, str] | None = None) -> None:
        self.values = list(values)
        self.names = dict(names or {})
        self._versions = versions_of([value if type(value) is Tensor else None for value in self.values])
        self._block_of: dict[int, int] = {}
        self._remake: Remake | None = None
        self._fetched: int | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, n: Any) -> Any:
        value = self.values[n]
        if value is None:
            self._fetch(self._block_of[n])
            value = self.values[n]
        return value

    @property
    def is_complete(self) -> bool:
        """Whether no constants were dropped."""
        return not self._block_of

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The values for callers that read many: as a list, if no constants were dropped."""
        return self.values if self.is_complete else self  # type: ignore[return-value]

    def let_go(self, places: Mapping[int, Iterable[int]], remake: Remake) -> None:
        """Drop the constants of some blocks, given by block."""
        self._remake = remake
        for block, some in places.items():
            for n in some:
                self._block_of[n] = block
                self.values[n] = None

    def _fetch(self, block: int) -> None:
        assert self._remake is not None, "only what can be made again is let go"
        for n, of in self._block_of.items():
            if of == self._fetched:
                self.values[n] = None
        self._fetched = block
        for n, value in self._remake(block).items():
            self.values[n] = value
            (self._versions[n],) = versions_of([value])

    def check(self, places: Iterable[int] | None = None) -> None:
        """Raise if a weight was written to since it was bound: T describes the model as it was.

        Args:
            places: The weights to check; all if None.
        """
        asked = range(len(self.values)) if places is None else list(places)
        for n, now in zip(asked, versions_of([self.values[n] for n in asked]), strict=True):
            if now is not None and self._versions[n] not in (None, now):
                name = self.names.get(n)
                raise InputError(
                    f"{f'`{name}`' if name else 'A tensor of the model'} was modified after this input was "
                    f"recorded, and this tensor describes the model as it was. Call the lens on the input again."
                )

    def check_storable(self) -> None:
        """Raise if some constants were dropped: recomputing them needs the model."""
        if not self.is_complete:
            raise InputError(
                "This input is too long for its operator to be stored: the values in its blocks are recorded again "
                "when they are needed. Save its maps instead, or use a shorter input."
            )

    def __getstate__(self) -> dict[str, Any]:
        """The tensors and names, for `pickle`."""
        self.check_storable()
        return {"values": [None if v is None else v.detach() for v in self.values], "names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["values"], state["names"])


# Nested arguments -----------------------------------------------------------------------------------------------------


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
