"""The thread-local, reversible interception of a model's modules.

While a `Pass` is active in a thread, the forwards of the model's modules report to it. They are wrapped on the
instances (never on classes), once for all threads that need them, and unwrapped when the last one leaves; a thread
without a pass goes straight through.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tensorlens.freezing.interpreter import Pass
from tensorlens.freezing.traced import active, set_active

_lock = threading.Lock()
_wrapped: dict[int, int] = {}
"""How many running passes, in any thread, need the module with this identity wrapped."""


@contextmanager
def running(run: Pass, model: nn.Module) -> Iterator[None]:
    """Let the modules of `model` report to `run` in this thread, and leave them as they were found."""
    modules = run.modules = run.modules or list(model.modules())
    before = active()
    _wrap(modules)
    set_active(run)
    try:
        # Leaving inference mode switches gradients on, and every function of a pass would switch them off again.
        with own_precision(), torch.set_grad_enabled(run.grad):
            yield
    finally:
        set_active(before)
        _unwrap(modules)


@contextmanager
def own_precision() -> Iterator[None]:
    """Away from a caller's autocast and inference mode: T is the model's in its own numbers, with gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _wrap(modules: list[nn.Module]) -> None:
    with _lock:
        for module in modules:
            _wrapped[id(module)] = _wrapped.get(id(module), 0) + 1
            if _wrapped[id(module)] == 1:
                # Into the instance's own dictionary: `nn.Module.__setattr__` is slow, and the class stays untouched.
                name = _method(module)
                module.__dict__[name] = _reporting(module, getattr(module, name), name in module.__dict__)
                module.__dict__["training"] = False  # T describes the model at inference
                module.__dict__["_compiled_call_impl"] = None  # and its code, not what a compiler made of it


def _unwrap(modules: list[nn.Module]) -> None:
    with _lock:
        for module in modules:
            _wrapped[id(module)] -= 1
            if _wrapped[id(module)] == 0:
                del _wrapped[id(module)]
                name = _method(module)
                wrapper = module.__dict__.pop(name)
                module.__dict__["training"] = wrapper.was_training
                module.__dict__.pop("_compiled_call_impl")
                if wrapper.was_compiled is not None:
                    module.__dict__["_compiled_call_impl"] = wrapper.was_compiled
                if wrapper.was_on_instance:  # put there by somebody else
                    module.__dict__[name] = wrapper.__wrapped__


def _method(module: nn.Module) -> str:
    """The method to wrap: below accelerate's hook, which brings the weights before it calls what it found."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _reporting(module: nn.Module, forward: Callable[..., Any], was_on_instance: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def report(*args: Any, **kwargs: Any) -> Any:
        run = active()
        if run is None or id(module) not in run.names:
            return forward(*args, **kwargs)
        return run.call_module(module, forward, args, kwargs)

    report.was_on_instance = was_on_instance  # type: ignore[attr-defined]
    report.was_training = module.training  # type: ignore[attr-defined]
    report.was_compiled = module.__dict__.get("_compiled_call_impl")  # type: ignore[attr-defined]
    return report
