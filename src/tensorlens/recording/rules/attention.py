r"""Attention: A is held and the values stay linear (Eq. 6, 7, 9), or A is live by the derivative of the softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tensorlens.errors import NotLinearError
from tensorlens.recording.live import is_live, raw, tape, value_of
from tensorlens.recording.roles import Role
from tensorlens.recording.sinks import without_sink
from tensorlens.recording.table import family, rule


@family("softmax")
def softmax_rule(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The attention matrix A (Eq. 7), held or live."""
    run, weights = tape(), raw(function, *args, **kwargs)
    run.note_cast(weights, args[0].dtype)
    run.note_softmax(args[0])
    if run.rules.attention == "hold":
        run.note("attention: softmax")
        return run.held(weights, Role.ATTENTION)
    run.note("attention: softmax, live")
    scores, temperature = args[0], run.rules.softmax_temperature
    dim = kwargs["dim"] if "dim" in kwargs else next((a for a in args[1:] if type(a) is int), -1)

    def parts() -> tuple[Tensor, Tensor]:
        # Masked entries, by zero weight or by the largest number, have no derivative.
        s0 = value_of(scores)
        masked = (weights == 0) | (s0.abs() >= torch.finfo(s0.dtype).max / 2)
        at_temperature = weights if temperature == 1 else (s0.to(weights.dtype) / temperature).softmax(dim)
        a0 = torch.where(masked, 0, at_temperature)
        moved = a0 * torch.where(masked, 0, s0).to(a0.dtype)
        return a0, weights - (moved - a0 * moved.sum(dim, keepdim=True))

    a0, added = raw(parts)
    return run.emit("softmax", weights, scores, a0, dim, added, role=Role.ATTENTION)


# Fused ----------------------------------------------------------------------------------------------------------------


@rule("scaled_dot_product_attention")
def attention_rule(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Fused attention: with q, k and mask held, A is fixed without being formed; with A live, by its derivative."""
    run = tape()
    mixed = raw(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    q, k, v, mask = (value_of(x) for x in (query, key, value, attn_mask))
    if run.rules.attention == "hold" or not any(map(is_live, (query, key, attn_mask))):
        run.note("attention: fused, query and key held")
        if not is_live(value):
            return mixed
        value = without_sink(value)
        found = run.emit("attention", mixed, q, k, value, mask, is_causal, scale, enable_gqa)
    elif is_live(attn_mask):
        return _spelled_out(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    else:
        run.note(f"attention: fused, {run.rules.attention}")
        live = [x if is_live(x) else None for x in (query, key, value)]
        shares = _shares(query, key, value)
        found = run.emit(
            "live_attention",
            mixed,
            *live,
            raw(Tensor.clone, mixed),
            (q, k, v),
            mask,
            is_causal,
            scale,
            enable_gqa,
            shares,
            run.rules.softmax_temperature,
        )
    run.note_fused(found, query, key, value, mask, is_causal, scale)
    return found


def _shares(query: Any, key: Any, value: Any) -> tuple[float, float, float]:
    """How much follows the scores' factors, the matrix and the values: of one live factor alone, all of it."""
    if tape().rules.attention == "taylor":
        return 1.0, 1.0, 1.0
    mixing = 0.5 if is_live(value) else 1.0
    return 0.5 if is_live(query) and is_live(key) else 1.0, mixing, mixing


def _spelled_out(
    query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """Attention whose mask is live too, step by step."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = torch.matmul(query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale), key.transpose(-2, -1))
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return torch.matmul(torch.softmax(scores + mask, -1), value)


@family(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math"
)
def attention_kernel(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The kernels of fused attention, by device; their other results are read only by a backward pass."""
    arguments = function._schema.arguments
    given = dict(zip([argument.name for argument in arguments], args, strict=False)) | kwargs
    mask = given.get("attn_mask", given.get("attn_bias"))
    q, k, v = (given[key] for key in ("query", "key", "value"))
    is_grouped = q.shape[-3] != k.shape[-3]
    mixed = attention_rule(q, k, v, mask, 0.0, given.get("is_causal", False), given.get("scale"), is_grouped)
    return (mixed, *[None] * (len(function._schema.returns) - 1))


@family("flex_attention")
def flexible(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`flex_attention`, whatever its scores are made of: applied to the unit matrix it gives A, which is held."""
    run = tape()
    query, key, value, *rest = args
    if run.rules.attention != "hold":
        raise NotLinearError(f"{run.refusal('flex_attention')} Attention can only be held in it.")
    run.note("attention: flexible, held")
    q, k, v = (value_of(x) for x in (query, key, value))

    def mixing(values: Tensor) -> Any:
        with _disable_current_modes():  # it takes none that it does not know
            return raw(function, q, k, values, *rest, **kwargs)

    unit = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device).expand(*v.shape[:-1], -1)
    found = mixing(unit)
    weights = run.held(value_of(found[0] if isinstance(found, tuple) else found), Role.ATTENTION)
    n_shared = weights.shape[1] // v.shape[1]
    value = value if n_shared == 1 else value.repeat_interleave(n_shared, 1)
    mixed = torch.matmul(weights, value)
    return (mixed, *mixing(v)[1:]) if isinstance(found, tuple) else mixed


# torch's whole layer --------------------------------------------------------------------------------------------------

_ARGUMENTS = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn "
    "dropout_p out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask "
    "use_separate_proj_weight q_proj_weight k_proj_weight v_proj_weight static_k static_v average_attn_weights "
    "is_causal"
)


@family("multi_head_attention_forward")
def multi_head_attention(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torch's whole attention layer, (token, batch, channel) or (token, channel), by the rules of its parts."""
    given = dict(zip(_ARGUMENTS.split(), args, strict=False)) | kwargs
    if given.get("static_k") is not None or given.get("static_v") is not None:
        raise NotLinearError(
            "An attention layer that is given keys or values of its own (`static_k`, `static_v`) has no rule. Register "
            "an adapter for the module's class with `tensorlens.adapter`."
        )
    states = [given[key] for key in ("query", "key", "value")]
    unbatched = states[0].dim() == 2
    states = [x.unsqueeze(1) for x in states] if unbatched else states
    q, k, v = (
        F.linear(x, *parameters).unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3)
        for x, parameters in zip(states, _projections(given), strict=True)
    )
    k, v = (_with_own(x, given.get(f"bias_{key}"), given.get("add_zero_attn")) for x, key in ((k, "k"), (v, "v")))
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
    """Keys or values with the layer's own added: a learned one, and a zero one."""
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
