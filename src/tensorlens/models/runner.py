"""The only place that runs the user's model: it reads, replaces or stops at states, and leaves the model as it was.

`running` is the context in which the model, or one of its blocks, may be called: by the search for
its parts, by a recording, by generation. `run` is such a call that knows where the parts are. In that context modules
report their calls, and the model has modes and a precision of its own; the caller's are restored afterwards.
"""

from __future__ import annotations

import functools
import gc
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule
from torch.nn.modules import module as module_hooks

from tensorlens.errors import InputError, TensorLensError, check_choice
from tensorlens.memory import is_out_of_memory
from tensorlens.models.layouts import find_state, put_state, replace_state, state_of
from tensorlens.progress import check_cancelled

if TYPE_CHECKING:
    from tensorlens.models.anatomy import Anatomy


AtBlock = Callable[[int, Tensor], Tensor | None]
"""Called with the number of a block and a state in the model's own layout; may return another state."""

AtCall = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Called with the number of a block, the block and its arguments."""

AtModule = Callable[[Any], Any]
"""Called with the first argument or the result of a module; may return a replacement."""

End = Literal["output", "readout", "end", "last block"]
"""Where to stop: at the model's output, the input of its unembedding (or its logits), $X^N$, or the last block."""


class Reached(BaseException):
    """Ends a pass early. Not an `Exception`, so no model catches it."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


@contextmanager
def running(
    model: nn.Module,
    *,
    grad: bool = False,
    observer: Observer | None = None,
    modules: Sequence[nn.Module] = (),
    methods_of: Sequence[nn.Module] = (),
    tree: Mapping[str, nn.Module] | None = None,
) -> Iterator[None]:
    """A context in which the model can be called: for inference, in its own precision, without compiled code.

    Afterwards its modes and data, and the caller's modes, are restored.

    Args:
        model: The user's model, or a part of it.
        grad: Whether gradients are followed.
        observer: Called at module calls; may change their arguments and results.
        modules: The modules at whose calls it is called; all of them if there are none.
        methods_of: Modules whose methods count as calls too; see `observing`.
        tree: The model's modules, if they are known already.
    """
    every = list((tree or module_tree(model)).values())
    seen: AbstractContextManager[None] = nullcontext()
    if observer is not None:
        seen = observing(observer, modules or every, methods_of)
    with (
        turn,
        garbage_kept(),
        in_own_precision(),
        torch.set_grad_enabled(grad),
        evaluating(every),
        eagerly(),
        seen,
    ):
        yield


def run(
    anatomy: Anatomy,
    inputs: Mapping[str, Any],
    *,
    to: End = "output",
    n_blocks: int | None = None,
    entering: AtBlock | None = None,
    leaving: AtBlock | None = None,
    called: AtCall | None = None,
    taken: Mapping[nn.Module, AtModule] | None = None,
    given: Mapping[nn.Module, AtModule] | None = None,
    ending: Callable[[Tensor], None] | None = None,
    grad: bool = False,
    within: AbstractContextManager[Any] | None = None,
) -> Any:
    """Run the model once.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments of its forward.
        to: Where to stop.
        n_blocks: How many blocks run, counted by call; as many as there are modules if None.
        entering: Called with the state that enters each block.
        leaving: Called with the state that leaves each block.
        called: Called with all arguments of each block.
        taken: For some modules, called with their first argument.
        given: For some modules, called with their output.
        ending: Called with $X^N$, in the model's own layout.
        grad: Whether gradients are followed.
        within: A context for the model's own code alone.

    Returns:
        The model's output, or the state at which it was stopped, in the model's own layout.
    """
    n_blocks = n_blocks or (len(anatomy.channels) - 1 if anatomy.channels else len(anatomy.blocks))
    route = _Route(anatomy, to, n_blocks, entering, leaving, called, taken or {}, given or {}, ending)
    methods_of = anatomy.blocks if anatomy.by_methods else ()
    with running(anatomy.model, grad=grad, observer=route.at, modules=route.modules, methods_of=methods_of):
        try:
            with within or nullcontext():
                output = anatomy.model(**inputs)
        except Reached as reached:
            return reached.state
    if to != "output" and route.n_entered < n_blocks:
        raise InputError(
            f"`{type(anatomy.model).__name__}` ran only {route.n_entered} of the {n_blocks} blocks that it ran when "
            "recorded. Expected the same path for the same input; switch off randomness, and any state kept between "
            "calls outside its modules."
        )
    if ending is not None and anatomy.body_end == "" and anatomy.unembedding is None:
        ending(state_of(output))
    return output if to == "output" else state_of(output)


@dataclass
class _Route:
    """The actions of a plain pass at each module; see `run` for the fields."""

    anatomy: Anatomy
    to: End
    n_blocks: int
    entering: AtBlock | None
    leaving: AtBlock | None
    called: AtCall | None
    taken: Mapping[nn.Module, AtModule]
    given: Mapping[nn.Module, AtModule]
    ending: Callable[[Tensor], None] | None
    n_entered: int = 0
    is_inside: bool = False

    def __post_init__(self) -> None:
        self._blocks = {id(block) for block in self.anatomy.blocks}
        end = self.anatomy.body_end
        self._end = self.anatomy.model.get_submodule(end) if end else None
        some = (*self.anatomy.blocks, self.anatomy.unembedding, self._end, *self.taken, *self.given)
        self.modules = [*{id(module): module for module in some if module is not None}.values()]

    def at(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module in self.taken:
            args, kwargs = _with_first(self.taken[module], args, kwargs)
        if id(module) in self._blocks and not self.is_inside and self.n_entered < self.n_blocks:
            output = self._block(module, call, args, kwargs)
        else:
            if module is self.anatomy.unembedding and self.n_entered and not self.is_inside:
                self._read(find_state(args, kwargs))
            output = call(module, *args, **kwargs)
        if module in self.given:
            output = _or(self.given[module](output), output)
        if module is self._end and self.n_entered == self.n_blocks and not self.is_inside:
            self._at_end(state_of(output))
        return output

    def _block(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_cancelled()
        n, self.n_entered, anatomy = self.n_entered, self.n_entered + 1, self.anatomy
        if self.called is not None:
            self.called(n, module, args, kwargs)
        if self.entering is not None:
            state = find_state(args, kwargs, place=anatomy.entry_place)
            new = self.entering(n, state)
            if new is not None:
                args, kwargs = put_state(args, kwargs, new, anatomy.entry_place)
        self.is_inside = True
        try:
            output = call(module, *args, **kwargs)
        finally:
            self.is_inside = False
        state = state_of(output, anatomy.state_place)
        new = None if self.leaving is None else self.leaving(n, state)
        if new is not None:
            output, state = replace_state(output, state, new), new
        is_last = n == self.n_blocks - 1
        if is_last and anatomy.body_end is None:
            self._at_end(state)
        if is_last and self.to == "last block":
            raise Reached(state)
        return output

    def _read(self, state: Tensor) -> None:
        if self.anatomy.body_end == "":
            self._at_end(state)
        if self.to == "readout":
            raise Reached(state)

    def _at_end(self, state: Tensor) -> None:
        if self.ending is not None:
            self.ending(state)
        if self.to == "end":
            raise Reached(state)


def _with_first(change: AtModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments of a module with the first one changed; if all are named, the first tensor among them."""
    if args:
        return (_or(change(args[0]), args[0]), *args[1:]), kwargs
    name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    if name is None:
        raise InputError(
            f"Expected a tensor among the arguments of a module whose input is to be changed; it was called with "
            f"{', '.join(kwargs) or 'nothing'}. Choose a different component."
        )
    return args, kwargs | {name: _or(change(kwargs[name]), kwargs[name])}


