"""The paper's way: a model patched with detached factors, and the Jacobian of that by autograd.

Written from the paper alone and sharing no code with the library: attention with detached queries and keys, norms with
a detached deviation, activations as z · φ(z)/z with the quotient detached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ACTIVATIONS = ("GELUActivation", "NewGELUActivation", "SiLUActivation", "SiLU", "GELUTanh", "FastGELUActivation")


@contextmanager
def patched(model: nn.Module) -> Iterator[nn.Module]:
    """The model with its factors detached, for as long as it lasts."""
    AttentionInterface.register("detached", _attention)
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.config._attn_implementation = "detached"  # type: ignore[union-attr]
    changed = []
    is_gated = any(name.endswith("gate_proj") for name, _ in model.named_modules())
    for module in model.modules():
        replacement = _replacement(module, is_gated)
        if replacement is not None:
            changed.append(module)
            module.forward = replacement  # type: ignore[method-assign]
    try:
        yield model
    finally:
        model.config._attn_implementation = before  # type: ignore[union-attr]
        for module in changed:
            del module.forward


def _replacement(module: nn.Module, is_gated: bool) -> Callable[..., Tensor] | None:
    if isinstance(module, nn.LayerNorm):
        return lambda x: _layer_norm(x, module)
    if type(module).__name__.endswith("RMSNorm"):
        return lambda x: _rms_norm(x, module)
    if type(module).__name__ in ACTIVATIONS:
        own = type(module).forward
        if is_gated:  # the gate is held whole
            return lambda z: own(module, z).detach()
        return lambda z: z * (own(module, z) / z).detach()
    return None


def _layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    inverse_std = (x.detach().float().var(-1, correction=0, keepdim=True) + norm.eps).rsqrt().to(x.dtype)
    return (x - x.mean(-1, keepdim=True)) * inverse_std * norm.weight + norm.bias


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    inverse = (x.detach().float().square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt().to(x.dtype)
    return x * inverse * norm.weight


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    scores = query.detach() @ key.detach().mT * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[-2]]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    elif getattr(module, "is_causal", False):
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    attention = F.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return (attention @ value).transpose(1, 2).contiguous(), None


def slice_by_jacrev(function: Callable[[Tensor], Tensor], x: Tensor, out_token: int, chunk: int) -> Tensor:
    """T[i] (out_channel, in_token, in_channel) by `torch.func.jacrev`."""
    return torch.func.jacrev(lambda x: function(x)[0, out_token], chunk_size=chunk)(x)[:, 0]


def slice_by_batched_vjps(function: Callable[[Tensor], Tensor], x: Tensor, out_token: int, chunk: int) -> Tensor:
    """The same by batched backward passes through one graph."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x)[0, out_token]
        units = torch.eye(len(y), dtype=y.dtype, device=y.device)
        parts = [
            torch.autograd.grad(y, x, part, is_grads_batched=True, retain_graph=True)[0][:, 0]
            for part in units.split(chunk)
        ]
    return torch.cat(parts)


WAYS = {"jacrev": slice_by_jacrev, "batched VJPs": slice_by_batched_vjps}
