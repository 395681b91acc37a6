"""Module calls of a thread, reported to observers.

`nn.Module.__call__` runs `_compiled_call_impl` of a module, where it has one. So a module reports its calls by having
one while it is observed; calls of other threads are not affected. The class is not patched, which would make
Python forget what it knows of every class of modules.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

Call = Callable[..., Any]
"""Calls a module: takes it and the arguments."""

Observer = Callable[[nn.Module, Call, tuple[Any, ...], dict[str, Any]], Any]
"""Called with a module, a function that calls it, and the arguments; returns the result of the call."""


class _Thread(threading.local):
    """The observers of a thread."""

    observer: Observer | None = None


_thread = _Thread()
_lock = threading.Lock()
_reporting: dict[int, tuple[int, Call | None]] = {}
"""Modules that report: the number of observers, and the attribute as it was before."""


@contextmanager
def observing(observer: Observer, modules: Sequence[nn.Module], methods_of: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Send the calls of some modules in this thread to an observer.

    Args:
        observer: Receives them.
        modules: The modules, each once.
        methods_of: Modules whose methods count as calls too, for code that does not call the modules themselves.
    """
    before = _thread.observer
    placed = [(module, name) for module in methods_of for name in own_methods(module) if name not in module.__dict__]
    _begin_reporting(modules)
    _thread.observer = observer
    try:
        for module, name in placed:
            module.__dict__[name] = _observed_method(module, getattr(module, name))
        yield
    finally:
        for module, name in placed:
            module.__dict__.pop(name, None)
        _thread.observer = before
        _end_reporting(modules)


def _begin_reporting(modules: Sequence[nn.Module]) -> None:
    with _lock:
        for module in modules:
            n_looking, own = _reporting.get(id(module), (0, module.__dict__.get("_compiled_call_impl")))
            _reporting[id(module)] = n_looking + 1, own
            if n_looking == 0:
                call = type(module)._call_impl if own is None else functools.partial(_call_own, own)
                module.__dict__["_compiled_call_impl"] = functools.partial(_report, module, call)


def _end_reporting(modules: Sequence[nn.Module]) -> None:
    with _lock:
        for module in modules:
            n_looking, own = _reporting.pop(id(module))
            if n_looking > 1:
                _reporting[id(module)] = n_looking - 1, own
            elif own is None:
                del module.__dict__["_compiled_call_impl"]
            else:
                module.__dict__["_compiled_call_impl"] = own


def _report(module: nn.Module, call: Call, /, *args: Any, **kwargs: Any) -> Any:
    observer = _thread.observer
    return call(module, *args, **kwargs) if observer is None else observer(module, call, args, kwargs)


def _call_own(own: Call, _: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs)


def module_tree(model: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """The modules of a model by path, as in `named_modules`, each once; cached, because every pass needs them."""
    found, met, waiting = dict[str, nn.Module](), set[int](), [(path, model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        found[path] = module
        for name, child in reversed(module._modules.items()):
            if child is not None:
                waiting.append((f"{path}.{name}" if path else name, child))
    return found


def own_methods(module: nn.Module) -> list[str]:
    """Methods that may run a module: those of its own classes."""
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    methods = {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}
    return [name for name, value in methods.items() if callable(value) and not name.startswith("_")]


def _observed_method(module: nn.Module, method: Call) -> Call:
    def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    @functools.wraps(method)
    def report(*args: Any, **kwargs: Any) -> Any:
        observer = _thread.observer
        given = (*args, *kwargs.values())
        takes_state = any(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 for x in given)
        return method(*args, **kwargs) if observer is None or not takes_state else observer(module, call, args, kwargs)

    return report


@contextmanager
def forward_replaced(module: nn.Module, forward: Call) -> Iterator[None]:
    """A replacement forward for calls of this thread; the module's hooks stay around it."""
    own, first, thread = module.__dict__.get("forward"), module.forward, threading.get_ident()

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return (forward if threading.get_ident() == thread else first)(*args, **kwargs)

    module.__dict__["forward"] = replaced
    try:
        yield
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own


def has_hooks(module: nn.Module) -> bool:
    """Whether code of the user runs around a module's forward."""
    every = (module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks)
    return any((*every, module._forward_pre_hooks, module._forward_hooks))
