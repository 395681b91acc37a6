"""Functions that are linear in everything live: shapes, sums, casts, gathers. Nothing is held."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules.activations import coarsened
from tensorlens.freezing.rules.table import ATTRIBUTE, name_of, rules_for
from tensorlens.freezing.traced import Interpreter, Traced, constant, is_factor, is_live, mark, raw, traced_in


@rules_for(
    "shape size dim ndim numel nelement stride storage_offset is_contiguous is_floating_point is_complex is_signed "
    "get_device data_ptr element_size is_cuda is_same_size untyped_storage storage has_names len hash "
    "zeros_like ones_like empty_like rand_like randn_like randint_like new_zeros new_ones new_empty "
    "new_empty_strided requires_grad_ is_pinned result_type can_cast repr "
    f"dim_order is_inference is_conj is_neg {ATTRIBUTE}"
)
def describe(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes, types, and new tensors of the same shape: nothing of the values passes on."""
    return raw(function, *args, **kwargs)


@rules_for("register_hook register_post_accumulate_grad_hook retain_grad")
def look_at_gradients(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing: a hook on a gradient is no part of what the model computes, and one that changes it would change T."""
    return RemovableHandle(OrderedDict()) if name_of(function) != "retain_grad" else None


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

CONTRACTIONS = frozenset([
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "grouped_mm", "_grouped_mm", "matmul", "bmm", "mm", "mv", "dot", "inner", "outer", "ger", "tensordot", "kron",
    "einsum", "addmm", "baddbmm", "addbmm", "addmv",
])  # fmt: skip
"""Functions by which a weight reads a factor as the input of another layer."""

COARSE = frozenset([
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
])  # fmt: skip
"""Types in which nothing is linear."""

CASTS = frozenset(["to", "type", "type_as", "int", "long", "short", "char", "byte"])

FIRST_ONLY = frozenset(["to", "type_as", "expand_as", "view_as", "reshape_as"])
"""Functions that take from a second tensor its shape or type alone."""


@rules_for(
    "add sub neg positive sum mean cumsum trace diff nan_to_num "
    "view view_as reshape reshape_as flatten unflatten ravel squeeze unsqueeze transpose permute t swapdims movedim "
    "moveaxis adjoint contiguous clone expand expand_as broadcast_to repeat repeat_interleave tile "
    "flip fliplr flipud roll rot90 chunk split split_with_sizes tensor_split unbind narrow select getitem index_select "
    "gather take take_along_dim diagonal diag diag_embed tril triu unfold as_strided hsplit vsplit "
    "cat stack hstack vstack dstack column_stack pad where masked_fill masked_scatter masked_select "
    "block_diag nansum nanmean alias "
    "index_add index_copy index_fill index_put slice_scatter select_scatter diagonal_scatter "
    "to type type_as float double half bfloat16 int long short char byte cpu cuda "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate upsample "
    "fold pixel_shuffle pixel_unshuffle channel_shuffle view_as_real view_as_complex real imag complex "
    "conj conj_physical resolve_conj resolve_neg "
    "fft_fft fft_ifft fft_rfft fft_irfft fft_fftn fft_ifftn fft_fft2 fft_ifft2 fft_rfftn fft_irfftn "
    "fft_rfft2 fft_irfft2 fft_hfft fft_ihfft fft_fftshift fft_ifftshift deg2rad rad2deg cartesian_prod combinations "
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
    live = any([source.live for source in sources])  # a list: for so few, a generator is twice as slow
    result = raw(function, *args, **kwargs)
    return _label(run, name, result, sources, live=live, role=_role(run, name, sources, args))


@rules_for("broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d")
def one_by_one(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Several tensors, each made of one: what is made of a constant is one still."""
    given = args[0] if len(args) == 1 else args
    result = raw(function, *args, **kwargs)
    if not isinstance(given, (tuple, list)):
        return linear(run, function, args, kwargs)
    parts = [
        _label(run, name_of(function), part, [source], live=source.live, role=source.role)
        if isinstance(source, Traced)
        else part
        for part, source in zip(result, given, strict=True)
    ]
    return type(result)(parts)


def role_of_factors(run: Interpreter, *sources: Any) -> str | None:
    """What is made of live factors alone: a factor again."""
    live = [source for source in sources if is_live(source)]
    if not live or not all(is_factor(run, source) for source in live):
        return None
    roles = {source.role for source in live}
    if roles in ({"scale"}, {"step"}):
        return roles.pop()
    return "statistic" if "statistic" in roles else "attention" if roles == {"attention"} else "factor"


def role_of_reduced(run: Interpreter, x: Any) -> str | None:
    """The mean or the largest of sizes |x| is a norm: a number by which others are scaled."""
    return "scale" if x.role == "size" else role_of_factors(run, x)


def _role(run: Interpreter, name: str, sources: list[Traced], args: tuple[Any, ...]) -> str | None:
    """What the result of a linear function is: a factor, if it is made of nothing else, until a weight reads it."""
    if not any([source.role for source in sources]):
        return None
    if len(sources) == 1 and sources[0].role == "size":
        return "scale" if name in ("mean", "sum") else "size" if name in KEEPS_ROLE else None
    role = role_of_factors(run, *sources)
    if role is not None and not (name in CONTRACTIONS and any(_is_weight(value) for value in args)):
        return role
    return next((s.role for s in sources if s.role in CARRIED_ROLES), None) if name in KEEPS_ROLE else None


def _is_weight(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_is_weight(part) for part in value)
    return isinstance(value, Tensor) and not isinstance(value, Traced)


def _label(run: Interpreter, name: str, result: Any, sources: list[Traced], *, live: bool, role: str | None) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)([_label(run, name, part, sources, live=live, role=role) for part in result])
    if not isinstance(result, Tensor) or isinstance(result, Traced) or not sources:
        return result
    if live and result.dtype in COARSE:
        if name not in CASTS:
            raise NotLinearError(run.refusal(f"{name} to {result.dtype}"))
        return coarsened(run, name, sources[0], result)
    if live and result.dtype == torch.bool:
        return held(run, name, lambda: constant(result))  # a mask, and so a decision taken at X
    # What is made of held tensors is held, and no way for a gradient to reach a parameter in a gate.
    return mark(result if live else constant(result), live=live, role=role)


