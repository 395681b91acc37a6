"""One name for all spellings of a torch function, and one spelling of its arguments."""

from __future__ import annotations

from typing import Any

_NAMES: dict[Any, str] = {}
_OPERATORS = dict(
    floordiv="floor_divide",
    truediv="div",
    rtruediv="rdiv",
    itruediv="div_",
    imul="mul_",
    iadd="add_",
    isub="sub_",
    ipow="pow_",
    radd="add",
    rmul="mul",
    invert="bitwise_not",
    iand="bitwise_and_",
    ior="bitwise_or_",
    bool="item",
    int="item",
    float="item",
    complex="item",
    index="item",
)
_ALIASES = dict(
    true_divide="div",
    divide="div",
    multiply="mul",
    subtract="sub",
    clip="clamp",
    absolute="abs",
    concat="cat",
    concatenate="cat",
    negative="neg",
    swapaxes="transpose",
    swapdims="transpose",
    _softmax="softmax",
    _safe_softmax="softmax",
    _log_softmax="log_softmax",
    greater="gt",
    less="lt",
    greater_equal="ge",
    less_equal="le",
    not_equal="ne",
    expit="sigmoid",
    max_pool1d_with_indices="max_pool1d",
    max_pool2d_with_indices="max_pool2d",
    max_pool3d_with_indices="max_pool3d",
    fix="trunc",
    moveaxis="movedim",
    _unsafe_view="view",
    _reshape_alias="view",
    _local_scalar_dense="item",
    constant_pad_nd="pad_constant",
    vector_norm="linalg_vector_norm",
    arctan="atan",
    arcsin="asin",
    arcsinh="asinh",
    arctanh="atanh",
    arccos="acos",
    special_expit="sigmoid",
)


def name_of(function: Any) -> str:
    """One name for all spellings of a torch function; reading an attribute of a tensor is ``get:attribute``."""
    name = _NAMES.get(function)
    if name is None:
        # An overload such as `aten.mul.Tensor` goes by the name of its packet, `mul`.
        name = getattr(getattr(function, "overloadpacket", function), "__name__", type(function).__name__)
        if name in ("__get__", "__set__"):
            name = f"{name[2:5]}:{function.__self__.__name__}"
        elif name.startswith("__") and name.endswith("__"):
            name = _OPERATORS.get(name[2:-2], name[2:-2])
        name = name.removeprefix("special_")
        in_place = name.endswith("_") and not name.startswith("_")
        name = _ALIASES.get(name[:-1], name[:-1]) + "_" if in_place else _ALIASES.get(name, name)
        _NAMES[function] = name
    return name


_NUMPYS_NAMES = {"axis": "dim", "keepdims": "keepdim"}
_NOT_FIRST = ("where", "searchsorted")
"""Functions whose `input` is not their first argument."""


def spelled_alike(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One spelling of arguments: torch also takes numpy's `axis` and `keepdims`, and what it works on as `input=`."""
    kwargs = {_NUMPYS_NAMES.get(key, key): value for key, value in kwargs.items()}
    if not args and name not in _NOT_FIRST:
        for key in ("input", "self"):
            if key in kwargs:
                args = (kwargs.pop(key),)
    return args, kwargs
