r"""Attention: A is held and the values stay linear (Eq. 6, 7, 9), or A is live by the derivative of the softmax.

With attention live, let dx = x - x⁰ and w the weights of `Rules.attention` (1 for ``taylor``, ½ for ``half`` where both
factors of a product are live). Then, fused or spelled out,

    dS = w_s (q⁰ dkᵀ + dq k⁰ᵀ) · scale,   dA = A⁰ ⊙ (dS - Σ A⁰ ⊙ dS),   y = y⁰ + w_v A⁰ dv + w_a dA v⁰.

The adjoint of this is the kernel's own backward pass at the recorded point, with the gradients of q, k and v scaled.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules.linear import held
from tensorlens.freezing.rules.replacements import hold_value, pinned, scaled_gradient
from tensorlens.freezing.rules.table import rules_for
from tensorlens.freezing.traced import Interpreter, constant, is_live, mark, plain, raw, traced_in

CHUNK = 2**24
"""How many scores are formed at a time: heads times queries times keys."""


@rules_for("softmax")
def softmax(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The attention matrix A (Eq. 7), held or live."""
    if run.rules.attention != "hold":
        return _live_softmax(run, function, args, kwargs)
    run.note_rule("attention: softmax")
    return held(run, "softmax", lambda: constant(raw(function, *args, **kwargs)), role="attention")


