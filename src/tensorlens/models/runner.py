"""The only place that runs the user's model: it reads, replaces or stops at states, and leaves the model as it was.

`running` is the context in which the model, or one of its blocks, may be called: by the search for
its parts, by a recording, by generation. `run` is such a call that knows where the parts are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from tensorlens.errors import InputError, TensorLensError
from tensorlens.memory import is_out_of_memory
from tensorlens.models.layouts import find_state, put_state, replace_state, state_of
from tensorlens.models.modes import eagerly, evaluating, garbage_kept, in_own_precision
from tensorlens.models.module_calls import Call, Observer, module_tree, observing
from tensorlens.models.precision import turn
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
) -> Iterator[None]:
    """A context in which the model can be called: for inference, in its own precision, without compiled code.

    Afterwards its modes and data, and the caller's modes, are restored.

    Args:
        model: The user's model, or a part of it.
        grad: Whether gradients are followed.
        observer: Called at module calls; may change their arguments and results.
        modules: The modules at whose calls it is called; all of them if there are none.
        methods_of: Modules whose methods count as calls too; see `observing`.
    """
    seen: AbstractContextManager[None] = nullcontext()
    if observer is not None:
        seen = observing(observer, modules or list(module_tree(model).values()), methods_of)
    with (
        turn,
        garbage_kept(),
        in_own_precision(),
        torch.set_grad_enabled(grad),
        evaluating(model),
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
