"""Tensors that know their slot: the rules go with them wherever the model's code passes them."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from typing_extensions import TypeIs

from tensorlens.errors import NotLinearError, words
from tensorlens.program.steps import Slot, Spec
from tensorlens.recording.conventions import Role
from tensorlens.trees import tensors_in

if TYPE_CHECKING:
    from tensorlens.recording.tape import Tape


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


# Writes, made functional ----------------------------------------------------------------------------------------------
#
# A write gives memory a new slot, and every tensor in that memory reads it again. A tensor's slot is valid for one
# version of its memory. A write to a whole tensor replaces the slot of its memory; a write through a view is a scatter
# into it. Other views notice by their version when they are next read, and ordinary tensors in the same memory become
# live with their next kernel. Constants in the same memory are copied first.

SHAPES = words("squeeze unsqueeze t transpose swapaxes swapdims")
"""In-place functions that change the axes of a tensor and write nothing."""


UNCOUNTED = -1
"""Stands in for a version."""


class Geometry(NamedTuple):
    """How a tensor lies in its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Cell(NamedTuple):
    """The content of a memory that was written to: a slot, and the layout of that slot's tensor."""

    slot: int
    geometry: Geometry
    memory: StorageWeakRef


class Writes:
    """The memories that live values were written to, and the constants in each memory.

    Args:
        of: The tape.
    """

    def __init__(self, of: Tape) -> None:
        self._tape: Tape = weakref.proxy(of)  # no cycle: tensors are freed as soon as nothing uses them
        self.cells: dict[int, Cell] = {}
        self._constants_at: dict[int, list[int]] = {}
        self._n_known = 0
        """How many constants are in that table so far: most passes write nothing and never need it."""
        self.borrowed: list[Tensor] = []
        """Tensors of the model's or the user's own that were made live in place."""

    def before_write(self, target: Tensor) -> None:
        """Copy the constants that share memory with `target`, which is about to be written to."""
        tape = self._tape
        for n in range(self._n_known, len(tape.constants)):
            constant = tape.constants[n]
            if constant is not None and (address := address_of(constant)):
                self._constants_at.setdefault(address, []).append(n)
        self._n_known = len(tape.constants)
        for n in self._constants_at.pop(address_of(target), ()):
            constant = tape.constants[n]
            if constant is not None and not isinstance(constant, torch.nn.Parameter):
                tape.own_constant(n)

    def write(self, target: Tensor, new: Any) -> Tensor:
        """`target.copy_(new)`."""
        tape = self._tape
        refuse_coarse(tape, target, new)
        if not isinstance(new, Tensor):
            new = raw(torch.full_like, target, new)
        if new.dtype != target.dtype or new.device != target.device:
            new = new.to(dtype=target.dtype, device=target.device)
        if tuple(new.shape) != tuple(target.shape):
            new = new.expand(target.shape)
        self.before_write(target)
        address, geometry = address_of(target), geometry_of(target)
        is_whole = _covers(target, geometry)
        if not is_whole and _overlaps(geometry):
            raise tape.refusal("a write into a view in which several numbers share memory")
        content = None if is_whole else self._content(target)
        slot = Slot(tape.slot_of(new)) if is_live(new) else tape.emit("constant", spec_of(new), raw(Tensor.clone, new))
        raw(Tensor.copy_, target, new)
        if content is None:
            self._set(address, slot.index, geometry, target)
        else:  # the whole memory (n,), with the new numbers scattered to the view's places
            n = _length(target)
            whole = spec_of(target)._replace(shape=(n,))
            flat = tape.emit("as_strided_scatter", whole, content, slot, *geometry)
            self._set(address, flat.index, Geometry((n,), (1,), 0), target)
        made = self._made_live(target, slot.index, role_of(new))
        made.seen = self.cells[address].slot
        return made

    def out(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """`f(…, out=y)` as `y.copy_(f(…))`."""
        target = kwargs["out"]
        rest = {key: value for key, value in kwargs.items() if key != "out"}
        if not isinstance(target, Tensor):
            raise NotLinearError(
                f"`{name}` writes into several tensors by `out=`, which no rule can follow. Take the "
                "function's results instead."
            )
        result = function(*args, **rest)
        if tuple(target.shape) != tuple(result.shape):
            if target.numel():
                raise self._tape.refusal(f"{name} with `out=` of another shape")
            raw(Tensor.resize_, target, result.shape)
        return self.write(target, result)

    def flat(self, x: Live) -> Slot:
        """The slot of the whole memory behind x, flat and in the order of storage."""
        slot = self._tape.slot_of(x)
        cell = self._cell(x)
        return self._flat(Cell(slot, geometry_of(x), None) if cell is None else cell, x)  # type: ignore[arg-type]

    def refresh(self, x: Live) -> None:
        """Update the slot of a live tensor whose memory was written to."""
        tape, cell, geometry = self._tape, self._cell(x), geometry_of(x)
        if cell is None:
            raise NotLinearError(
                f"A live tensor in `{tape.module or 'the model'}` was overwritten by an operation that no rule saw. "
                "Write that step out of place, in plain torch functions."
            )
        if cell.geometry == geometry:
            x.slot = cell.slot
        else:
            x.slot = tape.emit("as_strided", spec_of(x), self._flat(cell, x), *geometry).index
        x.stamp, x.seen = version_of(x), cell.slot

    def is_behind(self, x: Live) -> bool:
        """Whether memory was written to since a live tensor was read; for inference mode, which counts no versions."""
        cell = self._cell(x) if self.cells else None
        return cell is not None and cell.slot != x.seen

    def revive(self, *values: Any) -> None:
        """Make ordinary tensors live if live values were written into their memory."""
        for x in tensors_in(values):
            if type(x) is Tensor and self._cell(x) is not None:
                self._made_live(x, -1, None).stamp = -2  # no version is -2: the next read finds its slot

    def forget(self) -> None:
        """Turn tensors back into ordinary ones: the model's own, and tensors of the pass that other code has kept.

        Nothing of the recording may stay on them: a copy of a weak reference to memory would free that memory twice.
        """
        for x in (*self.borrowed, *(ref() for ref in self._tape.alive)):
            if x is not None:
                _plain_again(x)
        self.borrowed.clear()
        self._tape.alive.clear()
        self.cells.clear()

    def borrow(self, x: Tensor, slot: int) -> Live:
        """Make a tensor of the model's or the user's own live, in place, until the recording is over."""
        self.borrowed.append(x)
        return self._tape.live(x, slot)

    def _made_live(self, target: Tensor, slot: int, role: Any) -> Live:
        if type(target) is not Live:
            self.borrowed.append(target)
        base = raw(getattr, target, "_base")
        if base is not None and type(base) is Tensor:
            self.borrowed.append(base)
            self._tape.live(base, -1).stamp = -2
        if type(target) not in FOLLOWED and type(target) is not Tensor:
            raise NotLinearError(
                f"Live values are written into a {type(target).__name__} in `{self._tape.module or 'the model'}`, "
                "which no rule can follow. Write them into an ordinary tensor."
            )
        return self._tape.live(_plain_again(target), slot, role)

    def _cell(self, x: Tensor) -> Cell | None:
        cell = self.cells.get(address_of(x))
        if cell is not None and cell.memory.expired():
            del self.cells[address_of(x)]
            return None
        return cell

    def _set(self, address: int, slot: int, geometry: Geometry, target: Tensor) -> None:
        self.cells[address] = Cell(slot, geometry, StorageWeakRef(raw(Tensor.untyped_storage, target)))

    def _content(self, target: Tensor) -> Any:
        """The content of the whole memory behind a view, flat: a slot, or a constant."""
        tape, cell = self._tape, self._cell(target)
        if cell is not None:
            return self._flat(cell, target)
        base = raw(getattr, target, "_base")
        base = self._owner(target) if base is None else base
        if is_live(base):
            return self._flat(Cell(tape.slot_of(base), geometry_of(base), None), target)  # type: ignore[arg-type]
        if is_live(target):
            return None  # from now on the memory around a live view without a base cannot be read
        return raw(lambda: base.as_strided((_length(base),), (1,), 0).clone())

    def _owner(self, target: Tensor) -> Tensor:
        """The live tensor behind a view made in inference mode, which has no base; else the tensor itself."""
        if version_of(target) != UNCOUNTED:
            return target
        address, alive = address_of(target), (ref() for ref in self._tape.alive)
        found = (x for x in alive if x is not None and is_live(x) and address_of(x) == address)
        return next((x for x in found if _covers(x, geometry_of(x))), target)

    def _flat(self, cell: Cell, x: Tensor) -> Slot:
        """The slot of a memory, flat and in the order of storage."""
        tape, shape, n, slot = self._tape, cell.geometry.shape, _length(x), Slot(cell.slot)
        order = _order(cell.geometry)
        if order is None or cell.geometry.offset or math.prod(shape) != n:
            raise tape.refusal("a write into a part of memory that no tensor shows whole")
        spec = spec_of(x)
        # First the slot's axes from slowest to fastest in memory, then all of them as one, (n,).
        if order != list(range(len(shape))):
            turned = tuple([shape[axis] for axis in order])
            slot = tape.emit("permute", spec._replace(shape=turned), slot, tuple(order))
        return slot if len(shape) == 1 else tape.emit("reshape", spec._replace(shape=(n,)), slot, (n,))


def in_place(run: Any, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`x.f_(y)` as `x.copy_(f(x, y))`."""
    base = name[:-1]
    if base in SHAPES and is_live(args[0]):
        return _reshaped(run, function, base, args, kwargs)
    if isinstance(function, torch._ops.OpOverload):
        functional = getattr(torch.ops.aten, function.overloadpacket.__name__[:-1])
    else:
        functional = next(getattr(place, base) for place in (Tensor, torch, F) if hasattr(place, base))
    target = args[0]
    before = target if is_live(target) else raw(Tensor.clone, target)
    new = functional(before, *args[1:], **kwargs)
    return run.writes.write(target, new)


def _reshaped(run: Any, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`x.unsqueeze_(0)`: the tensor gets different axes; its memory stays as it is, but its version increases."""
    x, before = args[0], version_of(args[0])
    new = getattr(torch, name)(*args, **kwargs)
    x.slot, x.spec = new.slot, new.spec
    alike = [y for ref in run.alive if is_live(y := ref()) and y.stamp == before and address_of(y) == address_of(x)]
    raw(function, *args, **kwargs)
    for y in alike:
        y.stamp = version_of(y)
    return x


def _plain_again(x: Tensor) -> Tensor:
    """An ordinary tensor without attributes of the recording.

    A copy of the user's would copy it too, and two copies of a weak reference to one storage free it twice.
    """
    if type(x) in FOLLOWED:
        for name in ("slot", "spec", "role", "of", "stamp", "seen", "behind"):
            vars(x).pop(name, None)
        x.__class__ = Tensor  # type: ignore[assignment]
    return x


def version_of(x: Tensor) -> int:
    """How often its memory was written to; `UNCOUNTED` for tensors made in inference mode, which have no count."""
    try:
        with quiet():
            return x._version
    except RuntimeError:
        return UNCOUNTED


def refuse_coarse(tape: Tape, target: Tensor, new: Any) -> None:
    """Refuse live values that are written into whole numbers, which would round them."""
    kind = target.dtype
    if is_live(new) and not (kind.is_floating_point or kind.is_complex) or kind.itemsize == 1 and is_live(new):
        raise NotLinearError(
            f"Live values are written into a tensor of {kind} in `{tape.module or 'the model'}`, which rounds them "
            "unseen. Expected a tensor of floating-point numbers."
        )


def address_of(tensor: Tensor) -> int:
    """The address of a tensor's whole memory; 0 for a tensor without memory of its own."""
    try:
        with quiet():
            return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors and wrappers
        return 0


def geometry_of(x: Tensor) -> Geometry:
    """How a tensor lies in its memory."""
    with quiet():
        return Geometry(tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))


def _length(x: Tensor) -> int:
    """How many numbers of its type the memory of a tensor holds."""
    with quiet():
        return x.untyped_storage().nbytes() // x.dtype.itemsize


def _covers(x: Tensor, geometry: Geometry) -> bool:
    """Whether a tensor is all of its memory, without gaps: its slot then is the memory's."""
    is_all = geometry.offset == 0 and math.prod(geometry.shape) == _length(x)
    return is_all and _order(geometry) is not None


def _overlaps(geometry: Geometry) -> bool:
    """Whether numbers of a tensor may lie in the same place."""
    extent = 1  # how many places the faster axes span: the next axis has to step over all of them
    for stride, n in sorted(zip(geometry.strides, geometry.shape, strict=True)):
        if n > 1 and stride < extent:
            return True
        extent += stride * (n - 1)
    return False


def _order(geometry: Geometry) -> list[int] | None:
    """Axes from the slowest to the fastest, of a tensor that lies in memory without gaps; None for any other."""
    shape, strides = geometry.shape, geometry.strides
    order, expected = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis)), 1
    for axis in reversed(order):
        if shape[axis] != 1 and strides[axis] != expected:
            return None
        expected *= shape[axis]
    return order
