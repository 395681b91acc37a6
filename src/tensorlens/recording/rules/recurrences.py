"""Recurrences: functions that a module's code calls by name and whose arguments have roles of their own.

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

from tensorlens.recording.live import found_in, is_live, value_of

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


def with_kernels(run: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, with the kernels it calls by name replaced."""
    if not isinstance(forward, MethodType):
        return forward
    function, names = _calls(forward.__func__)
    if not names:
        return forward
    replaced = {name: _holding(run, name, function.__globals__[name]) for name in names}
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, forward.__self__)


def calls_kernels(forward: Any) -> bool:
    """Whether a forward calls kernels by name."""
    return bool(_calls(forward)[1])


@lru_cache(maxsize=4096)
def _calls(function: Any) -> tuple[Any, tuple[str, ...]]:
    """The function below its decorators, and the names in its code that stand for kernels."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return function, ()
    return function, tuple(
        name for name in function.__code__.co_names if name in KERNELS and name in function.__globals__
    )


def _holding(run: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def run_kernel(*args: Any, **kwargs: Any) -> Any:
        if run.rules.gate in ("half", "taylor"):
            return function(*args, **kwargs)  # its products by their own rules
        bound = signature.bind(*args, **kwargs)
        for key, value in bound.arguments.items():
            if key in KERNELS[name] and is_live(value):
                bound.arguments[key] = value_of(value)
        run.note(f"recurrence: {name}, {' '.join(KERNELS[name])} held")
        result = function(*bound.args, **bound.kwargs)
        for carried in found_in(result):
            carried.role = None  # no longer fresh out of the activation before the recurrence
        return result

    return run_kernel


# The table ------------------------------------------------------------------------------------------------------------

kernel("mamba_selective_scan", "selective_scan_fn", "mamba_inner_fn", hold="delta A B C D z gate dt delta_bias")
kernel(
    "mamba2_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "mamba2_split_conv1d_scan_combined",
    hold="dt A B C D z dt_bias",
)
kernel(
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    hold="query key q k g beta A_log dt_bias",
)