def _or(new: Any, old: Any) -> Any:
    return old if new is None else new


# What the model itself cannot do --------------------------------------------------------------------------------------


@contextmanager
def own_errors(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """An `InputError` for an error of the model itself in a plain pass, with the arguments it was called with."""
    try:
        yield
    except (TensorLensError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        given = ", ".join(f"`{name}` {_described(value)}" for name, value in arguments.items())
        raise InputError(
            f"`{type(model).__name__}` itself cannot run on this input: {type(error).__name__}: {error}. It was called "
            f"with {given or 'nothing'}; pass what its forward takes (token ids are whole numbers)."
        ) from error


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"({type(value).__name__})"
    return f"({str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)})"


def refuse_traced(model: nn.Module) -> None:
    """Refuse a model that torch has traced: it runs as one graph, in which no module is called."""
    called = [n.target for n in model.graph.nodes if n.op == "call_module"] if isinstance(model, GraphModule) else []
    has_weights = any(list(model.get_submodule(str(path)).parameters()) for path in called)
    is_flat = isinstance(model, GraphModule) and not has_weights  # an exported model still calls its guards
    if is_flat or isinstance(model, ScriptModule):
        how = "exported or traced by `torch.fx`" if is_flat else "scripted or traced by `torch.jit`"
        raise InputError(
            f"`{type(model).__name__}` was {how}, so it runs as one graph in which no block is called as a "
            f"module. Expected a model whose blocks are modules; pass the original one."
        )


def refuse_without_values(model: nn.Module) -> None:
    """Refuse a model on the meta device, which has no values; weights that a hook loads on demand are accepted."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            raise InputError(
                f"`{name}` of `{type(model).__name__}` is on the meta device, where tensors have no values. Expected a "
                "model with its weights; load them first, or use `to_empty` and fill them in."
            )


# Calls of modules -----------------------------------------------------------------------------------------------------
#
# `nn.Module.__call__` runs `_compiled_call_impl` of a module, where it has one. So a module reports its calls by having
# one while it is observed; calls of other threads are not affected. The class is not patched, which would make
# Python forget what it knows of every class of modules.

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
    """The modules of a model by path, as in `named_modules`, each once; faster, because every pass needs them."""
    found, met, waiting = dict[str, nn.Module](), set[int](), [(path, model)]
    while waiting:
        path, module = waiting.pop()
        key = id(module)
        if key in met:
            continue
        met.add(key)
        found[path] = module
        for name, child in reversed(module._modules.items()) if module._modules else ():
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


# Modes of the model ---------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context without dropout; afterwards each module has its previous mode and data.

    A model may write into its buffers, and the next pass must find what this one found.
    """
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
            if isinstance(module, ScriptModule):
                continue  # its data are not in Python
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
            if list(now) == list(before) and all(map(operator.is_, now.values(), before.values())):
                now = {}  # the usual case: nothing was replaced
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


# Modes of the caller --------------------------------------------------------------------------------------------------


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


# Products of matrices -------------------------------------------------------------------------------------------------

Precision = Literal["float32", "tf32", "bfloat16"]
"""Precisions of products: ``"tf32"`` keeps float32 storage, and is plain float32 on a device without tf32."""


def compute_type(precision: str | None, dtype: torch.dtype) -> torch.dtype:
    """Type of the matrices: the requested one, otherwise the model's own, in float32 or better."""
    if precision is None:
        return torch.float32 if dtype.itemsize < 4 else dtype
    check_choice(precision, "precision", get_args(Precision))
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def matmul_mode(precision: str | None) -> AbstractContextManager[None]:
    """A context in which products of float32 matrices use tf32, or strictly not; for None, the user's setting."""
    return nullcontext() if precision is None else tf32(precision == "tf32")


turn = threading.RLock()
"""Threads take turns with what belongs to the process or to a model: a setting of torch, modes, forwards of modules."""


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Products of float32 matrices in tf32 where the device has it, or strictly not."""
    # By torch's newer setting alone: reading the older one fails where a user has used the newer.
    settings = torch.backends.cuda.matmul
    with turn:
        before = str(settings.fp32_precision)
        settings.fp32_precision = "tf32" if allowed else "ieee"
        try:
            yield
        finally:
            settings.fp32_precision = before


def tf32_allowed() -> bool:
    """Whether products of float32 matrices may be in tf32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def matmul_precision() -> str:
    """Torch's setting for products of float32 matrices; the newer one if a user has used that."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)
