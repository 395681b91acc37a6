"""The interpreter: gives each torch function its rule, and knows where in the model it is."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

import tensorlens.freezing.rules  # noqa: F401  (fills the table)
from tensorlens import cancel
from tensorlens.errors import NotLinearError
from tensorlens.freezing.audit import LeakAudit
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.places import Place, Site
from tensorlens.freezing.rules.coarse import call_on_coarse
from tensorlens.freezing.rules.in_place import write_back, write_out
from tensorlens.freezing.rules.linear import describe, dropout, linear
from tensorlens.freezing.rules.modules import find_adapter
from tensorlens.freezing.rules.recurrences import with_kernels
from tensorlens.freezing.rules.table import FOR_HELD, find_rule, name_of, spelled_alike
from tensorlens.freezing.traced import Traced, mark, raw, traced_in, type_of, unmark
from tensorlens.models.evidence import tensors_in
from tensorlens.models.module_tree import named_modules

Forward = Callable[..., Any]
Heads = dict[int, Tensor]
"""For each block named, a multiplier for each head."""


@runtime_checkable
class Factors(Protocol):
    """Where held factors go while recording, and come from while replaying."""

    def at(self, site: Site, compute: Callable[[], Any]) -> Any:
        """The factor of a site."""
        ...

    def protect(self, target: Tensor) -> None:
        """Keep factors that lie in the memory of `target` from being written over."""


@runtime_checkable
class Route(Protocol):
    """What a pass does at the modules it meets: where it begins, what it notes, where it ends."""

    def run_module(
        self, run: Interpreter, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module's forward, or its adapter, or something in its place."""

    def note_sources(self, run: Interpreter, live: list[Traced]) -> None:
        """Told the live tensors that a function takes."""


