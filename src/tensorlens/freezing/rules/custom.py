"""Custom autograd functions: their forward runs as ordinary code, since no rule has seen their backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.freezing.traced import Interpreter, is_live, traced_in


def unrolled(run: Interpreter, function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    """The forward of a custom function, torch function by torch function, with a context that keeps nothing.

    Raises:
        NotLinearError: the forward hides what it does, by a kernel of its own.
    """
    run.note_rule(f"custom function: {function.__name__}")
    has_context = function.setup_context is torch.autograd.Function.setup_context
    result = function.forward(*((_NoContext(len(args)), *args) if has_context else args))
    if any(is_live(value) for value in args) and not traced_in(result):
        raise NotLinearError(
            f"The custom autograd function `{function.__name__}` hides what it does to its input, so that no rule can "
            "hold its factors. Switch to the model's plain implementation, or register an adapter for the module's "
            "class with `tensorlens.adapter`."
        )
    return result


class _NoContext:
    """Stub context; backward is never called."""

    def __init__(self, n_inputs: int) -> None:
        self.needs_input_grad = (False,) * n_inputs

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep nothing."""

    def save_for_forward(self, *tensors: Tensor) -> None:
        """Keep nothing."""

    def mark_shared_storage(self, *pairs: Any) -> None:
        """Nothing to mark."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Nothing to mark."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Nothing to mark."""

    def set_materialize_grads(self, value: bool) -> None:
        """No gradients to materialise."""
