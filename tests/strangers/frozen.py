"""The derivative with everything held that the method holds, by stop-gradients: a witness of its own.

Inside `Frozen()` a model runs as it is, with the same numbers, but gradients stop at attention weights, at the
statistics of norms, at gates, and at the ratio φ(z)/z of an activation. So the Jacobian of any state with respect to an
earlier one is the operator T between them, whatever engine claims to know it.

Two factors of a product may both be live; the one that came straight from an activation is the gate and is held. Of a
matrix product the left factor mixes and is held; of any other product each factor is held in one half. What cannot be
told so is said in the model's own code by `held`, which does nothing outside of `Frozen()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ACTIVATIONS = {
    "gelu",
    "silu",
    "relu",
    "tanh",
    "sigmoid",
    "softplus",
    "exp",
    "elu",
    "mish",
    "hardswish",
    "hardsigmoid",
    "relu6",
    "leaky_relu",
    "ndtr",
    "special_ndtr",
    "threshold",
    "logsigmoid",
    "softsign",
    "hardtanh",
    "celu",
    "selu",
    "erf",
    "cos",
    "_threshold",
    "round",
    "log_sigmoid",
    "softshrink",
    "tanhshrink",
    "sin",
    "atan",
    "erfinv",
    "expm1",
    "sinc",
    "special_sinc",
    "log1p",
    "fmod",
    "frac",
    "remainder",
    "__mod__",
    "trunc",
}
STATISTICS = {"rsqrt", "sqrt", "var", "std", "var_mean", "norm", "linalg_vector_norm", "linalg_norm", "reciprocal"}
MIXERS = {"softmax"}
MATRIX_PRODUCTS = {"matmul", "__matmul__", "bmm", "mm"}
SHAPES = {
    "chunk",
    "split",
    "unbind",
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "transpose",
    "permute",
    "__getitem__",
    "interpolate",
    "expand",
    "expand_as",
    "unsqueeze",
    "squeeze",
    "contiguous",
}
"""After which what came out of an activation still did."""
ARITHMETIC = {
    "add",
    "__add__",
    "__radd__",
    "sub",
    "__sub__",
    "rsub",
    "__rsub__",
    "mul",
    "__mul__",
    "__rmul__",
    "neg",
    "div",
    "__truediv__",
}


class Frozen(TorchFunctionMode):
    """Run a model with the same numbers, and without the gradients that the method stops."""

    active = 0

    def __init__(self) -> None:
        self.gates: dict[int, tuple[Tensor, int]] = {}
        self.casts = False  # whether the model's own code left float64

    def __enter__(self) -> Any:
        Frozen.active += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Frozen.active -= 1
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in RULES:
            return RULES[name](*args, **kwargs)
        if name in MIXERS | STATISTICS:
            return _detached(func(*args, **kwargs))
        if name.removesuffix("_") in ACTIVATIONS and is_live(args[0]):
            return self._activation(func, args, kwargs)
        if name in ("mul", "__mul__", "__rmul__", "multiply") and all(is_live(factor) for factor in args[:2]):
            return self._product(*args[:2])
        if name in MATRIX_PRODUCTS and all(is_live(factor) for factor in args[:2]):
            return func(args[0].detach(), *args[1:], **kwargs)
        if name == "einsum" and sum(is_live(factor) for factor in args[1:]) > 1:
            return func(args[0], *(one.detach() for one in args[1:-1]), args[-1], **kwargs)
        if name in ("div", "__truediv__", "true_divide") and len(args) > 1 and is_live(args[1]):
            return args[0] / args[1].detach()
        if name in ("square", "pow", "__pow__") and is_live(args[0]):
            ratio = func(*args, **kwargs) / args[0]
            return args[0] * torch.where(args[0] == 0, 0.0, ratio).detach()
        result = func(*args, **kwargs)
        self.casts |= is_live(result) and result.dtype == torch.float32
        if name in SHAPES and self._strength(args[0]):
            for part in (result,) if isinstance(result, Tensor) else result:
                self.gates[id(part)] = part, self._strength(args[0])
        if name in ARITHMETIC and sum(is_live(one) for one in args) == 1 and any(id(one) in self.gates for one in args):
            strength = max(self._strength(one) for one in args)
            self.gates[id(result)] = result, strength  # 1 + erf(z) is a gate as erf(z) is
        return result

    def _activation(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        z, rest = args[0], args[1:]
        writes = kwargs.get("inplace", False) or True in rest or func.__name__.endswith("_")
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
        rest = tuple(value for value in rest if value is not True and value is not False)
        result, at_zero = _by_ratio(lambda v: func(v, *rest, **kwargs), z)
        if writes and not z.is_leaf:  # what reads z again reads what was written
            result = z.copy_(result)
        self.gates[id(result)] = result, 1 + bool(at_zero.any())
        return result

    def _strength(self, value: Any) -> int:
        """2 for what came out of an activation with φ(0) ≠ 0, 1 out of another, 0 for the rest."""
        return self.gates[id(value)][1] if id(value) in self.gates else 0

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        of_a, of_b = self._strength(a), self._strength(b)
        if of_a == of_b == 2:
            return a.detach() * b.detach()
        if of_a == of_b:
            return (a * b.detach() + a.detach() * b) / 2
        return a.detach() * b if of_a > of_b else a * b.detach()


def held(value: Tensor) -> Tensor:
    """A factor that the method holds; the value itself outside of `Frozen()`."""
    return value.detach() if Frozen.active else value


def is_live(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else tuple(one.detach() for one in value)


def _by_ratio(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """φ(z) = φ(0) + ((φ(z) - φ(0))/z)·z with the ratio held, and the derivative where z is 0; and φ(0)."""
    with torch.no_grad():
        at_zero = function(torch.zeros_like(z))
        ratio = (function(z.detach().clone()) - at_zero) / z
    with torch.enable_grad():
        zero = torch.zeros_like(z, requires_grad=True)
        (slope,) = torch.autograd.grad(function(zero * 1).sum(), zero, allow_unused=True)  # times 1: some write
    ratio = torch.where(z == 0, 0.0 if slope is None else slope, ratio).detach()
    return at_zero + ratio * z, at_zero


def layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    return _affine(_standardised(x, axes, eps), weight, bias)


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * (x.square().mean(axes, keepdim=True) + eps).rsqrt().detach(), weight, None)


def batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    if training or mean is None or var is None:
        y = _standardised(x, tuple(axis for axis in range(x.dim()) if axis != 1), eps)
    else:
        y = (x - mean.view(shape)) * (var.view(shape) + eps).rsqrt()
    return _affine(y, *(None if w is None else w.view(shape) for w in (weight, bias)))


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    y = _standardised(x.unflatten(1, (groups, -1)).flatten(2), (-1,), eps).view(x.shape)
    shape = [1, -1] + [1] * (x.dim() - 2)
    return _affine(y, *(None if w is None else w.view(shape) for w in (weight, bias)))


def instance_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    return group_norm(x, x.shape[1], weight, bias, eps)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if k.shape[-3:-2] != q.shape[-3:-2] and q.dim() > 3:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return F.softmax(scores, -1).detach() @ v


def multi_head_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What `nn.MultiheadAttention` computes, of (token, batch, channel), or (token, channel)."""
    names = (
        "embed_dim",
        "n_heads",
        "w_in",
        "b_in",
        "bias_k",
        "bias_v",
        "zero",
        "dropout",
        "w_out",
        "b_out",
        "training",
        "key_padding_mask",
        "need_weights",
        "attn_mask",
        "separate",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    if query.dim() == 2:
        padding = given.get("key_padding_mask")
        given["key_padding_mask"] = None if padding is None else padding[None]
        return multi_head_attention(query[:, None], key[:, None], value[:, None], **given)[0][:, 0], None
    weights = given["w_in"].chunk(3)
    biases = (None,) * 3 if given["b_in"] is None else given["b_in"].chunk(3)
    q, k, v = (
        F.linear(t, w, b).unflatten(-1, (given["n_heads"], -1)).permute(1, 2, 0, 3)
        for t, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    mask = given.get("attn_mask")
    if mask is None and given.get("is_causal"):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    for one in (mask, given.get("key_padding_mask")):
        if one is not None:
            one = one if one is mask else one[:, None, None]
            scores = scores.masked_fill(one, -torch.inf) if one.dtype == torch.bool else scores + one
    mixed = (F.softmax(scores, -1).detach() @ v).permute(2, 0, 1, 3).flatten(-2)
    return F.linear(mixed, given["w_out"], given["b_out"]), None


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Tensor:
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps).detach()


def glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * torch.sigmoid(gate).detach()


def lstm(
    x: Tensor,
    start: Any,
    flat: Any,
    has_biases: bool,
    n_layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    batch_first: bool,
) -> Any:
    """What `nn.LSTM` computes, with its three gates held: c' = f⊙c + i⊙tanh(g), h' = o⊙tanh(c')."""
    x, n_ways, size = x.transpose(0, 1) if batch_first else x, 1 + both_ways, 4 if has_biases else 2
    for layer in range(n_layers):
        ways = []
        for way in range(n_ways):
            n = layer * n_ways + way
            w_x, w_h, *biases = flat[n * size : (n + 1) * size]
            h, c, steps = start[0][n], start[1][n], []
            for row in x.flip(0) if way else x:
                i, f, g, o = (row @ w_x.T + h @ w_h.T + sum(biases)).chunk(4, -1)
                c = f.sigmoid().detach() * c + i.sigmoid().detach() * _by_ratio(torch.tanh, g)[0]
                h = o.sigmoid().detach() * _by_ratio(torch.tanh, c)[0]
                steps.append(h)
            ways.append(torch.stack(steps[::-1] if way else steps))
        x = torch.cat(ways, -1)
    return x.transpose(0, 1) if batch_first else x, None, None


def gru_cell(x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None) -> Tensor:
    """What `nn.GRUCell` computes, with its two gates held: h' = (1 - z)⊙n + z⊙h, n = tanh(W x + r⊙(U h))."""
    from_x, from_h = F.linear(x, w_x, b_x).chunk(3, -1), F.linear(h, w_h, b_h).chunk(3, -1)
    r, z = ((from_x[i] + from_h[i]).sigmoid().detach() for i in (0, 1))
    return (1 - z) * _by_ratio(torch.tanh, from_x[2] + r * from_h[2])[0] + z * h


def _standardised(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(axes, keepdim=True)
    return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt().detach()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


RULES: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": multi_head_attention,
    "normalize": normalize,
    "glu": glu,
    "lstm": lstm,
    "gru_cell": gru_cell,
}