@runtime_checkable
class Observer(Protocol):
    """Somebody who looks on: sees every function and module of a pass with what came out, and changes nothing."""

    def saw_call(self, run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A torch function ran by its rule."""

    def saw_module(self, run: Interpreter, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module ran."""


@runtime_checkable
class EntryObserver(Protocol):
    """An observer that is also told of blocks before they run."""

    def saw_entry(self, run: Interpreter, state: Tensor) -> None:
        """A block is about to run from this state."""


class Interpreter:
    """One pass of a model under the rules.

    Args:
        model: What runs: the user's model, or one of its blocks.
        rules: The user's conventions.
        factors: Filled while recording, read while replaying.
        route: What to do at modules.
        recording: Whether the rules applied and the number of heads are to be noted.
        grad: Whether the pass builds an autograd graph, also where the model switches it off. Such a pass is always at
            the recorded state.
        heads: For each block named, a multiplier for each head's token mixing.
        observers: Who looks on.
        audit: Watches, below the rules, for live values that leave unseen.
        prefix: Path of `model` within the user's model.
    """

    def __init__(
        self, model: nn.Module, *, rules: Rules, factors: Factors, route: Route, recording: bool = False,
        grad: bool = False, heads: Heads | None = None, observers: Sequence[Observer] = (),
        audit: LeakAudit | None = None, prefix: str = "",
    ) -> None:  # fmt: skip
        named = named_modules(model, prefix)
        self.names = {id(module): name for name, module in named.items()}
        self.modules = list(named.values())
        self.rules, self.factors, self.route = rules, factors, route
        self.recording, self.grad, self.heads, self.observers, self.audit = (
            recording,
            grad,
            heads or {},
            observers,
            audit,
        )
        self.place = Place()
        self.path: list[str] = []
        self.rules_applied: Counter[tuple[str, str]] = Counter()
        self.n_heads: dict[int, int] = {}
        self.conventions: dict[str, set[str]] = {}
        self.signature = 0
        self.n_reads = 0
        self.generation: float = 0
        self.refused: Exception | None = None
        self.written: frozenset[tuple[int, str]] = frozenset()
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}
        self._watched: list[Tensor] = []
        self._hooked: set[int] = set()
        self._parents: dict[int, str] = {}
        self._counts: Counter[tuple[Place, str, str]] = Counter()
        self._left: dict[int, tuple[int, Any]] = {}

    # Where it is ------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> str:
        """Path of the module that is running."""
        return self.path[-1] if self.path else ""

    @property
    def block(self) -> int | None:
        """The block that is running, or None between blocks."""
        return self.place.block if self.place.inside else None

    # What rules ask of it ---------------------------------------------------------------------------------------------

    def keep_factor(self, operation: str, compute: Callable[[], Any]) -> Any:
        """A factor held fixed: computed and kept while recording, looked up while replaying."""
        key = (self.place, self.module, operation)
        site = Site(*key, self._counts[key])
        self._counts[key] += 1
        return self.factors.at(site, compute)

    def protect_factors(self, target: Tensor) -> None:
        """Before a write: a factor that was kept of `target` is in its memory, and gets its own."""
        if self.recording:
            self.factors.protect(target)

    def count_left(self, value: Tensor) -> tuple[int, int]:
        """How many single values have left the memory of `value` for Python, with this one, and how many there are."""
        memory = raw(Tensor.untyped_storage, value)
        # It is kept, for another would be given the same address.
        n_left = self._left.get(memory.data_ptr(), (0, memory))[0] + 1
        self._left[memory.data_ptr()] = n_left, memory
        return n_left, memory.nbytes() // type_of(value).itemsize

    def note_rule(self, rule: str) -> None:
        """Note that `rule` was applied in the current module."""
        if self.recording:
            self.rules_applied[rule, self.module] += 1

    def mix_heads(self, mixed: Tensor) -> Tensor:
        """Mask the excluded heads of what attention has mixed, (batch, head, token, channel)."""
        if self.block is None:
            return mixed
        self.n_heads.setdefault(self.block, mixed.shape[1])
        multiplier = self.heads.get(self.block)
        return mixed if multiplier is None else mixed * multiplier.to(mixed)[:, None, None]

    def watch_product(self, convention: str, result: Tensor) -> None:
        """Note a convention once a gradient really passes: most such products end in a softmax that holds them.

        Not while recording: a graph that is kept would keep the interpreter, and so everything else.
        """
        if self.grad and not self.recording and raw(getattr, result, "requires_grad"):
            module = self.module
            raw(Tensor.register_hook, result, lambda _: self._note_convention(convention, module))

    def _note_convention(self, convention: str, module: str) -> None:
        self.conventions.setdefault(convention, set()).add(module)

    # Tensors that stand for the input ---------------------------------------------------------------------------------

    def remember_entry(self, original: Tensor, live: Tensor) -> None:
        """From here on, reads of `original` return `live`: a residual outside of the blocks reads it."""
        if type(original) is Tensor or isinstance(original, Traced):
            self._entries[id(original)] = original, live
            mark(original, live=True, role="entry")

    def live_of(self, tensor: Tensor) -> Tensor:
        """The tensor that a read of `tensor` returns."""
        return self._entries[id(tensor)][1] if id(tensor) in self._entries else tensor

    def watch_reads(self, tensor: Tensor) -> None:
        """Count in `n_reads` the functions that take values of `tensor`."""
        self._watched.append(mark(tensor, live=False, role="embedding"))

    def forget_entries(self) -> None:
        """Make ordinary tensors again of those that were watched or stood for the input: they may be the user's."""
        for original in (*self._watched, *(original for original, _ in self._entries.values())):
            unmark(original)
        self._entries, self._watched = {}, []

    # Functions --------------------------------------------------------------------------------------------------------

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function that met a traced tensor, by its rule."""
        if torch.is_grad_enabled() != self.grad:
            with torch.set_grad_enabled(self.grad):
                return self.call(function, args, kwargs)
        if self.audit is not None:
            with self.audit.explained():
                result = self._call(function, args, kwargs)
            self.audit.note_live(result)
            return result
        return self._call(function, args, kwargs)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(function)
        rule = find_rule(name)
        if rule is describe:
            return describe(self, function, args, kwargs)
        sources = traced_in(args, kwargs)
        for source in sources:
            if source.role == "entry":
                args, kwargs = _swap((args, kwargs), self._entries)
                sources = traced_in(args, kwargs)
                break
            self.n_reads += source.role == "embedding" and rule is not dropout
        if any([source.role == "coarse" for source in sources]):
            result = call_on_coarse(self, rule, function, args, kwargs)
            if result is not NotImplemented:
                return result
        if kwargs:
            args, kwargs = spelled_alike(name, args, kwargs)
            if kwargs.get("out") is not None:
                return write_out(self, function, args, kwargs)
            if kwargs.get("inplace") and rule is not None and rule is not dropout:
                return write_back(self, rule, function, args, kwargs)
        live = [source for source in sources if source.live]
        if not live:
            if rule is not None and rule in FOR_HELD:
                return rule(self, function, args, kwargs)
            return linear(self, function, args, kwargs, sources)
        if rule is None or peek_interpreter_stack() is not None:
            raise NotLinearError(self.refusal(name if rule is None else f"{name} within torch.func (vmap, grad)"))
        if self.recording:
            self.signature = hash((self.signature, name, self.module))
            self.route.note_sources(self, live)
        known = (sources,) if rule is linear else ()  # which then need not look for them again
        result = rule(self, function, args, kwargs, *known)
        if self.recording:
            self._note_cast(live, result)
        for observer in self.observers:
            observer.saw_call(self, name, args, kwargs, result)
        return result

    def _note_cast(self, live: list[Traced], result: Any) -> None:
        """Note where a model leaves the precision of its states: by a cast, or by autocast within its own code."""
        if isinstance(result, Traced) and result.live:
            dtype = type_of(result)
            if dtype.is_floating_point and dtype.itemsize < max([type_of(source).itemsize for source in live]):
                self.note_rule(f"cast: {str(dtype).removeprefix('torch.')}")

    def refusal(self, operation: str) -> str:
        """Why `operation` cannot be made linear, where, and what to do."""
        return (
            f"`{operation}` in `{self.module or 'the model'}` ({self.place}) has no rule that would make it "
            "exactly linear. Expected operations that are linear, or that the rules can hold fixed. Register an "
            "adapter for the module's class with `tensorlens.adapter`, or a rule for the function with "
            "`tensorlens.rules_for`."
        )

    # Modules ----------------------------------------------------------------------------------------------------------

    def call_module(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], *,
        with_hooks: bool = False,
    ) -> Any:  # fmt: skip
        """Run a module of the model: by its adapter if it has one and something live comes in.

        Args:
            module: The module.
            forward: Its forward, or all of its call.
            args: Of the call.
            kwargs: Of the call.
            with_hooks: Whether `forward` runs the module's hooks, and then reports the forward between them.
        """
        if id(module) in self._hooked:  # between its hooks: the module itself has reported
            self._hooked.discard(id(module))
            live = any(source.live for source in traced_in(args, kwargs))  # a hook may have changed what comes in
            return self._own_forward(module, forward, live=live)(*args, **kwargs)
        cancel.check()
        self.path.append(self.names[id(module)])
        try:
            live = any(source.live for source in traced_in(args, kwargs))
            if with_hooks:
                self._hooked.add(id(module))
            else:
                forward = self._own_forward(module, forward, live=live)
            result = self.route.run_module(self, module, forward, args, kwargs)
            if live and self.grad:
                self._refuse_custom_backward(result)
            for observer in self.observers:
                observer.saw_module(self, module, args, result)
            return result
        finally:
            self._hooked.discard(id(module))
            self.path.pop()

    def _own_forward(self, module: nn.Module, forward: Forward, *, live: bool) -> Forward:
        adapter = find_adapter(module, self._parent_of(module)) if live else None
        forward = with_kernels(self, forward)
        return forward if adapter is None else functools.partial(self._adapt, adapter, module, forward)

    def _parent_of(self, module: nn.Module) -> str | None:
        """Class of the module's parent and the name it has there."""
        if not self._parents:
            for parent in self.modules:
                of_parent = f"{type(parent).__module__}.{type(parent).__qualname__}"
                self._parents |= {id(child): f"{of_parent}.{name}" for name, child in parent.named_children()}
        return self._parents.get(id(module))

    def _adapt(self, adapter: Forward, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.grad):
            if self.audit is None:
                return adapter(self, module, forward, *args, **kwargs)
            with self.audit.explained():
                result = adapter(self, module, forward, *args, **kwargs)
            self.audit.note_live(result)
            return result

    def _refuse_custom_backward(self, result: Any) -> None:
        """A custom autograd function brings a derivative of its own, which no rule has seen."""
        for tensor in tensors_in(result):
            node = raw(getattr, tensor, "grad_fn")
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                raise NotLinearError(self.refusal(f"the custom autograd function {type(node).__name__}"))


def _swap(values: Any, entries: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """The same nested values with the live tensor in place of each one it stands for."""
    if isinstance(values, Tensor):
        return entries[id(values)][1] if id(values) in entries else values
    if isinstance(values, dict):
        return {key: _swap(value, entries) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_swap(value, entries) for value in values)
    return values
