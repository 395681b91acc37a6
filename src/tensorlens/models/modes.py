"""Modes a model is run in: at inference, in its own precision, whatever the caller has set; all left as found."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from typing import Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

ACCELERATORS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that a caller may have switched to autocast."""

LARGE = 10_000
"""A list or dictionary of more entries than this holds data; passes are not remembered in it."""

_left: ContextVar[tuple[str, ...]] = ContextVar("left", default=())
_callers_device: ContextVar[torch.device | None] = ContextVar("callers_device", default=None)
_OF_TORCH = frozenset(vars(nn.Module()))


# The model ------------------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout; afterwards each module is in the mode it was in, and its data are what they were.

    A model may write into its buffers, and the next pass is to find what this one found.
    """
    modules = list(model.modules())
    training = [module for module in modules if module.training]
    kept = [_Kept(module) for module in modules]
    try:
        for module in training:
            module.training = False
        with _callers_device.get() or nullcontext():  # a model's own forward may count on it
            yield
    finally:
        with torch.no_grad():
            for one in kept:
                one.put_back()
        for module in training:
            module.training = True


class _Kept:
    """A module's own data before a pass."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.attributes, self.buffers = module, _own_attributes(module), dict(module._buffers)
        data = [value for value in (*self.attributes.values(), *self.buffers.values()) if _may_be_written(value)]
        self.copies = [(value, value._version, value.clone()) for value in data]
        lists = [value for value in self.attributes.values() if isinstance(value, (list, dict, set))]
        self.containers = [(value, copy(value)) for value in lists if len(value) <= LARGE]

    def put_back(self) -> None:
        """Undo what the pass wrote or replaced."""
        self._attributes_back()
        for value, before in self.containers:
            _empty_again(value, before)
        for name, buffer in self.buffers.items():
            if self.module._buffers.get(name) is not buffer:
                self.module._buffers[name] = buffer
        for value, version, copied in self.copies:
            if value._version != version:
                value.copy_(copied)

    def _attributes_back(self) -> None:
        """Undo what a pass made of attributes: numbers that count calls, and tensors left for the next one."""
        own = self.module.__dict__
        for key, value in _own_attributes(self.module).items():
            is_data_or_count = isinstance(value, Tensor) or type(value) in (int, float)
            if value is self.attributes.get(key) or not is_data_or_count:
                continue
            if key in self.attributes:
                own[key] = self.attributes[key]
            else:
                del own[key]


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's own code has set on it, beside all that every module has."""
    own = module.__dict__.copy()  # at once: another thread may set some meanwhile
    return {name: own[name] for name in own.keys() - _OF_TORCH}


def _may_be_written(value: Any) -> TypeGuard[Tensor]:
    is_data = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_leaf
    return is_data and not value.is_meta and not value.is_inference()


def _empty_again(value: Any, before: Any) -> None:
    """Take out what a pass left in a list or dictionary, and put back what it took."""
    now, then = ([*one, *one.values()] if isinstance(one, dict) else one for one in (value, before))
    if len(value) == len(before) and all(a is b for a, b in zip(now, then, strict=True)):
        return
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(before)


@contextmanager
def eagerly() -> Iterator[None]:
    """Compiled parts run as their own code, and fused Transformer layers as their modules."""
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
    """Collect no garbage meanwhile.

    A pass makes many small objects that stay, so that Python would look through the whole process again and again, for
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
    """Away from a caller's autocast and inference mode: T is the model's in its own dtype, with gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in ACCELERATORS:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def own_modes(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A public function that is the same whatever the caller's autocast, inference mode and default device are."""

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _in_own_modes():
            return function(*args, **kwargs)

    return called


def stepwise(steps: Iterator[Result]) -> Iterator[Result]:
    """The same for a generator: between two items the caller's own modes are restored."""
    while True:
        with _in_own_modes():
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step


def modes_left() -> tuple[str, ...]:
    """What was switched off for the work under way and would have changed its numbers."""
    return _left.get()


@contextmanager
def _in_own_modes() -> Iterator[None]:
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(in_own_precision())
            stack.enter_context(torch.no_grad())  # leaving inference mode has switched gradients on
        autocast = [device for device in ACCELERATORS if torch.is_autocast_enabled(device)]
        for device in autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        if autocast:
            stack.enter_context(_set(_left, ("autocast",)))
        default = torch.get_default_device()
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
