"""The thread-local, reversible interception of a model's modules.

While an interpreter is active in a thread, the forwards of the model's modules report to it. They are wrapped on the
instances (never on classes), once for all threads that need them, and unwrapped when the last one leaves; a thread
without an interpreter goes straight through. For as long as it lasts the model's buffers are copies, so that a model
which writes into them (a cache of keys and values) or counts its calls leaves no trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from torch.nn.modules import module as global_hooks

from tensorlens.errors import NotLinearError
from tensorlens.freezing.interpreter import Interpreter
from tensorlens.freezing.rules.custom import unrolled
from tensorlens.freezing.traced import active, finish, set_active, traced_in
from tensorlens.models.fingerprint import Fingerprint, fingerprint
from tensorlens.models.module_tree import walk
from tensorlens.models.plain_pass import (
    Containers,
    callers_defaults,
    containers_of,
    copy_once,
    empty_again,
    is_data,
    own_attributes,
    put_back,
)
from tensorlens.models.plain_pass import in_own_precision as own_precision

ABSENT = object()

NO_RECOMPUTING = (
    "The model packs the tensors that its graph saves, and recomputes or moves them later, where no rule applies. "
    "Switch that off at inference."
)


@dataclass
class _Wrapping:
    """One module's own state while it reports, and which passes need it to."""

    found: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor | None] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    users: set[object] = field(default_factory=set)
    copies: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    containers: Containers = field(default_factory=list)


_lock = threading.RLock()
_wrapped: WeakKeyDictionary[nn.Module, _Wrapping] = WeakKeyDictionary()
_found: WeakKeyDictionary[nn.Module, Fingerprint | None] = WeakKeyDictionary()
"""What a model was before it was wrapped: seen from another thread, a wrapped one would look changed."""


@contextmanager
def running(run: Interpreter, model: nn.Module, found: Fingerprint | None = None) -> Iterator[None]:
    """Let the modules of `model` report to `run` in this thread, and leave them as they were found.

    Args:
        run: The pass.
        model: What runs.
        found: The model's fingerprint, where it was just taken.
    """
    before, user = active(), object()
    try:
        try:
            _wrap(model, run.modules, user, found)
            set_active(run)
            with ExitStack() as stack:
                # Leaving inference mode switches gradients on, and every function would switch them off again.
                stack.enter_context(own_precision())
                stack.enter_context(callers_defaults())
                stack.enter_context(torch.set_grad_enabled(run.grad))
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                _REPORTING_FUNCTIONS.begin(user)
                stack.enter_context(_no_fused_layers())
                if run.grad:  # recomputing happens after the pass, where no rule applies
                    stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(NO_RECOMPUTING))
                if run.audit is not None:
                    stack.enter_context(run.audit)
                yield
        finally:
            if run.recording:
                run.written = _written([module for module in run.modules if module in _wrapped])
            finish(run)
            set_active(before)
            _REPORTING_FUNCTIONS.end(user)
            _unwrap(run.modules, user)
    finally:  # once more: an interrupt may have cut the first time short, and undoing twice does no harm
        set_active(before)
        _REPORTING_FUNCTIONS.end(user)
        _unwrap(run.modules, user)
        if run.refused is not None:
            raise run.refused


def current_fingerprint(model: nn.Module, ignored: frozenset[tuple[int, str]] = frozenset()) -> Fingerprint | None:
    """The model's fingerprint, as it was before wrapping where another thread has it wrapped.

    None where another thread has only a part of it wrapped, so that it cannot be told.
    """
    quiet = None if ignored else _quiet.get()
    if quiet is not None and quiet.is_known and quiet.model is model:
        return quiet.fingerprint
    with _lock:
        if model in _found:
            return _found[model]
        if _wrapped and any(part in _wrapped for part in walk(model)):
            return None
        found = fingerprint(model, ignored)
    if quiet is not None and quiet.model is model:
        quiet.is_known, quiet.fingerprint = found is not None and found == quiet.fingerprint, found
    return found


@dataclass
class _Quiet:
    """A model that only this thread's passes touch for a while, and its fingerprint once a pass has left it alone."""

    model: nn.Module
    fingerprint: Fingerprint | None = None
    is_known: bool = False


_quiet: ContextVar[_Quiet | None] = ContextVar("_quiet", default=None)


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """While no code of the user's runs but the model's own: two fingerprints alike in a row are those to come."""
    token = _quiet.set(_Quiet(model))
    try:
        yield
    finally:
        _quiet.reset(token)


@contextmanager
def _no_fused_layers() -> Iterator[None]:
    """Torch's own Transformer layers in single steps: their fused form is a kernel that no rule sees into."""
    was_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fused)


