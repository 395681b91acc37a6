"""Tensors that know their slot: the rules go with them wherever the model's code passes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from tensorlens.errors import NotLinearError
from tensorlens.program.nodes import Spec
from tensorlens.recording.roles import Role


class _Thread(threading.local):
    """The state of one thread."""

    tape: Any = None


now = _Thread()
"""`now.tape` is the recording of this thread, or None."""


quiet = torch._C.DisableTorchFunctionSubclass
"""The context in which torch functions are not seen."""
no_kernels = torch._C._DisableTorchDispatch
"""The context in which kernels are not seen."""


def raw(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function without rules: live tensors count as their values, and results are ordinary tensors."""
    with quiet(), no_kernels():
        return function(*args, **kwargs)


def spec_of(value: Tensor) -> Spec:
    """Shape, type and device of a tensor."""
    return Spec(value.shape, value.dtype, value.device)


class Followed(Tensor):
    """A tensor of a recording: the rules go with it wherever the model's code passes it.

    `role`: what it came from, as far as a product needs to know.
    `of`: the tape it belongs to.

    Being a subclass, it works under any mode of the model's own, and other threads do not notice it. Sizes and types
    are read all the time, so they are answered without running a rule.
    """

    role: Role | None = None
    of: Any
    __torch_function__: Any
    """`tape.by_rule` itself, not a method that calls it: this runs for every function of a pass."""

    def __deepcopy__(self, memo: Any) -> Tensor:
        """The same numbers in new memory, live on the same tape: a copied tape would not belong to the recording."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotLinearError(
            "The model passes a live tensor to `pickle`, `torch.save`, `copy.copy` or another process, where no rule "
            "can follow it. Let the model compute in its own process, with torch functions."
        )

    def as_subclass(self, cls: Any) -> Any:
        """Return itself if asked for an ordinary tensor; torch would return an alias that no rule sees."""
        if cls is not Tensor:
            raise NotLinearError(
                f"The model turns a live tensor into a `{cls.__name__}`, which would hide it from the rules. Let the "
                "model compute with ordinary tensors."
            )
        return self


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, answered without the rules."""

    def answer(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with quiet():
            return function(x, *args, **kwargs)

    return answer


for _name in ("shape", "dtype", "device", "ndim", "is_nested"):
    setattr(Followed, _name, property(_quietly(getattr(Tensor, _name).__get__)))
for _name in ("dim", "size"):
    setattr(Followed, _name, _quietly(getattr(Tensor, _name)))


class Live(Followed):
    """A tensor that depends on the program's input.

    `slot`: its place on the tape.
    `spec`: its shape, type and device, which are read all the time.
    `stamp`: the version of its memory for which the slot is right; a write through another view moves it on.
    `seen`: the slot of its memory when it was last read, for tensors of which torch counts no versions.
    """

    slot: int
    spec: Spec
    stamp: int
    seen: int | None = None


for _name in Spec._fields:
    setattr(Live, _name, property(attrgetter(f"spec.{_name}")))


class WithRole(Followed):
    """A held tensor that carries a role: attention, a gate, a decision."""


class Whole(WithRole):
    """Integers that live numbers were cast to; `behind` holds the live numbers, truncated, if they are known."""

    behind: Live | None = None


FOLLOWED = frozenset([Live, WithRole, Whole])


def elsewhere(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function outside of a recording; refuse a live tensor, which another thread is recording."""
    for tensor in found_in(args, kwargs):
        if type(tensor) is Live and tensor.of.is_running:
            name = getattr(function, "__name__", str(function))
            tensor.of.refused = NotLinearError(
                f"`{name}` was called on a live tensor in another thread than the one that runs the model, where no "
                "rule sees it. Run the branches of the model one after the other."
            )
            raise tensor.of.refused
    return raw(function, *args, **kwargs)


def is_live(value: Any) -> TypeIs[Live]:
    """Whether a value is a tensor that depends on the program's input."""
    return type(value) is Live


def role_of(value: Any) -> Role | None:
    """The origin of a tensor."""
    return value.role if type(value) in FOLLOWED else None


def value_of(value: Any) -> Any:
    """The numbers alone: an ordinary tensor in the same memory."""
    if type(value) is Tensor and not value.requires_grad or not isinstance(value, Tensor):
        return value
    with quiet(), no_kernels():
        return Tensor.detach(value)


PLAIN = frozenset([int, float, bool, str, slice, type(None), type(...), torch.dtype, torch.device, complex])
"""Types of arguments that are not tensors."""
SIMPLE = PLAIN | {Tensor, nn.Parameter}
"""Types of most arguments without a live tensor: one check instead of three."""


def found_in(*values: Any) -> list[Followed]:
    """All live tensors, and held ones with a role, in nested tuples, lists and dictionaries."""
    found: list[Followed] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[Followed]) -> None:
    # A list that is filled, not nested generators: this runs for every kernel of a pass.
    for value in values:
        kind = type(value)
        if kind in SIMPLE:
            continue
        if kind in FOLLOWED:
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
