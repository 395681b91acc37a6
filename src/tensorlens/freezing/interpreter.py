"""One run of a model under the rules: where it is, what it holds, and what each torch function then means."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tensorlens.freezing.rules  # noqa: F401  (fills the table)
from tensorlens.errors import NotLinearError
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.layouts import constants
from tensorlens.freezing.rules.linear import describe, dropout, linear
from tensorlens.freezing.rules.modules import find_adapter
from tensorlens.freezing.rules.recurrences import with_kernels
from tensorlens.freezing.rules.table import FOR_HELD, find_rule, name_of
from tensorlens.freezing.tape import Site, Tape
from tensorlens.freezing.traced import Traced, mark, raw, traced_in, unmark


class Pass:
    """The running pass: knows where in the model it is, holds factors, and gives torch functions their meaning.

    Args:
        names: Module paths by module identity.
        tape: Filled while recording, read while replaying.
        recording: Which of the two.
        rules: The user's conventions.
        grad: Whether the pass builds an autograd graph, also where the model switches it off.
        heads: For each block named, a multiplier for each head's token mixing.
    """

    def __init__(
        self, *, names: dict[int, str], tape: Tape, recording: bool, rules: Rules, grad: bool = False,
        heads: dict[int, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.names, self.tape, self.recording, self.rules, self.grad = names, tape, recording, rules, grad
        self.heads = heads or {}
        self.block: int | None = None
        self.place = "before block 0"
        self.path: list[str] = []
        self.conventions: dict[str, set[str]] = {}
        self.n_reads = 0
        self.generation: float = 0
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}
        self._watched: list[Tensor] = []
        self._places: dict[int, str] = {}
        self.modules: list[nn.Module] = []
        self._counts: Counter[tuple[str, str, str]] = Counter()

    @property
    def module(self) -> str:
        """Path of the module that is running."""
        return self.path[-1] if self.path else ""

    def keep_factor(self, operation: str, compute: Callable[[], Any]) -> Any:
        """A factor held fixed: computed and kept while recording, looked up while replaying."""
        key = (self.place, self.module, operation)
        site = Site(*key, self._counts[key])
        self._counts[key] += 1
        if not self.recording:
            return self.tape.get(site)
        # Without a way back: a gradient through a factor would be no part of T, and the tape would keep its graph.
        return self.tape.put(site, constants(compute()) if self.grad else compute())

    def note_rule(self, rule: str) -> None:
        """Note that `rule` was applied in the current module."""
        if self.recording:
            self.tape.rules[rule, self.module] += 1

    def mix_heads(self, mixed: Tensor) -> Tensor:
        """Silence the heads left out of what attention has mixed, (batch, head, token, channel)."""
        if self.block is None:
            return mixed
        self.tape.n_heads.setdefault(self.block, mixed.shape[1])
        multiplier = self.heads.get(self.block)
        return mixed if multiplier is None else mixed * multiplier.to(mixed)[:, None, None]

    def watch_product(self, convention: str, result: Tensor) -> None:
        """Note a convention once a gradient really passes: most such products end in a softmax that holds them.

        Not while recording: a graph that is kept would keep the pass, which keeps the frozen model, which keeps it.
        """
        if self.grad and not self.recording and raw(getattr, result, "requires_grad"):
            module = self.module
            raw(Tensor.register_hook, result, lambda _: self._note_convention(convention, module))

    def _note_convention(self, convention: str, module: str) -> None:
        self.conventions.setdefault(convention, set()).add(module)

    def remember_entry(self, original: Tensor, live: Tensor) -> None:
        """From here on, whoever reads `original` in this pass reads `live`: a residual outside of the blocks does."""
        if type(original) is Tensor or isinstance(original, Traced):
            self._entries[id(original)] = original, live
            mark(original, live=True, role="entry")

    def watch_reads(self, tensor: Tensor) -> None:
        """Count in `n_reads` the functions that take values of `tensor`."""
        self._watched.append(mark(tensor, live=False, role="embedding"))

    def forget_entries(self) -> None:
        """Make ordinary tensors again of those that were watched or stood for the input: they may be the user's."""
        for original in (*self._watched, *(original for original, _ in self._entries.values())):
            unmark(original)
        self._entries, self._watched = {}, []

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function that met a traced tensor, by its rule."""
        if torch.is_grad_enabled() != self.grad:
            with torch.set_grad_enabled(self.grad):
                return self.call(function, args, kwargs)
        name = name_of(function)
        rule = find_rule(name)
        sources = traced_in(args, kwargs)
        roles = [source.role for source in sources]
        if "entry" in roles:
            args, kwargs = _swap((args, kwargs), self._entries)
            sources = traced_in(args, kwargs)
        if rule is describe:
            return describe(self, function, args, kwargs)
        self.n_reads += "embedding" in roles and rule is not dropout
        live = [source for source in sources if source.live]
        if not live:
            if rule in FOR_HELD:
                return rule(self, function, args, kwargs)
            return linear(self, function, args, kwargs, sources)
        if rule is None:
            raise NotLinearError(self._refusal(name))
        if self.recording:
            self.note_ages(live)
        if rule is linear:  # which need not look for them again
            return linear(self, function, args, kwargs, sources)
        return rule(self, function, args, kwargs)

    def _refusal(self, operation: str) -> str:
        return (
            f"`{operation}` in `{self.module or 'the model'}` ({self.place}) has no rule that would make it "
            "exactly linear. "
            "Expected operations that are linear, or that the rules can hold fixed. Register an adapter for the "
            "module's class "
            "with `tensorlens.adapter`, or a rule for the function with `tensorlens.rules_for`."
        )

    def _place_of(self, module: nn.Module) -> str | None:
        """Class of the module's parent and the name it has there."""
        if not self._places:
            for parent in self.modules:
                of_parent = f"{type(parent).__module__}.{type(parent).__qualname__}"
                self._places |= {id(child): f"{of_parent}.{name}" for name, child in parent.named_children()}
        return self._places.get(id(module))

    def note_ages(self, live: list[Traced]) -> None:
        """Told the live tensors that a function takes; subclasses look for those that went past a block."""

    def call_module(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module of the model: by its adapter if it has one and something live comes in."""
        self.path.append(self.names[id(module)])
        try:
            live = any(source.live for source in traced_in(args, kwargs))
            adapter = find_adapter(module, self._place_of(module)) if live else None
            forward = with_kernels(self, forward)
            result = self.run_module(
                module, functools.partial(self._adapt, adapter, module, forward) if adapter else forward, args, kwargs
            )
            if live and self.grad:
                self._refuse_custom_backward(result)
            return result
        finally:
            self.path.pop()

    def _adapt(self, adapter: Callable[..., Any], module: nn.Module, forward: Callable[..., Any], *args: Any,
               **kwargs: Any) -> Any:  # fmt: skip
        with torch.set_grad_enabled(self.grad):
            return adapter(self, module, forward, *args, **kwargs)

    def run_module(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module's forward, or its adapter; subclasses step in here for the modules they care about."""
        return forward(*args, **kwargs)

    def _refuse_custom_backward(self, result: Any) -> None:
        """A custom autograd function brings a derivative of its own, which no rule has seen."""
        for tensor in _tensors(result):
            node = raw(getattr, tensor, "grad_fn")
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                raise NotLinearError(self._refusal(f"the custom autograd function {type(node).__name__}"))


def _swap(values: Any, entries: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """The same nested values with the live tensor in place of each one it stands for."""
    if isinstance(values, Tensor):
        return entries[id(values)][1] if id(values) in entries else values
    if isinstance(values, dict):
        return {key: _swap(value, entries) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_swap(value, entries) for value in values)
    return values


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
