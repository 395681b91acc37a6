"""What each torch function means once the factors are held fixed: the table, and its linear part.

`RULES` maps the name of a torch function to a rule. A rule sees the running pass, the function and its
arguments, and returns a result that is linear in the live ones. What has no rule raises `NotLinearError`, so that
nothing is approximated in silence. The table goes by name because torch spells one function in many ways
(`torch.add`, `Tensor.add`, `Tensor.__add__`, `Tensor.add_`), which `name_of` brings together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensorlens.freezing.traced import Interpreter, Traced, constant, is_live, mark, raw, traced_in, type_of

Rule = Callable[[Interpreter, Any, tuple[Any, ...], dict[str, Any]], Any]
AnyRule = TypeVar("AnyRule", bound=Rule)
RULES: dict[str, Rule] = {}

_NAMES: dict[Any, str] = {}
_OPERATORS = dict(
    truediv="div", rtruediv="rdiv", itruediv="div_", imul="mul_", iadd="add_", isub="sub_", ipow="pow_",
    radd="add", rmul="mul", rsub="sub", invert="bitwise_not", iand="bitwise_and_", ior="bitwise_or_",
    bool="python_value", int="python_value", float="python_value", complex="python_value", index="python_value",
)  # fmt: skip
_ALIASES = dict(
    true_divide="div", divide="div", multiply="mul", subtract="sub", rsub="sub", clip="clamp", absolute="abs",
    concat="cat", concatenate="cat", negative="neg", swapaxes="transpose", _softmax="softmax", greater="gt", less="lt",
    greater_equal="ge", less_equal="le", not_equal="ne",
)  # fmt: skip


def rules_for(names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a rule under the names, separated by spaces, of the torch functions it explains."""

    def register(rule: AnyRule) -> AnyRule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def name_of(function: Any) -> str:
    """One name for all spellings of a torch function; reading an attribute of a tensor is ``get:attribute``."""
    name = _NAMES.get(function)
    if name is None:
        name = getattr(function, "__name__", type(function).__name__)
        if name in ("__get__", "__set__"):
            name = f"{name[2:5]}:{function.__self__.__name__}"
        elif name.startswith("__") and name.endswith("__"):
            name = _OPERATORS.get(name[2:-2], name[2:-2])
        name = _NAMES[function] = _ALIASES.get(name, name)
    return name


def find_rule(name: str) -> Rule | None:
    """The rule for a function name; an in-place name ``mul_`` is explained by ``mul``."""
    if name in RULES:
        return RULES[name]
    if name.startswith(("get:", "set:")):
        return describe
    if name.endswith("_") and name[:-1] in RULES:
        return in_place
    return None