class _ReportingFunctions:
    """While any pass runs, custom autograd functions, checkpointing and inference mode report to it as modules do.

    They go past torch's Python functions: the first brings a derivative of its own, the second runs code again when no
    rule applies, the third, inside a model's forward, would leave no graph. Hooks on a module's gradients, which may
    change them, are no part of what it computes. `flex_attention` refuses gradients on a CPU. All are replaced on
    torch itself, once for all threads; one without an interpreter goes straight through, and the last pass to leave
    puts the originals back.
    """

    def __init__(self) -> None:
        self._users: set[object] = set()

    def begin(self, user: object) -> None:
        """One more pass is running."""
        with _lock:
            self._users.add(user)
            if len(self._users) == 1:
                torch.autograd.Function.apply = classmethod(_apply_custom)  # type: ignore[method-assign,assignment]
                setattr(torch.utils.checkpoint, _CHECKPOINT, _straight)
                torch.inference_mode.__enter__ = _enter_inference_mode  # type: ignore[method-assign]
                torch.inference_mode.__exit__ = _exit_inference_mode  # type: ignore[method-assign]
                setattr(flex_attention, _DEVICES, _check_devices)
                nn.Module._get_backward_hooks = _backward_hooks  # type: ignore[method-assign]
                nn.Module._get_backward_pre_hooks = _backward_pre_hooks  # type: ignore[method-assign]

    def end(self, user: object) -> None:
        """One less; twice for the same pass does no harm."""
        with _lock:
            if user in self._users and len(self._users) == 1:
                torch.autograd.Function.apply = _APPLY  # type: ignore[method-assign]
                setattr(torch.utils.checkpoint, _CHECKPOINT, _RECOMPUTING)
                torch.inference_mode.__enter__ = _ENTER  # type: ignore[method-assign]
                torch.inference_mode.__exit__ = _EXIT  # type: ignore[method-assign]
                setattr(flex_attention, _DEVICES, _DEVICES_CHECK)
                nn.Module._get_backward_hooks = _HOOKS  # type: ignore[method-assign]
                nn.Module._get_backward_pre_hooks = _PRE_HOOKS  # type: ignore[method-assign]
            self._users.discard(user)


_APPLY = vars(torch.autograd.Function)["apply"]
_CHECKPOINT = "_checkpoint_without_reentrant_generator"
"""What `torch.utils.checkpoint.checkpoint` asks to recompute; its older form is a custom autograd function."""
_RECOMPUTING = getattr(torch.utils.checkpoint, _CHECKPOINT, None)
_DEVICES = "_validate_device"
"""What refuses gradients through `flex_attention` on some devices; by its rule they go another way."""
_DEVICES_CHECK = getattr(flex_attention, _DEVICES, None)
_ENTER, _EXIT = torch.inference_mode.__enter__, torch.inference_mode.__exit__
_GLOBAL_HOOKS = (global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks)
_HOOKS, _PRE_HOOKS = nn.Module._get_backward_hooks, nn.Module._get_backward_pre_hooks
_REPORTING_FUNCTIONS = _ReportingFunctions()


def _backward_hooks(module: nn.Module) -> Any:
    return _HOOKS(module) if active() is None else ([], [])


def _backward_pre_hooks(module: nn.Module) -> Any:
    return _PRE_HOOKS(module) if active() is None else []


def _check_devices(*tensors: Tensor) -> None:
    if active() is None and _DEVICES_CHECK is not None:
        _DEVICES_CHECK(*tensors)


def _enter_inference_mode(mode: Any) -> None:
    mode.is_passed_over = mode.mode and active() is not None
    if not mode.is_passed_over:
        _ENTER(mode)


def _exit_inference_mode(mode: Any, *error: Any) -> None:
    if not getattr(mode, "is_passed_over", False):
        _EXIT(mode, *error)


