"""Rules for attention that torch computes in one call: A is held, the values stay linear (Eq. 6, 9)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.freezing.rules.linear import held
from tensorlens.freezing.rules.products import hold_value
from tensorlens.freezing.rules.table import rules_for
from tensorlens.freezing.traced import Interpreter, constant, is_live, mark, plain, raw, traced_in


@rules_for("scaled_dot_product_attention")
def attention(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fused attention with q, k and mask held and v live: A is fixed without being formed."""
    return _attention(run, *args, **kwargs)


def _attention(run: Interpreter, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Any:  # fmt: skip
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


@rules_for("multi_head_attention_forward")
def multi_head_attention(run: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torch's whole attention layer, (token, batch, channel): projection of the values, mixing, output projection."""
    names = ("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k",
             "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias")  # fmt: skip
    options = dict(zip(names, args, strict=False)) | kwargs
    value, width = options["value"], options["value"].shape[-1]
    if options["bias_k"] is not None or options["add_zero_attn"] or not is_live(value):
        raise NotLinearError(
            "An attention layer with extra keys, or whose values are no part of the state, has no rule."
        )
    run.note_rule("attention: layer, A held")
    attention = run.keep_factor("softmax", lambda: _weights(function, options))
    whole, bias = options["in_proj_weight"], options["in_proj_bias"]
    weight = options["v_proj_weight"] if options.get("use_separate_proj_weight") else whole[-width:]
    v = F.linear(plain(value), weight, None if bias is None else bias[-weight.shape[0] :])
    heads = v.unflatten(-1, (options["num_heads"], -1)).permute(1, 2, 0, 3)
    mixed = run.mix_heads(attention @ heads).permute(2, 0, 1, 3).flatten(2)
    y = F.linear(mixed, options["out_proj_weight"], options["out_proj_bias"])
    return mark(y, live=True), None


def _weights(function: Any, options: dict[str, Any]) -> Tensor:
    values = {name: constant(value) if isinstance(value, Tensor) else value for name, value in options.items()}
    return raw(function, **values | {"need_weights": True, "average_attn_weights": False, "training": False})[1]
