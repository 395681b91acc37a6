"""`FrozenOperator`: the attention tensor of a frozen model, by replay and backward passes alone."""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import TensorSlice
from tensorlens.freezing.frozen_model import FrozenModel, Heads, Span
from tensorlens.operators.base import TensorOperator

CHUNK = 32
"""States pushed, or cotangents pulled, at a time."""


class FrozenOperator(TensorOperator):
    r"""$T_X$ of a frozen model over a range of blocks, perhaps with some heads silenced (Eq. 27).

    Costs nothing to hold beyond the frozen model. `apply` is a replay less the replay at zero, `adjoint` a backward
    pass.
    """

    def __init__(self, frozen: FrozenModel, span: Span | None = None, heads: Heads | None = None) -> None:
        self.frozen, self.heads = frozen, heads or {}
        self.span = Span(0, frozen.n_blocks) if span is None else span

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Output tokens, output channels, input tokens, input channels."""
        n_out, d_out = self.output.shape
        n_in, d_in = self.input.shape
        return n_out, d_out, n_in, d_in

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states."""
        return self.input.dtype

    @property
    def device(self) -> torch.device:
        """Device of the hidden states."""
        return self.input.device

    @property
    def input(self) -> Float[Tensor, "in_token in_channel"]:
        """The state entering the first block of the range; X⁰ for the whole model."""
        return self.frozen.hidden[self.span.start][0]

    @property
    def output(self) -> Float[Tensor, "out_token out_channel"]:
        """The state the recording found at the end of the range; X^N for the whole model."""
        return self.frozen.hidden[self.span.stop][0]

    @property
    def bias(self) -> Float[Tensor, "out_token out_channel"]:
        """B: the frozen model at zero."""
        return self._at_zero

    @cached_property
    def _at_zero(self) -> Tensor:
        return self.frozen.push(torch.zeros_like(self.input)[None], self.span, self.heads)[0]

    def push(self, x: Float[Tensor, "batch in_token in_channel"]) -> Float[Tensor, "batch out_token out_channel"]:
        """The affine map T·x + B, by replay."""
        if len(x) > 1 and not self.is_batchable:
            return torch.cat([self.frozen.push(one[None], self.span, self.heads) for one in x])
        return torch.cat([self.frozen.push(part, self.span, self.heads) for part in x.split(CHUNK)])

    @cached_property
    def is_batchable(self) -> bool:
        """Whether several states can be replayed at once. Tried, since a model may join batch and tokens (experts)."""
        pair = torch.stack([self.input, self.input.flip(0)])
        try:
            together = self.frozen.push(pair, self.span, self.heads)
        except Exception:  # noqa: BLE001  whatever the model's code makes of a second state
            return False
        alone = torch.cat([self.frozen.push(one[None], self.span, self.heads) for one in pair])
        if together.shape != alone.shape:
            return False
        return bool((together - alone).norm() <= 100 * torch.finfo(self.dtype).eps ** 0.75 * alone.norm())

    def _apply(self, x: Tensor) -> Tensor:
        return self.push(x) - self.bias

    def _adjoint(self, u: Tensor) -> Tensor:
        return self.frozen.pull(u, self.span, self.heads, chunk=CHUNK)

    def _rows(self, out_token: int) -> TensorSlice:
        units = torch.eye(self.shape[1], dtype=self.dtype, device=self.device)
        return self.frozen.pull(units, self.span, self.heads, read=lambda y: y[0, out_token], chunk=CHUNK)
