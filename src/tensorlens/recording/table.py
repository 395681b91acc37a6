"""The table of rules: one rule per torch function, under one name for all its spellings.

A rule runs the function for its value and appends affine steps of its own; its result is live. Most rules take the
function's own arguments; the rule of a *family* of functions also takes the function itself and its name. A function
without a rule is replaced by its kernels, which go through the same table. A kernel without a rule is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from tensorlens.errors import InputError, words

AnyRule = TypeVar("AnyRule", bound=Callable[..., Any])
TableRule = Callable[[Any, Any, str, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the recording, the function, its name, and its arguments."""
RULES: dict[str, TableRule] = {}
ANY_KERNEL = "any_kernel"
"""The name of the rule that replaces any kernel with its derivative, for rule sets that follow derivatives."""
OF_VALUE: set[TableRule] = set()
"""Rules that take (run, name, value, args, kwargs), where `value` is the function's own result."""

# Names ----------------------------------------------------------------------------------------------------------------


def _spellings(text: str) -> dict[str, str]:
    """From each spelling to its name, given as ``name: spelling spelling, name: …``."""
    rows = [row.split(":") for row in text.split(",")]
    return {spelling: name.strip() for name, spellings in rows for spelling in spellings.split()}


_OPERATORS = _spellings(
    "floor_divide: floordiv, div: truediv, rdiv: rtruediv, div_: itruediv, mul_: imul, add_: iadd, sub_: isub, "
    "pow_: ipow, add: radd, mul: rmul, bitwise_not: invert, bitwise_and_: iand, bitwise_or_: ior, "
    "item: bool int float complex index"
)
_ALIASES = _spellings(
    "div: true_divide divide, mul: multiply, sub: subtract, clamp: clip, abs: absolute, cat: concat concatenate, "
    "neg: negative, transpose: swapaxes swapdims, softmax: _softmax _safe_softmax, log_softmax: _log_softmax, "
    "gt: greater, lt: less, ge: greater_equal, le: less_equal, ne: not_equal, sigmoid: expit, trunc: fix, "
    "max_pool1d: max_pool1d_with_indices, max_pool2d: max_pool2d_with_indices, max_pool3d: max_pool3d_with_indices, "
    "movedim: moveaxis, mm: _sparse_mm, view: _unsafe_view _reshape_alias, item: _local_scalar_dense, "
    "pad_constant: constant_pad_nd, linalg_vector_norm: vector_norm, atan: arctan, asin: arcsin, asinh: arcsinh, "
    "atanh: arctanh, acos: arccos"
)
_NUMPYS_NAMES = {"axis": "dim", "keepdims": "keepdim"}
_NOT_FIRST = ("where", "searchsorted")
"""Functions whose `input` is not their first argument."""


def name_of(function: Any) -> str:
    """One name for all spellings of a torch function; reading an attribute of a tensor is ``get:attribute``."""
    return known(function).name


def _name(function: Any) -> str:
    # An overload such as `aten.mul.Tensor` goes by the name of its packet, `mul`.
    name = getattr(getattr(function, "overloadpacket", function), "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        return f"{name[2:5]}:{function.__self__.__name__}"
    if name.startswith("__") and name.endswith("__"):
        name = _OPERATORS.get(name[2:-2], name[2:-2])
    name = name.removeprefix("special_")
    is_in_place = name.endswith("_") and not name.startswith("_")
    return _ALIASES.get(name[:-1], name[:-1]) + "_" if is_in_place else _ALIASES.get(name, name)


def spelled_alike(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One spelling of arguments: torch also takes numpy's `axis` and `keepdims`, and what it works on as `input=`."""
    kwargs = {_NUMPYS_NAMES.get(key, key): value for key, value in kwargs.items()}
    if not args and name not in _NOT_FIRST:
        for key in ("input", "self"):
            if key in kwargs:
                args = (kwargs.pop(key),)
    return args, kwargs


DESCRIBES = words(
    "shape size dim ndim numel nelement stride storage_offset is_contiguous is_floating_point is_complex is_signed "
    "get_device element_size is_cuda is_same_size has_names len hash zeros_like ones_like empty_like rand_like "
    "randn_like randint_like new_zeros new_ones new_empty new_empty_strided is_pinned result_type can_cast repr "
    "dim_order is_inference is_conj is_neg sym_size sym_stride sym_numel sym_storage_offset is_nonzero_size get:shape "
    "get:dtype get:device get:ndim get:is_cuda get:requires_grad get:layout get:_base get:is_sparse get:is_quantized "
    "get:grad_fn get:is_leaf get:_version get:is_meta get:is_nested get:names get:is_mps get:is_xla get:is_cpu "
    "get:itemsize get:nbytes get:grad get:is_mkldnn get:is_xpu get:is_ipu get:is_maia get:output_nr get:retains_grad "
    "get:is_hpu get:is_sparse_csr get:is_vulkan get:_backward_hooks get:_grad get:_is_view _is_view requires_grad_ "
    "get:volatile is_shared get:name get:is_mtia"
)
"""Sizes, types, and new tensors of the same shape: the result contains none of the values."""


class Function(NamedTuple):
    """How a recording treats a torch function.

    Attributes:
        name: One name for all its spellings.
        describes: Whether the result does not contain any of the values.
        is_kernel: Whether it is a kernel of torch's dispatcher.
    """

    name: str
    describes: bool
    is_kernel: bool


KNOWN: dict[Any, Function] = {}
"""Cache of lookups."""


def known(function: Any) -> Function:
    """The treatment of a function, looked up once."""
    found = KNOWN.get(function)
    if found is None:
        name = _name(function)
        found = Function(name, name in DESCRIBES, isinstance(function, torch._ops.OpOverload))
        KNOWN[function] = found
    return found


# Rules ----------------------------------------------------------------------------------------------------------------


def family(names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a rule for functions that are treated alike: it takes (run, function, name, args, kwargs)."""

    def register(rule: AnyRule) -> AnyRule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def of_value(names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a rule that takes (run, name, value, args, kwargs), where `value` is the function's own result."""

    def register(rule: AnyRule) -> AnyRule:
        OF_VALUE.add(rule)
        return family(names)(rule)

    return register


def rule(names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a rule that takes the function's own arguments."""

    def register(own: AnyRule) -> AnyRule:
        family(names)(lambda run, function, name, args, kwargs: own(*args, **kwargs))
        return own

    return register


def rules_for(names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a rule of your own for torch functions, by their names separated by spaces.

    It takes (run, function, args, kwargs), with `run` the recording, and returns a live tensor, made by torch functions
    of live tensors or by `run.emit`.
    """
    if not isinstance(names, str) or not names.split():
        raise InputError(f"`rules_for` takes names of torch functions, separated by spaces; got {names!r:.60}.")

    def register(own: AnyRule) -> AnyRule:
        family(names)(lambda run, function, name, args, kwargs: own(run, function, args, kwargs))
        return own

    return register


def find_rule(name: str) -> TableRule | None:
    """The rule for a function name; ``mul_`` is a write of the result of the rule for ``mul``."""
    found = RULES.get(name)
    if found is None and name.endswith("_") and name[:-1] in RULES:
        from tensorlens.recording.live import in_place

        return in_place
    return found