@rules_for(
    "shape size dim ndim numel nelement stride storage_offset is_contiguous is_floating_point is_complex is_signed "
    "get_device data_ptr element_size is_cuda is_same_size untyped_storage storage has_names len hash "
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full "
    "new_tensor new_empty_strided requires_grad_ retain_grad register_hook is_pinned result_type can_cast repr "
    "dim_order is_inference is_conj is_neg"
)
def describe(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes, types, and new tensors of the same shape: nothing of the values passes on."""
    return raw(function, *args, **kwargs)


KEEPS_ROLE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
        "contiguous",
        "clone",
        "expand",
        "repeat",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "narrow",
        "select",
        "getitem",
        "index_select",
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "dropout",
        "masked_fill",
        "clamp",
        "pad",
        "repeat_interleave",
    ]
)
"""Functions after which an activated tensor is still an activated one, and attention still attention."""

CARRIED_ROLES = ("activated", "attention")
"""Roles that such a function hands on."""

CASTS = frozenset(["to", "type", "type_as", "float", "half", "bfloat16"])
"""Functions by which a model may leave the precision it was given."""

FIRST_ONLY = frozenset(["to", "type_as", "expand_as", "view_as", "reshape_as"])
"""Functions that take from a second tensor its shape or type alone."""


@rules_for(
    "add sub neg positive sum mean cumsum trace diff nan_to_num "
    "view view_as reshape reshape_as flatten unflatten ravel squeeze unsqueeze transpose permute t swapdims movedim "
    "moveaxis adjoint contiguous clone expand expand_as broadcast_to broadcast_tensors repeat repeat_interleave tile "
    "flip fliplr flipud roll rot90 chunk split split_with_sizes tensor_split unbind narrow select getitem index_select "
    "gather take take_along_dim diagonal diag diag_embed tril triu unfold as_strided hsplit vsplit "
    "cat stack hstack vstack dstack column_stack pad where masked_fill masked_scatter masked_select "
    "index_add index_copy index_fill index_put scatter scatter_add slice_scatter select_scatter diagonal_scatter "
    "to type type_as float double half bfloat16 cpu cuda "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate upsample "
    "fold pixel_shuffle pixel_unshuffle channel_shuffle view_as_real view_as_complex real imag "
    "fft_fft fft_ifft fft_rfft fft_irfft fft_fftn fft_ifftn fft_fft2 fft_ifft2 fft_rfftn fft_irfftn "
    "get:T get:mT get:H get:mH get:real get:imag"
)
def linear(
    run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    sources: list[Traced] | None = None,
) -> Any:  # fmt: skip
    """Linear, or affine, in everything live: nothing to hold. `sources`: the traced arguments, where they are known."""
    name = name_of(function)
    if name in FIRST_ONLY:
        sources = traced_in(args[:1])
    elif sources is None:
        sources = traced_in(args, kwargs)
    live = any(source.live for source in sources)
    result = raw(function, *args, **kwargs)
    if live and name in CASTS and type_of(args[0]) is torch.float64 and type_of(result) is torch.float32:
        run.fire("cast: float32")
    role = next((s.role for s in sources if s.role in CARRIED_ROLES), None) if name in KEEPS_ROLE else None
    return _label(run, name, result, sources, live=live, role=role)


def _label(run: Interpreter, name: str, result: Any, sources: list[Traced], *, live: bool, role: str | None) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)([_label(run, name, part, sources, live=live, role=role) for part in result])
    if not isinstance(result, Tensor) or isinstance(result, Traced) or not sources:
        return result
    if live and not (result.is_floating_point() or result.is_complex()):
        # Cast to whole numbers: an index or a mask, and so a decision taken at X.
        return held(run, name, lambda: constant(result))
    # What is made of held tensors is held, and no way for a gradient to reach a parameter in a gate.
    return mark(result if live else constant(result), live=live, role=role)


def held(run: Interpreter, operation: str, compute: Callable[[], Any], role: str | None = None) -> Any:
    """What `compute` gave in the recording, as frozen tensors."""
    return _frozen_views(run.hold(operation, compute), role)


def _frozen_views(value: Any, role: str | None) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_frozen_views(part, role) for part in value])
    # A view, because marking must not touch the tensor on the tape.
    return mark(value.view_as(value), live=False, role=role) if isinstance(value, Tensor) else value


@rules_for("iter")
def iterate(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`for row in x`."""
    return iter(args[0].unbind(0))


@rules_for("setitem")
def assign(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x[index] = y`: linear in x and y together."""
    _own(args[0])
    raw(function, *args, **kwargs)
    _spread(args[0], live=any(is_live(value) for value in (args[0], args[-1])))


def in_place(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`x.f_(y)`: linear functions as they are; the rest as `x.copy_(f(x, y))` by the rule of f."""
    name = name_of(function)[:-1]
    target = _own(args[0])
    live = any(source.live for source in traced_in(args, kwargs))
    if RULES[name] in (linear, overwrite):
        raw(function, *args, **kwargs)
        live = live and name != "zero"
    else:
        result = RULES[name](run, getattr(Tensor, name, None) or getattr(torch, name), args, kwargs)
        raw(Tensor.copy_, target, result)
        live = is_live(result)
    return _spread(target, live=live)


@rules_for("fill zero copy")
def overwrite(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Known for their in-place forms `fill_`, `zero_` and `copy_`."""
    return linear(run, function, args, kwargs)


def _own(target: Tensor) -> Tensor:
    """Before a write, a frozen tensor gets memory of its own: it may be a view of a factor on the tape."""
    if isinstance(target, Traced) and not target.live:
        raw(Tensor.set_, target, raw(Tensor.clone, target))
    return target


def _spread(target: Tensor, *, live: bool) -> Tensor:
    """After a write, the target is live, and so is the tensor that it is a view of."""
    if live:
        base = raw(getattr, target, "_base")
        for tensor in (target, base):
            if tensor is not None and not is_live(tensor):
                mark(tensor, live=True)
    return target


@rules_for("detach detach_ get:data")
def identity(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cutting the gradient does not change the value: T includes the path that training leaves out."""
    return args[0]


@rules_for("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout")
def dropout(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The identity: T describes the model at inference."""
    return args[0]
