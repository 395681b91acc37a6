"""How attention moved information in a recorded pass: each block's attention matrices and the values they mixed.

The operator itself never forms an attention matrix. What needs one (the baselines, `attentions()`) asks here, and one
replay reads them off wherever attention and values meet, whatever the kernel: after masks, windows, caps and sinks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens.axes import Attention, Hidden
from tensorlens.errors import MethodError
from tensorlens.freezing.frozen_model import FrozenModel, Span, Walk
from tensorlens.freezing.rules.table import name_of
from tensorlens.freezing.traced import Traced, constant, is_live


@dataclass(frozen=True, kw_only=True)
class Mixing:
    r"""What one block's attention did: $\sum_j A_{h,ij} v_{h,j}$ for each head.

    Attributes:
        attention: $A_h$; rows sum to one except where the model has a sink.
        values: $v_{h,j}$, biases and the norm before them included; a value head that several query heads share is
            repeated.
        inputs: What entered each module of the block that takes one hidden state, by the module's path.
    """

    attention: Attention
    values: Float[Tensor, "head in_token head_channel"]
    inputs: dict[str, Hidden] = field(repr=False)


def mixings(frozen: FrozenModel) -> list[Mixing]:
    """The attention of every block, by one replay of the recorded pass.

    Raises:
        MethodError: a block without softmax attention from tokens to tokens, or with more than one.
    """
    reader = _Reader(frozen)
    with torch.no_grad():
        reader.go()
    return [reader.mixing(block) for block in range(frozen.n_blocks)]


def attention_matrices(frozen: FrozenModel, block: int) -> Attention:
    """$A_h$ of one block, as the model used it, by a replay of that block alone."""
    reader = _Reader(frozen, Span(block, block + 1))
    with torch.no_grad():
        reader.go()
    return reader.mixing(block).attention


class _Reader(Walk):
    """A replay that looks on where attention meets values."""

    def __init__(self, frozen: FrozenModel, span: Span | None = None) -> None:
        span = span or Span(0, frozen.n_blocks)
        super().__init__(frozen, span=span, x=frozen.hidden[span.start])
        self.found: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.inputs: dict[int, dict[str, Hidden]] = {}

    def mixing(self, block: int) -> Mixing:
        found = self.found.get(block, [])
        if len(found) != 1:
            raise MethodError(
                f"Block {block} of `{type(self.frozen.anatomy.model).__name__}` mixes tokens by {len(found)} softmax "
                "attentions; expected one. Use a method that needs no attention matrix, such as `tensor.norm`."
            )
        attention, values = found[0]
        values = values.repeat_interleave(len(attention) // len(values), 0)
        return Mixing(attention=attention, values=values, inputs=self.inputs.get(block, {}))

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.block is not None and torch.is_grad_enabled() == self.grad:
            name = name_of(function)
            if name == "scaled_dot_product_attention":
                self._keep(_formed(*args, **kwargs), args[2] if len(args) > 2 else kwargs["value"])
            elif name in ("matmul", "bmm"):
                left, right = (*args, *kwargs.values())[:2]
                if isinstance(left, Traced) and left.role == "attention" and is_live(right):
                    self._keep(left, right)
        return super().call(function, args, kwargs)

    def run_module(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.block is not None and args and is_live(args[0]):
            self.inputs.setdefault(self.block, {})[self.module] = _one(constant(args[0]))
        return super().run_module(module, forward, args, kwargs)

    def _keep(self, attention: Tensor, values: Tensor) -> None:
        pair = _one(constant(attention)), _one(constant(values))
        if all(part.dim() == 3 for part in pair):
            self.found.setdefault(self.block or 0, []).append(pair)


def _one(tensor: Tensor) -> Tensor:
    """The only sample of a batch."""
    return tensor[0] if len(tensor) == 1 else tensor


def _formed(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """A from a fused kernel: what it makes of the unit vectors as values."""
    q, k = constant(query), constant(key)
    mask = None if attn_mask is None else constant(attn_mask)
    units = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:-1], -1)
    return F.scaled_dot_product_attention(q, k, units, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