def _live_softmax(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A⁰ + A⁰ ⊙ (dS - Σ A⁰ ⊙ dS)."""
    run.note_rule("attention: softmax, live")
    scores = args[0] if args else kwargs["input"]
    dim = kwargs["dim"] if "dim" in kwargs else next((a for a in args[1:] if isinstance(a, int)), -1)
    s0 = hold_value(run, "softmax.scores", scores)
    a0 = run.keep_factor("softmax", lambda: constant(raw(function, *args, **kwargs)))
    # What is masked has no derivative, and -inf - (-inf) no value.
    masked = (a0 == 0) | (s0.abs() >= torch.finfo(s0.dtype).max / 2)
    step = torch.where(masked, 0.0, plain(scores) - s0).to(a0.dtype)
    return mark(a0 + _softmax_step(a0, step, dim), live=True, role="attention")


def _softmax_step(a0: Tensor, step: Tensor, dim: int = -1) -> Tensor:
    weighted = a0 * step
    return weighted - a0 * weighted.sum(dim, keepdim=True)


# Fused ----------------------------------------------------------------------------------------------------------------


@rules_for("scaled_dot_product_attention")
def attention(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fused attention: with q, k and mask held, A is fixed without being formed; with A live, see above."""
    return _attention(run, *args, **kwargs)


def _attention(run: Interpreter, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Any:  # fmt: skip
    if run.rules.attention != "hold" and any(map(is_live, (query, key, attn_mask))):
        options = _Options(is_causal, scale, enable_gqa)
        mixed = _live_attention(run, query, key, value, attn_mask, options)
        return mark(run.mix_heads(mixed) if mixed.dim() == 4 else mixed, live=True)
    run.note_rule("attention: fused, query and key held")
    q, k = hold_value(run, "attention.query", query), hold_value(run, "attention.key", key)
    if traced_in(attn_mask):
        attn_mask = hold_value(run, "attention.mask", attn_mask)  # type: ignore[arg-type]
    # By reference, so that A can be formed from the tape alone (see `held_attention`).
    run.keep_factor("attention.options", lambda: (attn_mask, is_causal, scale))
    batch = value.shape[0]
    q, k = (x if x.shape[0] == batch else x.expand(batch, *x.shape[1:]) for x in (q, k))
    mixed = F.scaled_dot_product_attention(
        q, k, plain(value), attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if not is_live(value):
        return held(run, "attention", lambda: constant(mixed))
    return mark(run.mix_heads(mixed) if mixed.dim() == 4 else mixed, live=True)


@rules_for("flex_attention")
def flexible_attention(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`flex_attention`, whatever its scores are made of: what it makes of the unit matrix is A, which is held."""
    query, key, value, *rest = args
    if run.rules.attention != "hold":
        raise NotLinearError(f"{run.refusal('flex_attention')} Attention can only be held in it.")
    run.note_rule("attention: flexible, held")
    q, k, v = (constant(x) for x in (query, key, value))
    unit = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device).expand(*v.shape[:-1], -1)

    def mixing(values: Tensor) -> Any:
        with _disable_current_modes():  # it takes none that it does not know
            return raw(function, q, k, values, *rest, **kwargs)

    weights = held(run, "softmax", lambda: constant(mixing(unit)[0]), role="attention")
    of_scores = held(run, "flex_attention", lambda: [constant(one) for one in mixing(v)[1:]])
    n_shared = weights.shape[1] // v.shape[1]
    value = value if n_shared == 1 else run.call(torch.repeat_interleave, (value, n_shared), {"dim": 1})
    return run.call(torch.matmul, (weights, value), {}), *of_scores


class _Options(NamedTuple):
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class _Shares(NamedTuple):
    """How much follows the scores' factors, the attention matrix and the values."""

    scores: float
    matrix: float
    values: float

    @classmethod
    def of(cls, run: Interpreter, query: Tensor, key: Tensor, value: Tensor) -> _Shares:
        """A product of which one factor alone is live is linear as it is."""
        if run.rules.attention == "taylor":
            return cls(1.0, 1.0, 1.0)
        mixing = 0.5 if is_live(value) else 1.0
        return cls(0.5 if is_live(query) and is_live(key) else 1.0, mixing, mixing)


def _live_attention(
    run: Interpreter, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: _Options
) -> Tensor:
    """Fused where a graph is built, since there only the derivative at X counts; spelled out in chunks where not."""
    run.note_rule(f"attention: fused, {run.rules.attention}")
    names = ("attention.query", "attention.key", "attention.value")
    at = [hold_value(run, name, x) for name, x in zip(names, (query, key, value), strict=True)]
    mask0 = hold_value(run, "attention.mask", mask) if isinstance(mask, Tensor) and traced_in(mask) else mask
    run.keep_factor("attention.options", lambda: (mask0, options.is_causal, options.scale))
    shares = _Shares.of(run, query, key, value)
    live = [plain(query), plain(key), plain(value)]
    if run.recording or run.grad:
        weights = (shares.scores * shares.matrix, shares.scores * shares.matrix, shares.values)
        points = live if run.recording else [pinned(x, x0) for x, x0 in zip(live, at, strict=True)]
        q, k, v = (scaled_gradient(x, weight) for x, weight in zip(points, weights, strict=True))
        there = mask if mask is mask0 or run.recording else pinned(plain(mask), mask0)  # type: ignore[arg-type]
        there = scaled_gradient(plain(there), shares.matrix) if isinstance(there, Tensor) else there
        return F.scaled_dot_product_attention(
            q, k, v, there, is_causal=options.is_causal, scale=options.scale, enable_gqa=options.enable_gqa
        )
    of_mask = None if mask is mask0 else plain(mask) - mask0  # type: ignore[arg-type, operator]
    return _attention_step(at, live, mask0, of_mask, options, shares)


def _attention_step(
    at: list[Tensor],
    live: list[Tensor],
    mask: Tensor | None,
    of_mask: Tensor | None,
    options: _Options,
    shares: _Shares,
) -> Tensor:
    """The affine function at states away from X, a chunk of queries at a time."""
    (q0, k0, v0), (q, k, v) = at, live
    if options.enable_gqa:
        k0, v0, k, v = (x.repeat_interleave(q0.shape[-3] // x.shape[-3], -3) for x in (k0, v0, k, v))
    scale = 1 / math.sqrt(q0.shape[-1]) if options.scale is None else options.scale
    n_queries, n_keys = q0.shape[-2], k0.shape[-2]
    rows_of = max(1, CHUNK // max(1, n_keys * math.prod(q.shape[:-2])))
    parts = []
    for start in range(0, n_queries, rows_of):
        rows = slice(start, start + rows_of)
        a0 = _rows_of_attention(q0, k0, mask, options.is_causal, scale, rows)
        step = shares.scores * scale * (
            q0[..., rows, :] @ (k - k0).transpose(-1, -2) + (q - q0)[..., rows, :] @ k0.transpose(-1, -2)
        )  # fmt: skip
        if of_mask is not None:
            step = step + torch.where(a0 == 0, 0.0, _rows(of_mask, rows))
        change = _softmax_step(a0, step)
        parts.append(a0 @ (v0 + shares.values * (v - v0)) + shares.matrix * (change @ v0))
    return torch.cat(parts, -2)


def _rows_of_attention(
    q0: Tensor, k0: Tensor, mask: Tensor | None, is_causal: bool, scale: float, rows: slice
) -> Tensor:
    scores = scale * (q0[..., rows, :] @ k0.transpose(-1, -2))
    if is_causal:
        n_queries, n_keys = q0.shape[-2], k0.shape[-2]
        allowed = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q0.device).tril()[rows]
        scores = scores.masked_fill(~allowed, -torch.inf)
    if mask is not None:
        mask = _rows(mask, rows)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).nan_to_num(0.0)  # a query that sees nothing mixes nothing


def _rows(mask: Tensor, rows: slice) -> Tensor:
    return mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., rows, :]


# torch's whole layer --------------------------------------------------------------------------------------------------

_ARGUMENTS = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k",
    "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask",
    "need_weights", "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight",
    "static_k", "static_v", "average_attn_weights", "is_causal",
)  # fmt: skip


@rules_for("multi_head_attention_forward")
def multi_head_attention(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torch's whole attention layer, (token, batch, channel) or (token, channel), by the rules of its parts."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    if given.get("static_k") is not None or given.get("static_v") is not None:
        raise NotLinearError(
            "An attention layer that is given keys or values of its own (`static_k`, `static_v`) has no rule. Register "
            "an adapter for the module's class with `tensorlens.adapter`."
        )
    states = [given[name] for name in ("query", "key", "value")]
    unbatched = states[0].dim() == 2
    states = [x.unsqueeze(1) for x in states] if unbatched else states
    q, k, v = (
        F.linear(x, *parameters).unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3)
        for x, parameters in zip(states, _projections(given), strict=True)
    )
    k, v = (_with_own(x, given.get(f"bias_{name}"), given.get("add_zero_attn")) for x, name in ((k, "k"), (v, "v")))
    scores = torch.matmul(q * math.sqrt(1 / q.shape[-1]), k.transpose(-2, -1))
    for mask in _masks(given, scores):
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    mixed = torch.matmul(weights, v).permute(2, 0, 1, 3).flatten(2)
    y = F.linear(mixed, given["out_proj_weight"], given["out_proj_bias"])
    return y.squeeze(1) if unbatched else y, _returned(given, weights, unbatched)


def _projections(given: dict[str, Any]) -> list[tuple[Tensor, Tensor | None]]:
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    bias = given.get("in_proj_bias")
    return list(zip(weights, (None,) * 3 if bias is None else bias.chunk(3), strict=True))


def _with_own(x: Tensor, learned: Tensor | None, has_zero: bool | None) -> Tensor:
    """Keys or values with those that the layer brings itself: a learned one, and one that is zero."""
    batch, n_heads, _, width = x.shape
    if learned is not None:
        x = torch.cat([x, learned.view(1, n_heads, 1, width).expand(batch, -1, -1, -1)], 2)
    return F.pad(x, (0, 0, 0, 1)) if has_zero else x


def _masks(given: dict[str, Any], scores: Tensor) -> list[Tensor]:
    """What is added to the scores, (batch, head, query, key): the attention mask and the padding."""
    found = []
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if mask is not None and given.get("is_causal") and padding is None and not given.get("need_weights", True):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)  # torch takes its own there
    if mask is not None:
        found.append(_additive(mask.unflatten(0, (-1, scores.shape[1])) if mask.dim() == 3 else mask, scores))
    if padding is not None:
        found.append(_additive(padding.reshape(-1, 1, 1, padding.shape[-1]), scores))
    return [F.pad(one, (0, scores.shape[-1] - one.shape[-1])) for one in found]  # the layer's own keys are seen by all


def _additive(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill(mask, -torch.inf)


def _returned(given: dict[str, Any], weights: Tensor, unbatched: bool) -> Tensor | None:
    if not given.get("need_weights", True):
        return None
    weights = weights.mean(1) if given.get("average_attn_weights", True) else weights
    return weights[0] if unbatched else weights