def _apply_custom(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    run = active()
    # What is given modules, or a function to run again, may be where the first block begins and something becomes live.
    is_checkpoint = cls is torch.utils.checkpoint.CheckpointFunction
    if run is None or not (is_checkpoint or traced_in(args) or _holds_modules(args)):
        return _APPLY.__get__(None, cls)(*args, **kwargs)  # in torch 2.15 it is a method of C, without `__func__`
    try:
        return unrolled(run, cls, args)
    except NotLinearError as error:
        if run.audit is None or run.audit.leak is None:
            raise
        raise NotLinearError(f"The custom autograd function `{cls.__name__}` hides a step: {error}") from error


def _holds_modules(values: Any) -> bool:
    """Whether a function is given modules to run, among which a block may be where something live enters."""
    if isinstance(values, (tuple, list)):
        return any(map(_holds_modules, values))
    return isinstance(values, nn.Module)


def _straight(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Between its two steps `checkpoint` runs the function; under a pass nothing else is to happen."""
    if active() is None and _RECOMPUTING is not None:
        yield from _RECOMPUTING(*args, **kwargs)
    else:
        yield


def _wrap(model: nn.Module, modules: list[nn.Module], user: object, found: Fingerprint | None) -> None:
    with _lock:
        if not any(module in _wrapped for module in modules):
            _found[model] = found or fingerprint(model)
        copies: dict[int, Tensor] = {}  # a buffer that two modules share stays shared
        for module in modules:
            wrapping = _wrapped.get(module)
            if wrapping is None:
                wrapping = _wrapped[module] = _Wrapping(users={user})
                _start_reporting(module, wrapping, copies)
            wrapping.users.add(user)


def _start_reporting(module: nn.Module, wrapping: _Wrapping, copies: dict[int, Tensor]) -> None:
    # Into the instance's own dictionary: `nn.Module.__setattr__` is slow, and the class stays untouched.
    own, name = module.__dict__, _method(module)
    replaced = {
        name: _reporting(module, getattr(module, name)),
        "training": False,  # T describes the model at inference
        "_compiled_call_impl": None,  # and its code, not what a compiler made of it
    }
    if _has_hooks(module):
        replaced["_call_impl"] = _reporting(module, module._call_impl, with_hooks=True)
    wrapping.before = own_attributes(module)
    data = [key for key, value in wrapping.before.items() if is_data(value)]
    replaced |= {key: copy_once(own[key], copies) for key in data}
    wrapping.containers = containers_of(wrapping.before)
    wrapping.found = {key: own.get(key, ABSENT) for key in replaced}
    buffers = {key: value for key, value in module._buffers.items() if is_data(value)}
    wrapping.buffers |= buffers
    own.update(replaced)
    for key, buffer in buffers.items():
        module._buffers[key] = copy_once(buffer, copies)
    copied: dict[str, Any] = {key: own[key] for key in data} | {key: module._buffers[key] for key in wrapping.buffers}
    wrapping.copies |= {key: (value, value._version) for key, value in copied.items()}


def _written(modules: list[nn.Module]) -> frozenset[tuple[int, str]]:
    """Data that the pass wrote to or replaced: so will the user's own passes, and it is no change of the model."""
    with _lock:
        return frozenset((id(module), key) for module in modules for key in _written_of(module, _wrapped[module]))


def _written_of(module: nn.Module, wrapping: _Wrapping) -> Iterator[str]:
    for key, (copy, version) in wrapping.copies.items():
        if module._buffers.get(key, module.__dict__.get(key)) is not copy or copy._version != version:
            yield key
    for key, value in wrapping.before.items():  # a weight that a hook makes anew each time: pruned, or of a norm
        if isinstance(value, Tensor) and key not in wrapping.copies and module.__dict__.get(key) is not value:
            yield key


def _unwrap(modules: list[nn.Module], user: object) -> None:
    with _lock:
        for module in modules:
            wrapping = _wrapped.get(module)
            if wrapping is None or user not in wrapping.users:
                continue
            if len(wrapping.users) == 1:
                _stop_reporting(module, wrapping)
                del _wrapped[module]
            wrapping.users.discard(user)
        for model in [model for model in _found if model not in _wrapped]:
            del _found[model]


def _stop_reporting(module: nn.Module, wrapping: _Wrapping) -> None:
    for key, value in wrapping.found.items():
        if value is ABSENT:
            module.__dict__.pop(key, None)
        else:
            module.__dict__[key] = value
    if wrapping.found:  # which is empty if an interrupt came before anything was replaced
        put_back(module, wrapping.before)
        empty_again(wrapping.containers)
    module._buffers.update(wrapping.buffers)


def _method(module: nn.Module) -> str:
    """The method to wrap: below accelerate's hook, which brings the weights before it calls what it found."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, *_GLOBAL_HOOKS))


def _reporting(module: nn.Module, forward: Callable[..., Any], *, with_hooks: bool = False) -> Callable[..., Any]:
    """The forward of a module, or all of its call with the hooks that belong to it: what they change is its output."""

    def report(*args: Any, **kwargs: Any) -> Any:
        run = active()
        if run is None or id(module) not in run.names:
            return forward(*args, **kwargs)
        return run.call_module(module, forward, args, kwargs, with_hooks=with_hooks)

    report.__wrapped__ = forward  # type: ignore[attr-defined]  # for code that asks for its signature; `functools.wraps` copies more, and is slow
    return report
