"""The user's model run as it is: states read, replaced or stopped at, arguments and modes its own, all left as it was.

This is the one place that runs the model without recording it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensorlens import cancel
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.evidence import eagerly
from tensorlens.models.layouts import find_state, put_state, replace_state, state_of
from tensorlens.models.modes import evaluating, in_own_precision
from tensorlens.models.module_calls import Call, observing

AtBlock = Callable[[int, Tensor], Tensor | None]
"""Is told the number of a block and a state in the model's own layout; may give another state."""

AtModule = Callable[[Any], Any]
"""Is told what a module takes first or gives; may give something else."""

End = Literal["output", "readout", "end", "last block"]
"""What the model returns, what its unembedding reads (or its logits), $X^N$, or what its last block gives."""


class _Reached(BaseException):
    """Ends a pass early. Not an `Exception`, so that no model catches it."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


@contextmanager
def plainly(model: nn.Module, *, grad: bool = False) -> Iterator[None]:
    """The modes of a plain pass: at inference, in the model's own precision, compiled parts as their own code."""
    with ExitStack() as stack:
        stack.enter_context(in_own_precision())
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(evaluating(model))
        stack.enter_context(eagerly())
        yield


def run(
    anatomy: Anatomy,
    inputs: Mapping[str, Any],
    *,
    to: End = "output",
    n_blocks: int | None = None,
    entering: AtBlock | None = None,
    leaving: AtBlock | None = None,
    taken: Mapping[nn.Module, AtModule] | None = None,
    given: Mapping[nn.Module, AtModule] | None = None,
    grad: bool = False,
    within: AbstractContextManager[Any] | None = None,
) -> Any:
    """Run the model once.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments of its forward.
        to: Where to stop.
        n_blocks: How many blocks run, counted by call; as many as there are modules if None.
        entering: Told of the state that enters each block.
        leaving: Told of the state that each block gives.
        taken: For some modules, told of the first thing they take.
        given: For some modules, told of what they give.
        grad: Whether gradients are followed.
        within: A context for the model's own code alone.

    Returns:
        What the model returned, or the state where it was stopped, in the model's own layout.
    """
    route = _Route(anatomy, to, n_blocks, entering, leaving, taken or {}, given or {})
    methods_of = anatomy.blocks if anatomy.by_methods else ()
    with plainly(anatomy.model, grad=grad), observing(route.at, methods_of):
        try:
            with within or nullcontext():
                output = anatomy.model(**inputs)
        except _Reached as reached:
            return reached.state
    return output if to == "output" else state_of(output)


class _Route:
    """What a plain pass does at the modules it meets."""

    def __init__(
        self,
        anatomy: Anatomy,
        to: End,
        n_blocks: int | None,
        entering: AtBlock | None,
        leaving: AtBlock | None,
        taken: Mapping[nn.Module, AtModule],
        given: Mapping[nn.Module, AtModule],
    ) -> None:
        self.anatomy, self.to, self.entering, self.leaving = anatomy, to, entering, leaving
        self.taken, self.given = taken, given
        self.n_blocks = n_blocks or (len(anatomy.channels) - 1 if anatomy.channels else len(anatomy.blocks))
        self.n_entered, self.is_inside = 0, False
        self._blocks = {id(block) for block in anatomy.blocks}
        end = anatomy.body_end
        self._end = anatomy.model.get_submodule(end) if end else None

    def at(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module in self.taken and args:
            args = (_or(self.taken[module](args[0]), args[0]), *args[1:])
        if id(module) in self._blocks and not self.is_inside and self.n_entered < self.n_blocks:
            output = self._block(module, call, args, kwargs)
        else:
            if module is self.anatomy.unembedding and self.n_entered and not self.is_inside:
                self._read(args[0])
            output = call(module, *args, **kwargs)
        if module in self.given:
            output = _or(self.given[module](output), output)
        if module is self._end and self.to == "end" and self.n_entered == self.n_blocks and not self.is_inside:
            raise _Reached(state_of(output))
        return output

    def _block(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cancel.check()
        n, self.n_entered, anatomy = self.n_entered, self.n_entered + 1, self.anatomy
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
        if is_last and (self.to == "last block" or self.to == "end" and anatomy.body_end is None):
            raise _Reached(state)
        return output

    def _read(self, state: Tensor) -> None:
        if self.to == "readout" or self.to == "end" and self.anatomy.body_end == "":
            raise _Reached(state)


def _or(new: Any, old: Any) -> Any:
    return old if new is None else new
