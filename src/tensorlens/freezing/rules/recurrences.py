"""Functions that a module's code calls by name: recurrences with roles of their own, and custom autograd functions.

Such a call does not go through torch or through a module, so nothing reports it. Instead the forward runs as the same
code over a copy of its names, in which the functions below are replaced; the function, its module and other threads
are untouched. In a recurrence, what gates is held and what is carried stays linear:

- selective scan (Mamba, Jamba, Falcon-Mamba, Zamba): the step Δ, B, C and the gate z are held; carried is u.
- chunked scan (Mamba-2, Bamba, Falcon-H1, Granite hybrid, Nemotron-H, Zamba2): Δ, B, C are held; carried is x.
- gated delta rule (Qwen3-Next and kin, OLMo hybrid) and Kimi delta attention: query, key, decay and β are held;
  carried are the values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules.linear import held
from tensorlens.freezing.traced import Interpreter, constant, is_live, traced_in

KERNELS: dict[str, tuple[str, ...]] = {}
"""Names of the arguments that are held, by the name of the function."""


def kernel(*function_names: str, hold: str) -> None:
    """Say that functions of these names hold some of their arguments and are linear in the others.

    Args:
        function_names: As the model's code calls them.
        hold: Names of the arguments that gate, separated by spaces.
    """
    KERNELS.update(dict.fromkeys(function_names, tuple(hold.split())))
    _calls.cache_clear()


def with_kernels(run: Interpreter, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, with the kernels it calls by name replaced."""
    if not isinstance(forward, MethodType):
        return forward
    function, names = _calls(forward.__func__)
    if not names:
        return forward
    replaced = {name: _replacement(run, name, function.__globals__[name]) for name in names}
    copy = FunctionType(
        function.__code__, {**function.__globals__, **replaced}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, forward.__self__)


@lru_cache(maxsize=4096)
def _calls(function: Any) -> tuple[Any, tuple[str, ...]]:
    """The function below its decorators, and the names in its code that stand for kernels."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return function, ()
    known = [name for name in function.__code__.co_names if name in function.__globals__]
    return function, tuple(name for name in known if name in KERNELS or _is_custom(function.__globals__[name]))


def _is_custom(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _replacement(run: Interpreter, name: str, value: Any) -> Any:
    return _Unrolled(value) if _is_custom(value) else _holding(run, name, value)


def _holding(run: Interpreter, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def run_kernel(*args: Any, **kwargs: Any) -> Any:
        if run.rules.gate in ("half", "taylor"):
            return function(*args, **kwargs)  # its products by their own rules
        bound = signature.bind(*args, **kwargs)
        for key, value in bound.arguments.items():
            if key in KERNELS[name] and is_live(value):
                bound.arguments[key] = _held(run, f"{name}.{key}", value)
        run.note_rule(f"recurrence: {name}, {' '.join(KERNELS[name])} held")
        result = function(*bound.args, **bound.kwargs)
        for carried in traced_in(result):
            carried.role = None  # no longer fresh out of the activation before the recurrence
        return result

    return run_kernel


def _held(run: Interpreter, operation: str, value: Tensor) -> Tensor:
    return held(run, operation, lambda: constant(value))


class _Unrolled:
    """A custom autograd function whose forward runs as ordinary code: no rule has seen its backward."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function

    def apply(self, *args: Any) -> Any:
        """The forward, with a context that keeps nothing."""
        result = self.function.forward(_NoContext(), *args)
        if any(is_live(value) for value in args) and not traced_in(result):
            raise NotLinearError(
                f"The custom autograd function `{self.function.__name__}` hides what it does to its input, so that no "
                "rule can hold its factors. Switch to the model's plain implementation, or register an adapter for the "
                "module's class with `tensorlens.adapter`."
            )
        return result


class _NoContext:
    """What a forward may tell its backward, which will not come."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep nothing."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Nothing to mark."""

    def set_materialize_grads(self, value: bool) -> None:
        """No gradients to materialise."""


# The table ------------------------------------------------------------------------------------------------------------

kernel("mamba_selective_scan", "selective_scan_fn", "mamba_inner_fn", hold="delta A B C D z gate dt delta_bias")
kernel("mamba2_chunk_scan", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined",
       "mamba2_split_conv1d_scan_combined", hold="dt A B C D z dt_bias")  # fmt: skip
kernel(
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention",
    hold="query key q k g beta A_log dt_bias",
)  # fmt: skip
