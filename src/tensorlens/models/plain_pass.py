"""The user's model run as it is and left as it was, whatever modes of torch the caller is in."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from typing import Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from tensorlens.models.fingerprint import in_this_thread
from tensorlens.models.module_tree import walk

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
ModuleHooks = Iterable[tuple[nn.Module, Any]]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout; afterwards each module is in the mode it was in, and its data are what they were.

    A model may write into its buffers, and the next pass is to find what this one found.
    """
    training = [module for module in walk(model) if module.training]
    kept = [_Kept(module) for module in walk(model)]
    try:
        try:
            for module in training:
                module.training = False
            with callers_defaults():
                yield
        finally:
            _restore(kept, training)
    finally:  # once more: an interrupt may have cut the first time short, and undoing twice does no harm
        _restore(kept, training)


class _Kept:
    """A module's own data before a pass. The tensors stay where they are: another thread may be at work with them."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.attributes, self.buffers = module, own_attributes(module), dict(module._buffers.items())
        data = [value for value in (*self.attributes.values(), *self.buffers.values()) if is_data(value)]
        own = [value for value in data if not value.is_inference() and not _stands_in(value)]
        self.copies = [(value, value._version, value.clone()) for value in own]
        self.containers = containers_of(self.attributes)

    def put_back(self) -> None:
        """Undo what the pass wrote or replaced."""
        put_back(self.module, self.attributes)
        empty_again(self.containers)
        for name, buffer in self.buffers.items():
            now = self.module._buffers.get(name)
            if now is not buffer and not _stands_in(now) and not _stands_in(buffer):
                self.module._buffers[name] = buffer
        for value, version, copied in self.copies:
            if value._version != version:
                value.copy_(copied)


def _restore(kept: list[_Kept], training: list[nn.Module]) -> None:
    with torch.no_grad():
        for one in kept:
            one.put_back()
    for module in training:
        module.training = True


@contextmanager
def hooked(before: ModuleHooks = (), after: ModuleHooks = ()) -> Iterator[None]:
    """Forward hooks of this thread alone for as long as this lasts; other threads that run the model see nothing.

    Those before take (module, args, kwargs), those after (module, args, output). They are removed by what they are: a
    handle may be lost to an interrupt between the registering and its return.
    """
    pairs = [(module, in_this_thread(hook)) for module, hook in before]
    others = [(module, in_this_thread(hook)) for module, hook in after]
    try:
        try:
            for module, hook in pairs:
                module.register_forward_pre_hook(hook, with_kwargs=True)
            for module, hook in others:
                module.register_forward_hook(hook)
            with torch.compiler.set_stance("force_eager"):  # a compiler would trace the hooks
                yield
        finally:
            _unhook(pairs, others)
    finally:  # once more, as above
        _unhook(pairs, others)


def _unhook(before: list[tuple[nn.Module, Any]], after: list[tuple[nn.Module, Any]]) -> None:
    for module, hook in before:
        for key in [key for key, found in module._forward_pre_hooks.items() if found is hook]:
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_pre_hooks.pop(key, None)
    for module, hook in after:
        for key in [key for key, found in module._forward_hooks.items() if found is hook]:
            module._forward_hooks.pop(key, None)


# The caller's modes ---------------------------------------------------------------------------------------------------

ACCELERATORS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that a caller may have switched to autocast."""

_left: ContextVar[tuple[str, ...]] = ContextVar("left", default=())
_callers_device: ContextVar[torch.device | None] = ContextVar("callers_device", default=None)


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
    """A public function that is the same whatever the caller's autocast, inference mode and default device are.

    A model's own forward has the caller's default device: it may count on it.
    """

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        found = _TorchState()
        try:
            with _in_own_modes():
                return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:  # an interrupt may have cut short what would have put this back
            _close_contexts(error)
            found.put_back()
            raise

    return called


def _close_contexts(error: BaseException | None) -> None:
    """Let contexts that an interrupt met on their way out finish now, not when the error is forgotten."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


_COMPILER = "torch._dynamo.eval_frame"


class _TorchState:
    """What contexts of torch change, whose entering and leaving are ordinary code that an interrupt can cut short."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.n_modes = torch._C._len_torch_dispatch_stack()
        self.stance = getattr(sys.modules.get(_COMPILER), "_stance", None)

    def put_back(self) -> None:
        """As it was found."""
        torch._C._set_grad_enabled(self.grad)
        if self.stance is not None:
            sys.modules[_COMPILER]._set_stance(self.stance)
        while (top := torch._C._len_torch_dispatch_stack()) > self.n_modes:
            try:
                torch._C._get_dispatch_stack_at(top - 1).__exit__(None, None, None)
            except IndexError:  # it had begun to leave
                torch._C._pop_torch_dispatch_stack(None)


def stepwise(steps: Iterator[Result]) -> Iterator[Result]:
    """The same for what is made one by one: between two steps the caller has their own modes."""
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
def callers_defaults() -> Iterator[None]:
    """The default device that the caller has, for the model's own code."""
    with _callers_device.get() or nullcontext():
        yield


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


# What a pass may change ----------------------------------------------------------------------------------------------


def is_data(value: Any) -> TypeGuard[Tensor]:
    """A tensor of a module's own that is no parameter and may be written to."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta and value.is_leaf


def copy_once(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """A copy of a tensor, the same one for all modules that share it."""
    if id(tensor) not in copies:
        with torch.inference_mode(False), torch.no_grad():
            copies[id(tensor)] = tensor.clone()
        copies[id(tensor)].stands_in = True  # type: ignore[attr-defined]
    return copies[id(tensor)]


def _stands_in(value: Any) -> bool:
    """Whether a tensor is the copy that a pass in some thread works with: that pass takes it away again."""
    return getattr(value, "stands_in", False)


Containers = list[tuple[Any, Any]]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's own code has set on it, beside all that every module has."""
    own = module.__dict__.copy()  # at once, since another thread may begin or end a pass meanwhile
    return {name: own[name] for name in own.keys() - _OF_TORCH}


def containers_of(attributes: dict[str, Any]) -> Containers:
    """A module's own lists and dictionaries, each with a copy of what is in it: a pass may add to them."""
    values = attributes.values()
    return [(value, copy(value)) for value in values if isinstance(value, (list, dict, set)) and len(value) <= LARGE]


_OF_TORCH = frozenset(vars(nn.Module()))
LARGE = 10_000
"""Entries of a list or dictionary that is no memory of passes."""


def empty_again(containers: Containers) -> None:
    """Take out what a pass left in lists and dictionaries, and put back what it took."""
    for value, before in containers:
        now, then = ([*one, *one.values()] if isinstance(one, dict) else one for one in (value, before))
        if len(value) == len(before) and all(a is b for a, b in zip(now, then, strict=True)):
            continue
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(before)


def put_back(module: nn.Module, before: dict[str, Any]) -> None:
    """Undo what a pass made of a module's attributes: numbers that count calls, and tensors left for the next.

    Args:
        module: The module.
        before: Its own attributes before the pass.
    """
    own = module.__dict__
    changed = [(key, value) for key, value in own_attributes(module).items() if value is not before.get(key)]
    for key, value in changed:
        is_data_or_count = isinstance(value, Tensor) and not _stands_in(value) or type(value) in (int, float)
        if not is_data_or_count or _stands_in(before.get(key)):
            continue
        if key in before:
            own[key] = before[key]
        else:
            del own[key]
