"""Modes a model is run in: at inference, in its own precision, whatever the caller has set; all left as found."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from operator import is_
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from tensorlens.models.module_calls import module_tree

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

ACCELERATORS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that a caller may have switched to autocast."""

LARGE = 10_000
"""A list or dictionary of more entries than this holds data; passes are not remembered in it."""

_left: ContextVar[tuple[str, ...]] = ContextVar("left", default=())
_callers_device: ContextVar[torch.device | None] = ContextVar("callers_device", default=None)
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = frozenset([int, float, bool, str, type(None)])


# The model ------------------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout; afterwards each module is in the mode it was in, and its data are what they were.

    A model may write into its buffers, and the next pass is to find what this one found.
    """
    modules = list(module_tree(model).values())
    training = [module for module in modules if module.training]
    before = _Data(modules)
    try:
        for module in training:
            module.training = False
        with _callers_device.get() or nullcontext():  # a model's own forward may count on it
            yield
    finally:
        with torch.no_grad():
            before.put_back()
        for module in training:
            module.training = True


class _Data:
    """The data that modules hold beside their weights, as they were before a pass."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # `__dict__.copy` at once: another thread may set attributes meanwhile.
        self.modules = [(module, module.__dict__.copy(), module._buffers.copy()) for module in modules]
        self.copies: list[tuple[Tensor, int, Tensor]] = []
        self.containers: list[tuple[Any, Any]] = []
        for _, attributes, buffers in self.modules:
            for name, value in attributes.items():
                if type(value) in _PLAIN or name in _OF_TORCH:
                    continue
                if isinstance(value, Tensor):
                    self._copy(value)
                elif isinstance(value, (list, dict, set)) and len(value) <= LARGE:
                    self.containers.append((value, copy(value)))
            for buffer in buffers.values():
                self._copy(buffer)

    def _copy(self, value: Any) -> None:
        """Keep the content of a tensor that a pass may write to."""
        is_data = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_leaf
        if is_data and not value.is_meta and not value.is_inference():
            self.copies.append((value, value._version, value.clone()))

    def put_back(self) -> None:
        """Undo what the pass wrote or replaced: numbers that count calls, and tensors left for the next one."""
        for module, attributes, buffers in self.modules:
            own = module.__dict__
            now = own.copy()
            if len(now) == len(attributes) and all(map(is_, now.values(), attributes.values())):
                now = {}
            for name, value in now.items():
                if value is attributes.get(name) or name in _OF_TORCH:
                    continue
                if not isinstance(value, Tensor) and type(value) not in (int, float):
                    continue
                if name in attributes:
                    own[name] = attributes[name]
                else:
                    del own[name]
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
        for value, before in self.containers:
            _empty_again(value, before)
        for value, version, copied in self.copies:
            if value._version != version:
                value.copy_(copied)


def _empty_again(value: Any, before: Any) -> None:
    """Take out what a pass left in a list or dictionary, and put back what it took."""
    is_same = len(value) == len(before) and all(map(is_, value, before))
    if is_same and (not isinstance(value, dict) or all(map(is_, value.values(), before.values()))):
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
