"""The table of rules: what each torch function means once the factors are held fixed.

A rule sees the running interpreter, the function and its arguments, and returns a result that is affine in the live
ones. What has no rule raises `NotLinearError`, so that nothing is approximated in silence. Rules are registered by name
because torch spells one function in many ways (`torch.add`, `Tensor.add`, `Tensor.__add__`, `Tensor.add_`), which
`name_of` brings together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tensorlens.freezing.traced import Interpreter

Rule = Callable[[Interpreter, Any, tuple[Any, ...], dict[str, Any]], Any]
AnyRule = TypeVar("AnyRule", bound=Rule)
RULES: dict[str, Rule] = {}

_NAMES: dict[Any, str] = {}
_OPERATORS = dict(
    floordiv="floor_divide",
    truediv="div", rtruediv="rdiv", itruediv="div_", imul="mul_", iadd="add_", isub="sub_", ipow="pow_",
    radd="add", rmul="mul", rsub="sub", invert="bitwise_not", iand="bitwise_and_", ior="bitwise_or_",
    bool="python_value", int="python_value", float="python_value", complex="python_value", index="python_value",
)  # fmt: skip
_ALIASES = dict(
    true_divide="div", divide="div", multiply="mul", subtract="sub", rsub="sub", clip="clamp", absolute="abs",
    concat="cat", concatenate="cat", negative="neg", swapaxes="transpose", _softmax="softmax", greater="gt", less="lt",
    greater_equal="ge", less_equal="le", not_equal="ne", expit="sigmoid", max_pool1d_with_indices="max_pool1d",
    max_pool2d_with_indices="max_pool2d", max_pool3d_with_indices="max_pool3d", inv="linalg_inv", fix="trunc",
)  # fmt: skip


IN_PLACE, ATTRIBUTE = "*_", "get:*"
"""Names under which the rules for writes in place and for reading attributes are registered."""

FOR_HELD: set[Rule] = set()
"""Rules that also apply where nothing live is among the arguments: a write changes what its target is."""


def rules_for(names: str, *, also_held: bool = False) -> Callable[[AnyRule], AnyRule]:
    """Register a rule under the names, separated by spaces, of the torch functions it explains.

    Args:
        names: Such as ``"add sub"``; `name_of` says which spellings they stand for.
        also_held: Whether the rule applies, too, where all traced arguments are held.
    """

    def register(rule: AnyRule) -> AnyRule:
        RULES.update(dict.fromkeys(names.split(), rule))
        if also_held:
            FOR_HELD.add(rule)
        return rule

    return register


def name_of(function: Any) -> str:
    """One name for all spellings of a torch function; reading an attribute of a tensor is ``get:attribute``."""
    name = _NAMES.get(function)
    if name is None:
        # Of an overload, `aten.mul.Tensor`, as exported models spell it, the name of them all.
        name = getattr(getattr(function, "overloadpacket", function), "__name__", type(function).__name__)
        if name in ("__get__", "__set__"):
            name = f"{name[2:5]}:{function.__self__.__name__}"
        elif name.startswith("__") and name.endswith("__"):
            name = _OPERATORS.get(name[2:-2], name[2:-2])
        name = name.removeprefix("special_")
        name = _NAMES[function] = _ALIASES.get(name, name)
    return name


_NUMPYS_NAMES = {"axis": "dim", "keepdims": "keepdim"}
_NOT_FIRST = ("where", "searchsorted")
"""Functions whose `input` is another argument than the first."""


def spelled_alike(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One spelling of arguments: torch also takes numpy's `axis` and `keepdims`, and what it works on as `input=`."""
    kwargs = {_NUMPYS_NAMES.get(key, key): value for key, value in kwargs.items()}
    if not args and "input" in kwargs and name not in _NOT_FIRST:
        args = (kwargs.pop("input"),)
    return args, kwargs


def find_rule(name: str) -> Rule | None:
    """The rule for a function name; an in-place name ``mul_`` is explained by ``mul``."""
    if name in RULES:
        return RULES[name]
    if name.startswith(("get:", "set:")):
        return RULES[ATTRIBUTE]
    return RULES[IN_PLACE] if name.endswith("_") and name[:-1] in RULES else None
