"""Module calls of a thread, told to whoever looks on: by one patch of `nn.Module.__call__`; no instance is touched.

The patch is there while anybody looks on, and other threads go straight through it.
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
"""Is told of a module, how to call it, and the arguments; gives what the call is to give."""


class _Thread(threading.local):
    """Who looks on in a thread."""

    observer: Observer | None = None


_thread = _Thread()
_lock = threading.Lock()
_original = nn.Module.__call__
_n_inside = 0


@contextmanager
def observing(observer: Observer, methods_of: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Let the module calls of this thread go by an observer.

    Args:
        observer: Whom they are told.
        methods_of: Modules whose methods count as calls too, for code that does not call the modules themselves.
    """
    global _n_inside
    before = _thread.observer
    with _lock:
        _n_inside += 1
        nn.Module.__call__ = _observed  # type: ignore[method-assign]
    _thread.observer = observer
    placed = [(module, name) for module in methods_of for name in own_methods(module) if name not in module.__dict__]
    try:
        for module, name in placed:
            module.__dict__[name] = _observed_method(module, getattr(module, name))
        yield
    finally:
        for module, name in placed:
            module.__dict__.pop(name, None)
        _thread.observer = before
        with _lock:
            _n_inside -= 1
            if _n_inside == 0:
                nn.Module.__call__ = _original  # type: ignore[method-assign]


def _observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    observer = _thread.observer
    return _original(module, *args, **kwargs) if observer is None else observer(module, _original, args, kwargs)


def module_tree(model: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """The modules of a model by their paths, as `named_modules` gives them, each once; asked for in every pass."""
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
    """Methods by which a module may be run: those that its own classes have."""
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
    """Another forward for calls of this thread, so that the module's hooks stay around it."""
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
    """Whether code of the user's runs around a module's forward."""
    every = (module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks)
    return any((*every, module._forward_pre_hooks, module._forward_hooks))
