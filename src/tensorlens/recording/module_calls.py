"""Module calls of a recording: where in the model it is, adapters, and who is told.

Modules report by one patch of `nn.Module.__call__` while any recording runs, for its thread alone; no instance is touched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tensorlens import cancel
from tensorlens.models.module_tree import named_modules
from tensorlens.recording.live import found_in, tape
from tensorlens.recording.rules.modules import find_adapter
from tensorlens.recording.rules.recurrences import with_kernels
from tensorlens.recording.tape import Tape
from tensorlens.recording.writes import address_of

Forward = Callable[..., Any]


class ModulePlaces:
    """Where modules and weights are in a model.

    Attributes:
        names: Paths of the modules, by identity.
        parents: For each module the class of its parent and the name it has there.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model = model
        named = named_modules(model, prefix)
        self.names = {id(module): name for name, module in named.items()}
        self.parents = {
            id(child): f"{type(parent).__module__}.{type(parent).__qualname__}.{name}"
            for parent in named.values()
            for name, child in parent._modules.items()
        }

    def names_of(self, constants: Sequence[Tensor | None]) -> dict[int, str]:
        """Which constants lie in the memory of the model's weights, and what these are called."""
        owned = (*self.model.named_parameters(), *self.model.named_buffers())
        by_address = {address_of(weight): name for name, weight in owned}
        by_address.pop(0, None)
        places = {n: address_of(value) for n, value in enumerate(constants) if value is not None}
        return {n: by_address[address] for n, address in places.items() if address in by_address}


class ModuleCalls:
    """What a recording does at the modules it meets.

    Args:
        places: Where modules are.
        run: The tape.
        at: What to do at a module: takes the module, its path, its forward, and the arguments of the call.
    """

    def __init__(self, places: ModulePlaces, run: Tape, at: Forward) -> None:
        self.places, self.run, self.at = places, run, at

    def call(self, module: nn.Module, call: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module was called."""
        name = self.places.names.get(id(module))
        if name is None:
            return call(module, *args, **kwargs)
        cancel.check()
        path = self.run.path
        path.append(name)
        try:
            return self.at(module, name, functools.partial(self._forward, module, call), args, kwargs)
        finally:
            path.pop()

    def _forward(self, module: nn.Module, call: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a module: by its adapter if it has one and something live comes in."""
        own = module.__dict__.get("forward", module.forward)
        forward = with_kernels(self.run, own)
        if found_in(args, kwargs):
            adapter = find_adapter(module, self.places.parents.get(id(module)))
            if adapter is not None:
                forward = functools.partial(adapter, self.run, module, forward)
        if forward is own:
            return call(module, *args, **kwargs)
        with _forward_of(module, forward):
            return call(module, *args, **kwargs)


def straight(module: nn.Module, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing but the module's own forward."""
    return forward(*args, **kwargs)


_lock = threading.Lock()
_original = nn.Module.__call__
_n_inside = 0


def _reporting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run = tape()
    calls = None if run is None else run.calls
    return _original(module, *args, **kwargs) if calls is None else calls.call(module, _original, args, kwargs)


@contextmanager
def module_calls_seen() -> Iterator[None]:
    """Let module calls report to the recording of their thread, by one patch of `nn.Module`; no instance is touched."""
    global _n_inside
    with _lock:
        _n_inside += 1
        nn.Module.__call__ = _reporting  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _n_inside -= 1
            if _n_inside == 0:
                nn.Module.__call__ = _original  # type: ignore[method-assign]


@contextmanager
def methods_seen(modules: tuple[nn.Module, ...]) -> Iterator[None]:
    """Let some modules report calls of their methods, for code that does not call the modules themselves."""
    placed = [(module, name) for module in modules for name in _own_methods(module) if name not in module.__dict__]
    try:
        for module, name in placed:
            module.__dict__[name] = _reporting_method(module, getattr(module, name))
        yield
    finally:
        for module, name in placed:
            module.__dict__.pop(name, None)


def _own_methods(module: nn.Module) -> list[str]:
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    methods = {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}
    return [name for name, value in methods.items() if callable(value) and not name.startswith("_")]


def _reporting_method(module: nn.Module, method: Forward) -> Forward:
    @functools.wraps(method)
    def report(*args: Any, **kwargs: Any) -> Any:
        run = tape()
        is_state = any(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 for x in (*args, *kwargs.values()))
        if run is None or run.calls is None or run.block is not None or not is_state:
            return method(*args, **kwargs)
        return run.calls.call(module, lambda _, *a, **k: method(*a, **k), args, kwargs)

    return report


@contextmanager
def _forward_of(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Another forward for one call, so that the module's hooks stay around it; other threads go by its own."""
    own, run = module.__dict__.get("forward"), tape()
    first = module.forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return (forward if tape() is run else first)(*args, **kwargs)

    module.__dict__["forward"] = replaced
    try:
        yield
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own

