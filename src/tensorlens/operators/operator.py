"""`FrozenOperator`: the attention tensor of a recorded pass, which is never stored.

`apply` runs the linear part of the program, `adjoint` walks it backwards, the bias is the program at zero. Many
cotangents at once (rows, norms, sketches) go by matrix products where the blocks can be folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import Range, TensorSlice
from tensorlens.errors import AnatomyError
from tensorlens.memory import Pieces, fitting, free_bytes, in_parts
from tensorlens.models.precision import Precision, compute_type
from tensorlens.operators.base import Pulled, TensorOperator
from tensorlens.program.folding.pull import FoldedRows
from tensorlens.recording.recording import Heads, Recording, Span

CHUNK = 32
"""Cotangents pulled at a time where blocks are not folded."""

MOST_STATES = {"cuda": 128, "cpu": 32}
"""States pushed at a time: a GPU has to be launched for each, a CPU's cache holds few."""

ENOUGH_TO_FOLD = 8
"""Cotangents from which folding the blocks costs less than pulling each."""

MOST_COTANGENTS = {"cuda": 12288, "cpu": 2048}
"""More cotangents at a time than this make no product faster, and let causal models do work above the diagonal."""


class FrozenOperator(TensorOperator):
    r"""$T_X$ of a recorded pass over a range of blocks, perhaps with some heads silenced (Eq. 27).

    Args:
        recording: The pass.
        span: The range of blocks; all of them if None.
        heads: For each block named, a multiplier for each head.
        precision: How the products for rows, norms and sketches are computed: the model's own type, in float32 or
            better, if None.
    """

    def __init__(
        self,
        recording: Recording,
        span: Span | None = None,
        heads: Heads | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        self.recording, self.heads = recording, dict(heads or {})
        self.precision: Precision | None = precision
        self.span = Span(0, recording.n_blocks) if span is None else span
        self.compute_type = compute_type(precision, self.dtype)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Output tokens, output channels, input tokens, input channels."""
        return *self.output.shape, *self.input.shape  # type: ignore[return-value]

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
        return self.recording.states[self.span.start][0]

    @property
    def output(self) -> Float[Tensor, "out_token out_channel"]:
        """The state the recording found at the end of the range; X^N for the whole model."""
        return self.recording.states[self.span.stop][0]

    @property
    def is_whole(self) -> bool:
        """Whether it has all blocks and all heads."""
        return self.span == Span(0, self.recording.n_blocks) and not self.heads

    # Forwards ---------------------------------------------------------------------------------------------------------

    @property
    def bias(self) -> Float[Tensor, "out_token out_channel"]:
        """B: the program at zero."""
        return self._at_zero

    @cached_property
    def _at_zero(self) -> Tensor:
        return self.recording.push(torch.zeros_like(self.input)[None], self.span, self.heads)[0]

    def push(self, x: Float[Tensor, "batch in_token in_channel"]) -> Float[Tensor, "batch out_token out_channel"]:
        """The affine map T·x + B."""
        return self._states(x, partial(self.recording.push, span=self.span, heads=self.heads))

    def _apply(self, x: Tensor) -> Tensor:
        return self._states(x, partial(self.recording.push, span=self.span, heads=self.heads, linear=True))

    def push_to_head(self, x: Float[Tensor, "batch in_token in_channel"], *, linear: bool = False) -> Tensor:
        """What the affine map, or its linear part, and the head end with on each state: (batch, …) of the readout."""
        push = partial(self.recording.push, span=self._to_end, heads=self.heads, linear=linear, to_logits=True)
        return self._states(x, push)

    @property
    def _to_end(self) -> Span:
        return Span(self.span.start, self.recording.n_blocks)

    def logits_at_zero(self, out_token: int) -> Float[Tensor, " class"]:
        """What the biases give of the logits at one output: the program and the head at zero."""
        return self.recording.logits(self._end_at_zero, out_token)[0]

    @cached_property
    def _end_at_zero(self) -> Tensor:
        return self.push_to_head(torch.zeros_like(self.input)[None])

    def _states(self, x: Tensor, push: Callable[[Tensor], Tensor]) -> Tensor:
        """One function of several states (batch, token, channel), some of them at a time."""
        most = fitting(4 * self.bytes_per_cotangent, MOST_STATES.get(self.device.type, 32), self.device)
        return torch.cat(in_parts(x, most, lambda part: self._several(push, part)))

    def _several(self, function: Callable[[Tensor], Tensor], items: Tensor) -> Tensor:
        """What a function of one state or cotangent gives for several, together where torch can."""
        if len(items) > 1 and self.recording.n_samples == 1 and not self.recording.is_streamed:
            try:
                return torch.vmap(lambda one: function(one[None])[0])(items)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
        return torch.cat([function(one[None]) for one in items])

    # Backwards --------------------------------------------------------------------------------------------------------

    def _adjoint(self, u: Tensor) -> Tensor:
        if len(u) >= ENOUGH_TO_FOLD and self.folded is not None:
            return self.adjoint_folded(u).to(self.dtype)
        return self.pull(u)

    def pull(self, u: Float[Tensor, "batch out_token out_channel"]) -> Float[Tensor, "batch in_token in_channel"]:
        """Tᵀ·u by the transposes of the program's steps."""
        pull = partial(self.recording.pull, span=self.span, heads=self.heads)
        return torch.cat(in_parts(u, CHUNK, lambda part: self._several(pull, part)))

    def pull_from_head(self, u: Tensor) -> Float[Tensor, "batch in_token in_channel"]:
        """Cotangents (batch, …) of what the head reads, or of its logits, to cotangents of the input."""
        pull = partial(self.recording.pull, span=self._to_end, heads=self.heads, to_logits=True)
        return torch.cat(in_parts(u, CHUNK, lambda part: self._several(pull, part)))

    def pull_logits(self, weights: Float[Tensor, "row class"], out_tokens: Sequence[int]) -> Tensor:
        """Gradients (row, token, channel) of weighted sums of logits, each at its own output."""
        rows = [self.recording.head_cotangent(one, i) for one, i in zip(weights, out_tokens, strict=True)]
        return self.pull_from_head(torch.cat(rows))

    # Many cotangents --------------------------------------------------------------------------------------------------

    @cached_property
    def folded(self) -> FoldedRows | None:
        """The folded adjoint, or None where a block cannot be folded or an input is too long to keep what it holds."""
        if self.recording.is_streamed:
            return None
        try:
            return FoldedRows(self.recording, self.span, self.heads, self.precision)
        except AnatomyError:
            return None

    def adjoint_folded(self, u: Tensor) -> Tensor:
        """Tᵀ·u by folded blocks."""
        assert self.folded is not None, "asked of an operator that folds"
        size = fitting(self.bytes_per_cotangent, len(u), self.device)
        parts = [self.folded.pull_states(part.transpose(0, 1).to(self.compute_type)) for part in u.split(size)]
        return torch.cat([part.transpose(0, 1) for part in parts])

    def _rows(self, out_token: int) -> TensorSlice:
        _, d_out, n_in, d_in = self.shape
        units = torch.eye(d_out, dtype=self.compute_type, device=self.device)
        rows: Tensor | None = None
        for piece in self.pull_outputs((out_token,), units[None]):
            if piece.is_all(1, d_out, n_in):
                return piece.rows.transpose(0, 1).to(self.dtype)
            if rows is None:
                rows = torch.zeros(d_out, n_in, d_in, dtype=self.dtype, device=self.device)
            rows[slice(*piece.cotangents), slice(*piece.tokens)] = piece.rows.transpose(0, 1)
        assert rows is not None, "there is at least one output channel"
        return rows

    @cached_property
    def bytes_per_cotangent(self) -> int:
        """About the memory for one cotangent on its way: the widest slot of the program, twice, and the state."""
        specs = self.recording.program.specs.values()
        widest = max(torch.Size(spec.shape).numel() for spec in specs) // self.recording.n_samples
        return (2 * widest + 4 * self.input.numel()) * self.compute_type.itemsize

    def pull_outputs(
        self, out_tokens: Sequence[int], starts: Float[Tensor, "output cotangent out_channel"]
    ) -> Iterator[Pulled]:
        """Cotangents that live on one output each, pulled to the input, as many at a time as go into free memory.

        Outputs go in groups, so that a causal model does little work above the diagonal. When memory runs out all the
        same, the groups are halved.
        """
        most = min(MOST_COTANGENTS.get(self.device.type, 2048), len(out_tokens) * starts.shape[1])
        most = fitting(self.bytes_per_cotangent, most, self.device)
        pieces = Pieces(len(out_tokens), starts.shape[1], most)
        folded = self.folded if len(out_tokens) * starts.shape[1] >= ENOUGH_TO_FOLD else None
        keep = folded is not None and self._matrices_fit(pieces.n_passes)
        for outputs, cotangents in pieces:
            tokens, part = out_tokens[slice(*outputs)], starts[slice(*outputs), slice(*cotangents)]
            pull = self._pull_back if folded is None else partial(folded.pull, keep_matrices=keep)
            pulled = pieces.attempt(partial(pull, tokens, part))
            if pulled is not None:
                rows, seen = pulled
                yield Pulled(rows=rows, tokens=seen, outputs=outputs, cotangents=cotangents)
                del rows, pulled
            elif folded is not None:
                keep = False
                folded.forget_matrices()
        if folded is not None:
            folded.forget_matrices()

    def _matrices_fit(self, n_passes: int) -> bool:
        """Whether the token-wise matrices of all blocks, worth keeping for several passes, go into free memory."""
        n_bytes = (self.span.stop - self.span.start) * self.n_tokens * self.n_channels**2 * self.compute_type.itemsize
        return n_passes > 2 and n_bytes < 0.3 * free_bytes(self.device)

    def _pull_back(self, out_tokens: Sequence[int], starts: Tensor) -> tuple[Tensor, Range]:
        """By the program: (token, cotangent, in_channel), for all tokens."""
        pulled = []
        for i, start in zip(out_tokens, starts, strict=True):
            u = torch.zeros(len(start), *self.shape[:2], dtype=self.dtype, device=self.device)
            u[:, i] = start.to(self.dtype)
            pulled.append(self.pull(u))
        return torch.cat(pulled).transpose(0, 1), Range(0, self.n_tokens)
