"""The modes a model runs in, such as inference and its own precision; the caller's modes are restored afterwards."""

from __future__ import annotations

import functools
import gc
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from tensorlens.models.module_calls import module_tree

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

ACCELERATORS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that a caller may have switched to autocast."""

LARGE = 10_000
"""Containers larger than this hold data and are not treated as state of a pass."""

_left: ContextVar[tuple[str, ...]] = ContextVar("left", default=())
_callers_device: ContextVar[torch.device | None] = ContextVar("callers_device", default=None)
_OF_TORCH = frozenset(vars(nn.Module()))
_UNTOUCHED = frozenset([int, float, bool, str, type(None), torch.dtype, FunctionType])
"""Types of values that no pass changes in place."""


# The model ------------------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context without dropout; afterwards each module has its previous mode and data.

    A model may write into its buffers, and the next pass must find what this one found.
    """
    modules = module_tree(model).values()
    training = [module for module in modules if module.training]
    kept = _Kept(modules)
    try:
        for module in training:
            module.training = False
        with _callers_device.get() or nullcontext():  # a model's own forward may count on it
            yield
    finally:
        with torch.no_grad():
            kept.put_back()
        for module in training:
            module.training = True


class _Kept:
    """The data of modules before a pass. Every pass begins and ends with this walk, so it is flat."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._owned: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._copies: list[tuple[Tensor, int, Tensor]] = []
        self._containers: list[tuple[Any, Any]] = []
        for module in modules:
            own, buffers = module.__dict__.copy(), module._buffers.copy()  # in one go: another thread may set some
            self._owned.append((module, own, buffers))
            values: list[Any] = [*map(own.__getitem__, own.keys() - _OF_TORCH), *buffers.values()]
            for value in values:
                kind = type(value)  # not `isinstance`, which would run Python code of a config for its `__class__`
                if kind in _UNTOUCHED:
                    continue
                if issubclass(kind, Tensor):
                    if value.is_leaf and not (issubclass(kind, nn.Parameter) or value.is_meta or value.is_inference()):
                        self._copies.append((value, value._version, value.clone()))
                elif issubclass(kind, (list, dict, set)) and len(value) <= LARGE:
                    copied = value.copy() if kind in (list, dict, set) else copy(value)
                    self._containers.append((value, copied))

    def put_back(self) -> None:
        """Undo what the pass wrote or replaced: numbers that count calls, and tensors left for the next one."""
        for module, before, buffers in self._owned:
            now = module.__dict__
            for name in now.copy().keys() - _OF_TORCH:
                value = now[name]
                if value is before.get(name) or not (isinstance(value, Tensor) or type(value) in (int, float)):
                    continue
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
        for value, held in self._containers:
            is_same = len(value) == len(held) and all(map(operator.is_, value, held))
            if isinstance(value, dict) and is_same:
                is_same = all(map(operator.is_, value.values(), held.values()))
            if not is_same:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(held)
        for value, version, copied in self._copies:
            if value._version != version:
                value.copy_(copied)


@contextmanager
def eagerly() -> Iterator[None]:
    """A context in which compiled parts run as plain code, and fused Transformer layers as their modules."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Pause garbage collection.

    A pass makes many small objects that stay, so Python would search the whole process again and again, for
    a third of the time of a recording.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# The caller -----------------------------------------------------------------------------------------------------------


@contextmanager
def in_own_precision() -> Iterator[None]:
    """A context without the caller's autocast and inference mode: T is the model's in its own dtype, with gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in ACCELERATORS:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def own_modes(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a public function independent of the caller's autocast, inference mode and default device."""

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _in_own_modes() if _are_others() else nullcontext():
            return function(*args, **kwargs)

    return called


def stepwise(steps: Iterator[Result]) -> Iterator[Result]:
    """The same for a generator: the caller's modes are restored between items."""
    while True:
        with _in_own_modes() if _are_others() else nullcontext():
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step


def modes_left() -> tuple[str, ...]:
    """Modes that were switched off for the work under way and would have changed its numbers."""
    return _left.get()


def _are_others() -> bool:
    """Whether the caller has set any mode."""
    has_default = torch.get_default_device().type != "cpu"
    return has_default or torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, ACCELERATORS))


@contextmanager
def _in_own_modes() -> Iterator[None]:
    default, follows = torch.get_default_device(), not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    with ExitStack() as stack:
        if any(map(torch.is_autocast_enabled, ACCELERATORS)):
            stack.enter_context(_set(_left, ("autocast",)))
        stack.enter_context(in_own_precision())
        stack.enter_context(torch.set_grad_enabled(follows))  # leaving inference mode has switched gradients on
        if default.type != "cpu":
            stack.enter_context(_set(_callers_device, default))
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
