"""`Tape`: the recording in progress. Rules append affine steps to it, and live tensors know their place on it.

Two levels share one table of rules. The tensor subclass sees torch functions; whatever these do not explain (a
scripted function, the casts of autocast, a foreign kernel) is seen beneath, at torch's dispatcher, and goes through the
same table. Held tensors are ordinary tensors: nothing watches them, and a step that reads one binds it as a constant.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tensorlens.errors import InputError, NotLinearError, words
from tensorlens.program.marks import Meeting, Mixture
from tensorlens.program.steps import Held, Slot, Spec, Step, leaves, mapped
from tensorlens.recording.conventions import KEEPS_ROLE, Role, Rules
from tensorlens.recording.live import (
    PLAIN,
    SIMPLE,
    UNCOUNTED,
    Followed,
    Live,
    Whole,
    WithRole,
    Writes,
    elsewhere,
    found_in,
    in_place,
    is_live,
    no_kernels,
    now,
    quiet,
    raw,
    spec_of,
    value_of,
    version_of,
)

OVER_ALL = words("any all unique bincount histc norm dist det equal allclose count_nonzero nonzero var std")
"""Functions that read the whole tensor if no axis is named."""

ORDERS = words("argsort sort nonzero unique where cumsum cumprod cummax cummin topk")
"""Functions whose result depends on the order or number of all elements."""

ACROSS = ORDERS | words(
    "any all sum mean max min amax amin argmax argmin bincount histc count_nonzero median kthvalue quantile"
)
"""Functions of decisions in which one element of the result depends on several decisions."""

KEEPS_ATTENTION = KEEPS_ROLE | words("nan_to_num where tril triu")
"""Functions after which a held attention matrix is still an attention matrix."""

MOVES = words(
    "matmul mm bmm einsum conv1d conv2d convolution roll flip diff unfold scatter_add index_add index_put searchsorted"
)
"""Functions that may bring decisions of one sample to another where samples and tokens share an axis."""

LEAVES = words("tolist numpy array dlpack")
PRODUCTS_OF_INTEGERS = words("matmul mm bmm linear _int_mm")
COUNTS = KEEPS_ROLE | PRODUCTS_OF_INTEGERS | words("neg sum mean cat stack int long short char clamp")
"""Functions in which integers represent the live numbers that they were cast from."""

LOOKS_UP = words("getitem index index_select gather take take_along_dim embedding")
"""Functions that take entries of a tensor by index."""

_tuple: Any = tuple.__new__


class Tape:
    """The steps so far, their constants, and the place in the model that the pass has reached.

    Args:
        rules: The user's conventions.
        weights: Tensors of the model by name; they are bound by reference.
        n_samples: How many samples the inputs hold.
        copies: Whether other constants are copied when they are bound, for a model that overwrites them later.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        weights: Mapping[str, Tensor] | None = None,
        n_samples: int = 1,
        copies: bool = False,
    ) -> None:
        self.rules, self.n_samples, self.copies = rules, n_samples, copies
        self.weights = {id(weight): name for name, weight in (weights or {}).items()}
        self.steps: list[Step] = []
        self.constants: list[Tensor | None] = []
        self.specs: dict[int, Spec] = {}
        self.path: list[str] = [""]
        self.block: int | None = None
        self.rules_applied: dict[tuple[str, str], int] = {}
        self.mixes_samples: str | None = None
        self.is_running = False
        self.refused: Exception | None = None
        self.mixtures: list[Mixture] = []
        self.meetings: list[Meeting] = []
        self.writes = Writes(self)
        self._n_slots = 0
        self.alive: list[weakref.ref[Live]] = []
        self._bound: dict[int, tuple[Held, Tensor, int]] = {}
        self._keys: list[int] = []
        self._versions: list[int] = []
        self.names: dict[int, str] = {}
        """The names of constants that are weights of the model, or views of weights."""

    @property
    def module(self) -> str:
        """Path of the module that is running."""
        return self.path[-1]

    # For rules --------------------------------------------------------------------------------------------------------

    def emit(
        self,
        operation: str,
        value: Any,
        /,
        *args: Any,
        role: Role | None = None,
        note: str | None = None,
        **options: Any,
    ) -> Any:
        """Append a step and return its value, live.

        Args:
            operation: A name in `program.OPERATIONS`.
            value: The model's own result; or its `Spec`, for a step of which only the `Slot` is needed.
            *args: Arguments of the operation: live tensors become slots, ordinary ones constants.
            role: Role of the result.
            note: The convention behind the step, if any.
            **options: Options of the operation.
        """
        # `live`, written out: most calls of a pass end here.
        made: Any = None
        spec, stamp = value, 0
        if type(value) is not Spec:
            made = value if type(value) is Tensor else raw(Tensor.detach, value)
            spec = _tuple(Spec, (made.shape, made.dtype, made.device))
            stamp = UNCOUNTED if made.is_inference() else made._version
        coded: list[Any] = [*args]
        slots: list[int] = []
        held: list[int] = []
        with quiet():
            for place, arg in enumerate(args):
                kind = type(arg)
                if kind is Live:
                    index = arg.slot if arg.stamp >= 0 and arg.stamp == arg._version else self.slot_of(arg)
                    slots.append(index)
                    coded[place] = Slot(index)
                elif kind is Tensor or kind is Parameter:
                    coded[place] = constant = self.bind(arg)
                    held.append(constant.index)
                elif kind not in PLAIN and not (kind is tuple and PLAIN.issuperset(map(type, arg))):
                    coded[place] = self._code(arg, slots, held)
        slot = self._n_slots
        self._n_slots = slot + 1
        self.specs[slot] = spec
        step = Step.__new__(Step)  # the arguments are known already, and `Step(…)` would search for them
        step.out, step.operation, step.args, step.options = slot, operation, tuple(coded), options
        step.module, step.block, step.note, step.slots, step.held = self.path[-1], self.block, note, slots, held
        self.steps.append(step)
        if made is None:
            return Slot(slot)
        made.__class__ = Live
        made.slot, made.spec, made.of, made.stamp = slot, spec, self, stamp
        if role is not None:
            made.role = role
        self.alive.append(weakref.ref(made))
        return made

    def new_slot(self, spec: Spec) -> int:
        """A slot that no step has filled yet: an input."""
        slot, self._n_slots = self._n_slots, self._n_slots + 1
        self.specs[slot] = spec
        return slot

    def live(self, value: Tensor, slot: int, role: Role | None = None) -> Live:
        """Make a tensor the live value of a slot, in place; of a parameter or a subclass, an alias."""
        found: Any = value if type(value) is Tensor else raw(Tensor.detach, value)
        spec, stamp = spec_of(found), UNCOUNTED if found.is_inference() else found._version
        found = self._followed(found, Live, role)
        found.slot, found.spec, found.stamp = slot, spec, stamp
        return found

    def _followed(self, value: Tensor, kind: type, role: Role | None) -> Any:
        """Make a tensor one of this recording."""
        found: Any = value if type(value) is Tensor else raw(Tensor.detach, value)
        found.__class__ = kind
        found.of, found.role = self, role
        self.alive.append(weakref.ref(found))
        return found

    def slot_of(self, x: Live) -> int:
        """The slot of a live tensor; a new one if its memory was written to in the meantime."""
        with quiet():
            if x.stamp >= 0 and x.stamp == x._version:
                return x.slot
        if x.stamp != version_of(x) or x.stamp == UNCOUNTED and self.writes.is_behind(x):
            self.writes.refresh(x)
        return x.slot

    def bind(self, value: Tensor) -> Held:
        """Bind a tensor as a constant, away from torch functions: by reference, once per version of its memory."""
        key = id(value)
        try:
            version = value._version
        except RuntimeError:
            version = UNCOUNTED
        known = self._bound.get(key)
        if known is not None and known[2] == version:
            return known[0]
        n = len(self.constants)
        held = Held(n)
        self._bound[key] = held, value, version  # the value stays alive, and with it the identity
        constant = value if type(value) is Tensor and not value.requires_grad else value_of(value)
        if constant.layout is not torch.strided:
            constant = raw(Tensor.to_dense, constant)  # programs have no other layout
        name = self.weights.get(key) or self.weights.get(id(value._base))
        is_fixed = name is not None and (not self.copies or isinstance(value, Parameter))  # buffers may be written over
        if (self.copies or version == UNCOUNTED) and not is_fixed:
            constant = raw(Tensor.clone, constant)
            version = version_of(constant)
        self.constants.append(constant)
        self._keys.append(key)
        self._versions.append(version)
        if name is not None:
            self.names[n] = name
        return held

    def forget_constant(self, n: int) -> None:
        """Drop a constant; if the tensor is bound again, it becomes a new one."""
        self._bound.pop(self._keys[n], None)
        self.constants[n] = None

    def own_constant(self, n: int) -> None:
        """Copy a constant whose memory is about to change; a later binding of the tensor sees the new content."""
        constant = self.constants[n]
        assert constant is not None
        self.constants[n] = raw(Tensor.clone, constant)
        self._versions[n] = version_of(self.constants[n])  # type: ignore[arg-type]
        self._bound.pop(self._keys[n], None)

    def _code(self, value: Any, slots: list[int], held: list[int]) -> Any:
        """An argument as steps store it; the slots and constants in it are added to the lists."""
        kind = type(value)
        if kind is Live:
            slots.append(self.slot_of(value))
            return Slot(slots[-1])
        if kind is tuple or kind is list or kind is torch.Size:
            parts = [part if type(part) in PLAIN else self._code(part, slots, held) for part in value]
            return parts if kind is list else tuple(parts)
        if kind is Slot:
            slots.append(value.index)
        elif kind is Held:
            held.append(value.index)
        elif isinstance(value, Tensor):
            value = self.bind(value)
            held.append(value.index)
        return value

    def note(self, rule: str) -> None:
        """Note that a rule was applied in the current module."""
        key = rule, self.path[-1]
        self.rules_applied[key] = self.rules_applied.get(key, 0) + 1

    def note_cast(self, value: Tensor, source: torch.dtype) -> None:
        """Note where a model leaves the precision of its states."""
        kind = value.dtype
        if kind.is_floating_point and kind.itemsize < source.itemsize:
            self.note(f"cast: {str(kind).removeprefix('torch.')}")

    def note_mixing(self, what: str) -> None:
        """Note that a held value was made from several samples."""
        if self.n_samples > 1 and self.mixes_samples is None:
            self.mixes_samples = f"`{what}` in `{self.module or 'the model'}`"

    def note_part(self, name: str, x: Tensor) -> None:
        """Note that samples were selected or joined: values computed from some may be held for others."""
        if self.n_samples > 1 and x.dim() and x.shape[0] == self.n_samples:
            self.note_mixing(name)

    def check_samples(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a decision or a statistic that is taken over all samples together."""
        if self.n_samples == 1:
            return
        x = args[0]
        dims = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], (int, tuple, list)) else None)
        dims = [dims] if isinstance(dims, int) else dims
        is_over_samples = dims is not None and any(dim % max(1, x.dim()) == 0 for dim in dims)
        if is_over_samples or dims is None and name in OVER_ALL:
            self.note_mixing(name)

    # Where attention is -----------------------------------------------------------------------------------------------

    def note_mixture(self, mixed: Live, weights: Any, values: Any) -> None:
        """Note that attention has multiplied values."""
        if self.block is None:
            return
        # A held argument is the constant that the last step has bound.
        pairs = zip((weights, values), self.steps[-1].args[:2], strict=True)
        weights, values = (Slot(self.slot_of(x)) if is_live(x) else arg for x, arg in pairs)
        self.mixtures.append(Mixture(self.slot_of(mixed), self.block, self.module, values, weights))

    def note_fused(self, mixed: Live, query: Any, key: Any, value: Any) -> None:
        """Note that a fused kernel has mixed values."""
        if self.block is None:
            return
        values = Slot(self.slot_of(value)) if is_live(value) else self.steps[-1].args[4][2]
        self.mixtures.append(Mixture(self.slot_of(mixed), self.block, self.module, values, None))
        if is_live(query) and is_live(key):
            slots = self.slot_of(query), self.slot_of(key)
            self.meetings.append(Meeting(self.slot_of(mixed), self.block, self.module, *slots, True))

    def note_scores(self, scores: Live, query: Live, key: Live) -> None:
        """Note that queries may have multiplied keys: a matrix product of two live tensors."""
        if self.block is None or scores.dim() < 3:
            return
        slots = self.slot_of(query), self.slot_of(key)
        self.meetings.append(Meeting(self.slot_of(scores), self.block, self.module, *slots, False))

    def note_softmax(self, scores: Any) -> None:
        """Note that a softmax is applied, perhaps to the last product of queries and keys."""
        if self.meetings and is_live(scores):
            last = self.meetings[-1]
            if last.block == self.block and last.end is None and not last.is_fused:
                self.meetings[-1] = last._replace(end=self.slot_of(scores))

    def refusal(self, operation: str) -> NotLinearError:
        """Why an operation cannot be made linear, where, and what to do."""
        place = "outside of the blocks" if self.block is None else f"block {self.block}"
        return NotLinearError(
            f"`{operation}` in `{self.module or 'the model'}` ({place}) has no rule that would make it exactly linear. "
            "Expected linear operations, or others with a factor that the rules keep fixed. Register an adapter for "
            "the module's class with `tensorlens.adapter`, or a rule for the function with `tensorlens.rules_for`."
        )

    # Dead code --------------------------------------------------------------------------------------------------------

    def prune(self, since: int, first_constant: int) -> list[int]:
        """Drop the steps since a given one that are no longer needed, with the constants that only they read.

        A slot may still be needed if a live tensor refers to it, if memory that was written to holds it, or if it has a
        mark.

        Args:
            since: The first step that may go.
            first_constant: The first constant that may go.

        Returns:
            Which of these steps are left, counted from the first.
        """
        met = [ref() for ref in self.alive]
        self.alive = [ref for ref, x in zip(self.alive, met, strict=True) if x is not None]
        needed = {x.slot for x in met if type(x) is Live} | {cell.slot for cell in self.writes.cells.values()}
        needed |= {mixture.slot for mixture in self.mixtures}
        needed |= {slot for meeting in self.meetings for slot in (meeting.query, meeting.key, meeting.end)}
        kept, places, held = list[Step](), list[int](), set[int]()
        for place in reversed(range(since, len(self.steps))):  # backwards: a step is needed if a kept one reads it
            step = self.steps[place]
            if step.out in needed:
                needed.update(step.slots)
                kept.append(step)
                places.append(place - since)
                held.update(step.held)
            else:
                del self.specs[step.out]
        self.steps[since:] = reversed(kept)
        for n in range(first_constant, len(self.constants)):
            if n not in held:
                self.forget_constant(n)
        return places[::-1]

    def close(self) -> None:
        """Drop every tensor of the pass except the constants; afterwards none refers to the tape."""
        self.writes.forget()
        self._bound.clear()
        self.alive.clear()

    def changed_constants(self) -> list[int]:
        """Constants that were overwritten with constants after they were bound."""
        pairs = enumerate(zip(self.constants, self._versions, strict=True))
        with quiet():
            return [n for n, (x, then) in pairs if x is not None and then != UNCOUNTED and x._version != then]

    # Functions --------------------------------------------------------------------------------------------------------

    def counted(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a live function, with integers replaced by the live numbers behind them."""
        packed = mapped((args, tuple(kwargs.items())), _number_behind)
        args, kwargs = packed[0], dict(packed[1])
        if any(type(x) is Whole for x in found_in(args, kwargs)):
            raise self.refusal(f"{name} of whole numbers that live values were cast to")
        return args, kwargs

    def by_kernels(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that has no rule of its own: the kernels it calls have theirs."""
        with quiet():
            return function(*args, **kwargs)

    def on_held(
        self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], met: list[Followed]
    ) -> Any:
        """Run a function of held tensors, one of which carries a role, and pass the role on."""
        if name.endswith("_") or name == "setitem":
            self.writes.before_write(args[0])
        result = raw(function, *args, **kwargs)
        if any(type(x) is Whole for x in met):
            return self._of_whole_numbers(name, function, args, kwargs, result)
        if name in KEEPS_ATTENTION and any(x.role is Role.ATTENTION for x in met):
            return self.held(result, Role.ATTENTION)
        self._check_decisions(name.removesuffix("_"), args, kwargs)
        return self.decided(result)

    def decided(self, value: Any) -> Any:
        """A held value that live ones decided. In a batch it is followed: no sample may depend on another."""
        return self.held(value, Role.CHOICE) if self.n_samples > 1 else value

    def _check_decisions(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a function that compares, counts or orders decisions along an axis with several samples in it."""
        x = args[0]
        if self.n_samples == 1:
            return
        if (name == "item" or name in LEAVES) and isinstance(x, Tensor):
            self.note_mixing(name)
        met = [arg for arg in found_in(args) if arg.numel() > 1]
        firsts = {(arg.dim(), arg.shape[0]) for arg in met}  # two differ in `chosen[:, None] == chosen`
        moves = name in MOVES and any(arg.shape[0] != self.n_samples for arg in met)
        if moves or len(firsts) > 1 and name not in LOOKS_UP:
            self.note_mixing(name)
        if name not in ACROSS or not isinstance(x, Tensor) or not x.dim():
            return
        dims = kwargs.get("dim", next((a for a in args[1:] if isinstance(a, (int, tuple, list))), None))
        dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
        over = {dim % x.dim() for dim in dims}
        if 0 in over or x.shape[0] != self.n_samples and (x.dim() == 1 or over != {x.dim() - 1} or name in ORDERS):
            self.note_mixing(name)

    def held(self, value: Any, role: Role | None) -> Any:
        """Held tensors with a role."""
        if isinstance(value, (tuple, list)):
            return type(value)([self.held(part, role) for part in value])
        return self._followed(value, WithRole, role) if type(value) is Tensor and role is not None else value

    def whole(self, value: Tensor, behind: Live | None) -> Whole:
        """Integers that live numbers were cast to, together with these numbers."""
        found = self._followed(value, Whole, None)
        found.behind = behind
        return found

    def _of_whole_numbers(
        self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Indices and comparisons are decisions; arithmetic with them uses the live numbers."""
        is_place = name in LOOKS_UP and type(args[0]) is not Whole
        if is_place or not isinstance(result, Tensor) or result.dtype is torch.bool:
            if name in LEAVES and args[0].numel() > 1:
                raise self.refusal(f"{name} of whole numbers that live values were cast to")
            self._check_decisions(name, args, kwargs)
            return self.decided(result)
        counted = mapped((args, tuple(kwargs.items())), _number_behind)
        live = None
        if name in COUNTS and any(is_live(leaf) for leaf in leaves(counted)):
            if name in PRODUCTS_OF_INTEGERS:
                kind = next(leaf.dtype for leaf in leaves(counted) if is_live(leaf))
                counted = mapped(counted, lambda leaf: leaf.to(kind) if isinstance(leaf, Tensor) else leaf)
                function = torch.matmul if name == "_int_mm" else function
            live = _number_behind(function(*counted[0], **dict(counted[1])))  # in wider integers it is `Whole` again
        if not result.is_floating_point():
            return self.whole(result, live)
        if live is None:
            raise self.refusal(f"{name} of whole numbers that live values were cast to")
        return live


def by_rule(_: type, function: Any, types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Run, by its rule, a torch function or a kernel with tensors of this thread's recording, of these types."""
    run: Tape | None = now.tape
    kwargs = kwargs or {}
    if run is None:
        return elsewhere(function, args, kwargs)
    # From the cheapest answer to the rarest: this runs for every function of a pass.
    name, describes, is_kernel = KNOWN.get(function) or known(function)
    if describes:
        return raw(function, *args, **kwargs)
    if torch.is_grad_enabled():
        with torch.no_grad():
            return by_rule(_, function, types, args, kwargs)
    if peek_interpreter_stack() is not None:
        raise run.refusal(f"{name} within torch.func (vmap, grad)")
    if not is_kernel and torch._C._is_any_autocast_enabled():
        return run.by_kernels(function, args, kwargs)  # its casts are below the level of functions
    if kwargs:
        if not args or "axis" in kwargs or "keepdims" in kwargs:
            args, kwargs = spelled_alike(name, args, kwargs)
        if kwargs.get("out") is not None:
            return run.writes.out(name, function, args, kwargs)
        if kwargs.get("inplace"):
            rest = {key: value for key, value in kwargs.items() if key != "inplace"}
            return run.writes.write(args[0], function(*args, **rest))
    if Live not in types and not any(map(is_live, met := found_in(args, kwargs))):
        return run.on_held(name, function, args, kwargs, met)
    if Whole in types and name in COUNTS:
        args, kwargs = run.counted(name, args, kwargs)
    rule = RULES.get(name) or find_rule(name)
    if rule is not None:
        if rule not in OF_VALUE:
            return rule(run, function, name, args, kwargs)
        with quiet(), no_kernels():
            value = function(*args, **kwargs)
        return rule(run, name, value, args, kwargs)
    if not is_kernel:
        return run.by_kernels(function, args, kwargs)
    if run.rules.name == "jacobian":
        return RULES[ANY_KERNEL](run, function, name, args, kwargs)
    raise run.refusal(name)


Followed.__torch_function__ = classmethod(by_rule)


def _number_behind(leaf: Any) -> Any:
    """The live numbers, truncated, that integers were cast from."""
    return leaf.behind if type(leaf) is Whole and leaf.behind is not None else leaf


class Kernels(TorchDispatchMode):
    """The lower level: kernels that read or write live memory and that no torch function explains."""

    def __init__(self, of: Tape) -> None:
        super().__init__()
        self.of = of

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: a pass already runs without compiled code, and switching it off again is slower than most kernels."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, of = kwargs or {}, self.of
        cells = of.writes.cells
        if not cells and (not of.alive or not kwargs and SIMPLE.issuperset(map(type, args))):
            return func(*args, **kwargs)  # the usual case: weights, masks and positions
        if cells:
            of.writes.revive(args, kwargs)
        met = found_in(args, kwargs)
        if not met:
            return func(*args, **kwargs)
        with self, torch._C._EnableTorchFunction():  # kernels that a rule calls come here too
            return by_rule(Followed, func, set(map(type, met)), args, kwargs)


@contextmanager
def recording_on(new: Tape) -> Iterator[None]:
    """A context in which live tensors of this thread go to a tape."""
    before = now.tape
    now.tape = new
    new.is_running = True
    try:
        with torch.no_grad(), Kernels(new):
            yield
    finally:
        new.is_running = False
        now.tape = before


# The table of rules: one rule per torch function, under one name for all its spellings --------------------------------
#
# A rule runs the function for its value and appends affine steps of its own; its result is live. Most rules take the
# function's own arguments; the rule of a *family* of functions also takes the function itself and its name. A function
# without a rule is replaced by its kernels, which go through the same table. A kernel without a rule is refused.

AnyRule = TypeVar("AnyRule", bound=Callable[..., Any])
TableRule = Callable[[Any, Any, str, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the recording, the function, its name, and its arguments."""
RULES: dict[str, TableRule] = {}
ANY_KERNEL = "any_kernel"
"""The name of the rule that replaces any kernel with its derivative, for rule sets that follow derivatives."""
OF_VALUE: set[TableRule] = set()
"""Rules that take (run, name, value, args, kwargs), where `value` is the function's own result."""

# Names ----------------------------------------------------------------------------------------------------------------


def _spellings(text: str) -> dict[str, str]:
    """From each spelling to its name, given as ``name: spelling spelling, name: …``."""
    rows = [row.split(":") for row in text.split(",")]
    return {spelling: name.strip() for name, spellings in rows for spelling in spellings.split()}


_OPERATORS = _spellings(
    "floor_divide: floordiv, div: truediv, rdiv: rtruediv, div_: itruediv, mul_: imul, add_: iadd, sub_: isub, "
    "pow_: ipow, add: radd, mul: rmul, bitwise_not: invert, bitwise_and_: iand, bitwise_or_: ior, "
    "item: bool int float complex index"
)
_ALIASES = _spellings(
    "div: true_divide divide, mul: multiply, sub: subtract, clamp: clip, abs: absolute, cat: concat concatenate, "
    "neg: negative, transpose: swapaxes swapdims, softmax: _softmax _safe_softmax, log_softmax: _log_softmax, "
    "gt: greater, lt: less, ge: greater_equal, le: less_equal, ne: not_equal, sigmoid: expit, trunc: fix, "
    "max_pool1d: max_pool1d_with_indices, max_pool2d: max_pool2d_with_indices, max_pool3d: max_pool3d_with_indices, "
    "movedim: moveaxis, mm: _sparse_mm, view: _unsafe_view _reshape_alias, item: _local_scalar_dense, "
    "pad_constant: constant_pad_nd, linalg_vector_norm: vector_norm, atan: arctan, asin: arcsin, asinh: arcsinh, "
    "atanh: arctanh, acos: arccos"
)
_NUMPYS_NAMES = {"axis": "dim", "keepdims": "keepdim"}
_NOT_FIRST = ("where", "searchsorted")
"""Functions whose `input` is not their first argument."""


def name_of(function: Any) -> str:
    """One name for all spellings of a torch function; reading an attribute of a tensor is ``get:attribute``."""
    return known(function).name


def _name(function: Any) -> str:
    # An overload such as `aten.mul.Tensor` goes by the name of its packet, `mul`.
    name = getattr(getattr(function, "overloadpacket", function), "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        return f"{name[2:5]}:{function.__self__.__name__}"
    if name.startswith("__") and name.endswith("__"):
        name = _OPERATORS.get(name[2:-2], name[2:-2])
    name = name.removeprefix("special_")
    is_in_place = name.endswith("_") and not name.startswith("_")
    return _ALIASES.get(name[:-1], name[:-1]) + "_" if is_in_place else _ALIASES.get(name, name)


def spelled_alike(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One spelling of arguments: torch also takes numpy's `axis` and `keepdims`, and what it works on as `input=`."""
    kwargs = {_NUMPYS_NAMES.get(key, key): value for key, value in kwargs.items()}
    if not args and name not in _NOT_FIRST:
        for key in ("input", "self"):
            if key in kwargs:
                args = (kwargs.pop(key),)
    return args, kwargs


DESCRIBES = words(
    "shape size dim ndim numel nelement stride storage_offset is_contiguous is_floating_point is_complex is_signed "
    "get_device element_size is_cuda is_same_size has_names len hash zeros_like ones_like empty_like rand_like "
    "randn_like randint_like new_zeros new_ones new_empty new_empty_strided is_pinned result_type can_cast repr "
    "dim_order is_inference is_conj is_neg sym_size sym_stride sym_numel sym_storage_offset is_nonzero_size get:shape "
    "get:dtype get:device get:ndim get:is_cuda get:requires_grad get:layout get:_base get:is_sparse get:is_quantized "
    "get:grad_fn get:is_leaf get:_version get:is_meta get:is_nested get:names get:is_mps get:is_xla get:is_cpu "
    "get:itemsize get:nbytes get:grad get:is_mkldnn get:is_xpu get:is_ipu get:is_maia get:output_nr get:retains_grad "
    "get:is_hpu get:is_sparse_csr get:is_vulkan get:_backward_hooks get:_grad get:_is_view _is_view requires_grad_ "
    "get:volatile is_shared get:name get:is_mtia"
)
"""Sizes, types, and new tensors of the same shape: the result contains none of the values."""


class Function(NamedTuple):
    """How a recording treats a torch function.

    Attributes:
        name: One name for all its spellings.
        describes: Whether the result does not contain any of the values.
        is_kernel: Whether it is a kernel of torch's dispatcher.
    """

    name: str
    describes: bool
    is_kernel: bool


KNOWN: dict[Any, Function] = {}
"""Cache of lookups."""


def known(function: Any) -> Function:
    """The treatment of a function, looked up once."""
    found = KNOWN.get(function)
    if found is None:
        name = _name(function)
        found = Function(name, name in DESCRIBES, isinstance(function, torch._ops.OpOverload))
        KNOWN[function] = found
    return found


# Rules ----------------------------------------------------------------------------------------------------------------


def family(names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a rule for functions that are treated alike: it takes (run, function, name, args, kwargs)."""

    def register(rule: AnyRule) -> AnyRule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def of_value(names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a rule that takes (run, name, value, args, kwargs), where `value` is the function's own result."""

    def register(rule: AnyRule) -> AnyRule:
        OF_VALUE.add(rule)
        return family(names)(rule)

    return register


def rule(names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a rule that takes the function's own arguments."""

    def register(own: AnyRule) -> AnyRule:
        family(names)(lambda run, function, name, args, kwargs: own(*args, **kwargs))
        return own

    return register


def rules_for(names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a rule of your own for torch functions, by their names separated by spaces.

    It takes (run, function, args, kwargs), with `run` the recording, and returns a live tensor, made by torch functions
    of live tensors or by `run.emit`.
    """
    if not isinstance(names, str) or not names.split():
        raise InputError(f"`rules_for` takes names of torch functions, separated by spaces; got {names!r:.60}.")

    def register(own: AnyRule) -> AnyRule:
        family(names)(lambda run, function, name, args, kwargs: own(run, function, args, kwargs))
        return own

    return register


def find_rule(name: str) -> TableRule | None:
    """The rule for a function name; ``mul_`` is a write of the result of the rule for ``mul``."""
    found = RULES.get(name)
    return in_place if found is None and name.endswith("_") and name[:-1] in RULES else found