def held(run: Interpreter, operation: str, compute: Callable[[], Any], role: str | None = None) -> Any:
    """What `compute` gave in the recording, as frozen tensors."""
    return _frozen_views(run.keep_factor(operation, compute), role)


def _frozen_views(value: Any, role: str | None) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_frozen_views(part, role) for part in value])
    # A view, because marking must not touch the tensor on the tape.
    return mark(value.view_as(value), live=False, role=role) if isinstance(value, Tensor) else value


@rules_for("scatter scatter_add scatter_reduce index_reduce")
def scattered(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums and means over an index are linear; what is the largest there, or a product, is not."""
    name = name_of(function)
    reduced = kwargs.get("reduce", "sum" if name in ("scatter", "scatter_add") else args[-1])
    args, kwargs = _as_large_as_index(args, kwargs) if name != "index_reduce" else (args, kwargs)
    if name == "scatter" and reduced == "add" and isinstance(args[3], Tensor):
        return linear(run, Tensor.scatter_add, args, {})  # the other has no derivative
    if reduced not in ("sum", "mean"):
        raise NotLinearError(run.refusal(f"{name} by {reduced}"))
    return linear(run, function, args, kwargs)


def _as_large_as_index(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A source may be larger than its index, but for the derivative of the function."""
    names = ("dim", "index", "src" if "src" in kwargs else "value")
    target, dim, index, source = (*args, *(kwargs[name] for name in names if name in kwargs))[:4]
    if isinstance(source, Tensor) and source.dim() and source.shape != index.shape:
        source = source[tuple(slice(n) for n in index.shape)]
    rest = {name: value for name, value in kwargs.items() if name not in names}
    return (target, dim, index, source, *args[4:]), rest


@rules_for("iter")
def iterate(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`for row in x`."""
    return iter(args[0].unbind(0))


@rules_for("deepcopy")
def copied(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`copy.deepcopy(x)`, for a skip."""
    return args[0].clone()


@rules_for("detach detach_ get:data")
def identity(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cutting the gradient does not change the value: T includes the path that training leaves out."""
    return args[0]


@rules_for("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout")
def dropout(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The identity: T describes the model at inference.

    Modules are there in evaluation mode, so that dropout which is on all the same is never off.
    """
    given = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
    if given.get("p", 0.5) and given.get("training", given.get("train", True)):
        raise NotLinearError(
            f"`{name_of(function)}` is on in evaluation mode too, so that the model gives other numbers each time. "
            f"Pass it `training=self.training`. {run.refusal(name_of(function))}"
        )
    return args[0]
