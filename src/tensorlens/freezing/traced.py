"""A tensor that knows whether it still depends on the operator's input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tensorlens.errors import NotLinearError
from tensorlens.freezing.conventions import Rules


@runtime_checkable
class Interpreter(Protocol):
    """What gives torch functions their meaning in this thread: the running pass, as the rules see it."""

    rules: Rules
    recording: bool
    grad: bool

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `function`, one of whose arguments is traced, by the rules."""

    def keep_factor(self, operation: str, compute: Callable[[], Any]) -> Any:
        """A factor held fixed: computed and kept while recording, looked up while replaying."""
        ...

    def protect_factors(self, target: Tensor) -> None:
        """Before a write: a factor that was kept of `target` is in its memory, and gets its own."""

    def refusal(self, operation: str) -> str:
        """Why `operation` cannot be made linear, where, and what to do."""
        ...

    def count_left(self, value: Tensor) -> tuple[int, int]:
        """How many single values have left the memory of `value` for Python, with this one, and how many there are."""
        ...

    def note_rule(self, rule: str) -> None:
        """Note that `rule` was applied in the current module."""

    def mix_heads(self, mixed: Tensor) -> Tensor:
        """Mask excluded heads of what attention has mixed, (batch, head, token, channel)."""
        ...

    def watch_product(self, convention: str, result: Tensor) -> None:
        """Told of a product of two live tensors whose roles are a convention and not a consequence."""


FACTORS = frozenset(["gate", "factor", "statistic", "scale", "step"])
"""Roles of what multiplies other live tensors and is held, or not, as the rules say."""

_threads = threading.local()
_running: dict[int, Any] = {}
"""Interpreters whose pass is under way, in any thread, by identity."""


def active() -> Any:
    """The interpreter of this thread, or None."""
    return getattr(_threads, "interpreter", None)


def set_active(interpreter: Interpreter | None) -> None:
    """Put `interpreter` in charge of this thread."""
    _threads.interpreter = interpreter
    if interpreter is not None:
        _running[id(interpreter)] = interpreter


def finish(interpreter: Interpreter) -> None:
    """The pass of `interpreter` is over: what is left of its tensors is ordinary data."""
    _running.pop(id(interpreter), None)


class Traced(Tensor):
    """A tensor computed from the operator's input.

    `live`: it depends on the input, linearly. Otherwise it was computed from the input and then held fixed.
    `role`: where it comes from, as far as a rule needs to know: ``"activated"`` (out of an activation),
    ``"attention"`` (out of a softmax), ``"gate"`` (straight out of a sigmoid), ``"factor"`` (made of activations with
    φ(0) ≠ 0 alone: what gates in a product), ``"statistic"`` (of a norm), ``"size"`` (|x|),
    ``"scale"`` (made of sizes, or a denominator: what others are divided by and multiplied with), ``"step"`` (a sign),
    ``"coarse"`` (cast to whole numbers), ``"entry"`` (stands for the operator's input wherever the model's code still
    has it) or ``"embedding"`` (watched, to learn whether it is used more than once).
    `generation`: how many blocks had been left when it was made; an older one that is read later went past a block.
    `owner`: identity of the interpreter it belongs to.
    `fine`: of a ``"coarse"`` one, which holds what was cast to whole numbers, the live tensor of the same values.

    Being a subclass, it takes its rules along wherever the model's code carries it: no mode and no flag on
    the parameters is needed, other threads see nothing, and `torch.no_grad` inside a model loses nothing.
    """

    live: bool
    role: str | None
    generation: float
    owner: int
    fine: Traced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        interpreter = active()
        if interpreter is None:
            _refuse_in_other_thread(func, args, kwargs or {})
            return raw(func, *args, **(kwargs or {}))
        return interpreter.call(func, args, kwargs or {})


def _refuse_in_other_thread(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A live tensor of a pass that is under way in another thread: what is made of it here would be lost."""
    for tensor in traced_in(args, kwargs):
        run = _running.get(tensor.owner)
        if run is not None and tensor.live:
            name = getattr(function, "__name__", str(function))
            run.refused = NotLinearError(
                f"`{name}` was called on a live tensor in another thread than the one that runs the model, where no "
                "rule can hold its factors. Run the branches of the model one after the other."
            )
            raise run.refused


def raw(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `function` with no rule applied; results are plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def mark(tensor: Tensor, *, live: bool, role: str | None = None) -> Traced:
    """Make a fresh tensor traced, in place: an alias would add a node to the graph for each operation."""
    tensor.__class__ = Traced
    tensor.live = live  # type: ignore[attr-defined]
    tensor.role = role  # type: ignore[attr-defined]
    interpreter = active()
    tensor.generation = getattr(interpreter, "generation", 0)  # type: ignore[attr-defined]
    tensor.owner = id(interpreter)  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def unmark(tensor: Tensor) -> None:
    """Make a traced tensor an ordinary one again, in place."""
    if isinstance(tensor, Traced):
        del tensor.live, tensor.role, tensor.generation, tensor.owner
        tensor.__class__ = Tensor  # type: ignore[assignment]


def plain(tensor: Tensor) -> Tensor:
    """The same values as an ordinary tensor, still connected to the graph."""
    return raw(Tensor.as_subclass, tensor, Tensor) if isinstance(tensor, Traced) else tensor


def type_of(tensor: Tensor) -> torch.dtype:
    """The type of a tensor's numbers, without the way through the rules."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.dtype


def address_of(tensor: Tensor) -> int:
    """Where the memory of a tensor begins, whatever part of it the tensor is; 0 for what has none of its own."""
    if raw(getattr, tensor, "layout") is not torch.strided:
        return 0
    return raw(Tensor.untyped_storage, tensor).data_ptr()


def constant(tensor: Tensor) -> Tensor:
    """The values alone."""
    return raw(Tensor.detach, tensor)


def is_live(value: Any) -> bool:
    """Whether `value` is a tensor that depends on the operator's input."""
    return isinstance(value, Traced) and value.live


def is_factor(run: Interpreter, value: Any) -> bool:
    """Whether a live tensor is what multiplies others: a gate, a router's weight, a statistic, live attention."""
    return is_live(value) and (value.role in FACTORS or value.role == "attention" and run.rules.attention != "hold")


def traced_in(*values: Any) -> list[Traced]:
    """All traced tensors in nested tuples, lists and dictionaries."""
    found: list[Traced] = []
    _gather(values, found)
    return found


_SIMPLE = frozenset([int, float, bool, str, slice, type(None), type(...), torch.dtype, Tensor, nn.Parameter])
"""Types of most arguments that hold no traced tensor: one look instead of three."""


def _gather(values: Iterable[Any], found: list[Traced]) -> None:
    # A list that is filled, and no generators one inside the other: this runs for every function of a pass.
    for value in values:
        if type(value) in _SIMPLE:
            continue
        if isinstance(value, Traced):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _gather(value, found)
        elif isinstance(value, dict):
            _gather(value.values(), found)
