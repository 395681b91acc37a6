"""`FrozenOperator`: the attention tensor of a recorded pass, which is never stored.

`apply` runs the linear part of the program, `adjoint` walks it backwards, the bias is the program at zero. Many
cotangents at once (rows, norms, sketches) go by matrix products where the blocks can be folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import Range, TensorSlice
from tensorlens.errors import AnatomyError
from tensorlens.memory import Pieces, fitting, free_bytes, in_parts
from tensorlens.models.precision import Precision, compute_type
from tensorlens.operators.base import Pulled, TensorOperator
from tensorlens.operators.folding.pull import FoldedRows
from tensorlens.operators.folding.push import push_each_token
from tensorlens.program.several import of_each
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
        sample: Which sample of a recording of several; the others are zero wherever it is asked.
    """

    def __init__(
        self,
        recording: Recording,
        span: Span | None = None,
        heads: Heads | None = None,
        *,
        precision: Precision | None = None,
        sample: int = 0,
    ) -> None:
        self.recording, self.heads, self.sample = recording, dict(heads or {}), sample
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
        return self.recording.states[self.span.start][self.sample]

    @property
    def output(self) -> Float[Tensor, "out_token out_channel"]:
        """The state the recording found at the end of the range; X^N for the whole model."""
        return self.recording.states[self.span.stop][self.sample]

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
        return self.push(torch.zeros_like(self.input)[None])[0]

    def push(self, x: Float[Tensor, "batch in_token in_channel"]) -> Float[Tensor, "batch out_token out_channel"]:
        """The affine map T·x + B."""
        return self._states(x, _Way(self.recording.push, self.recording.push_each, self.span, self.heads))

    def _apply(self, x: Tensor) -> Tensor:
        way = _Way(self.recording.push, self.recording.push_each, self.span, self.heads, {"linear": True})
        return self._states(x, way)

    def push_to_head(self, x: Float[Tensor, "batch in_token in_channel"], *, linear: bool = False) -> Tensor:
        """What the affine map, or its linear part, and the head end with on each state: (batch, …) of the readout."""
        options = {"linear": linear, "to_logits": True}
        return self._states(x, _Way(self.recording.push, self.recording.push_each, self._to_end, self.heads, options))

    @property
    def _to_end(self) -> Span:
        return Span(self.span.start, self.recording.n_blocks)

    def logits_at_zero(self, out_token: int) -> Float[Tensor, " class"]:
        """What the biases give of the logits at one output: the program and the head at zero."""
        return self.recording.logits(self._end_at_zero, out_token)[0]

    @cached_property
    def _end_at_zero(self) -> Tensor:
        return self.push_to_head(torch.zeros_like(self.input)[None])

    def _states(self, x: Tensor, push: _Way) -> Tensor:
        """One function of several states (batch, token, channel), some of them at a time."""
        most = fitting(4 * self.bytes_per_cotangent, MOST_STATES.get(self.device.type, 32), self.device)
        return torch.cat(in_parts(x, most, lambda part: self._several(push, part)))

    def _several(self, way: _Way, items: Tensor) -> Tensor:
        """What goes one way for several states or cotangents, together where torch can."""
        n_samples, sample = self.recording.n_samples, self.sample
        if n_samples > 1:
            return torch.cat([way.one(_beside_zeros(one, sample, n_samples))[sample, None] for one in items])
        if len(items) > 1 and self.recording.is_streamed:
            return torch.cat(way.each([one[None] for one in items]))
        if len(items) == 1:
            return way.one(items)
        return of_each(lambda one: way.one(one[None])[0], items)

    # Backwards --------------------------------------------------------------------------------------------------------

    def _adjoint(self, u: Tensor) -> Tensor:
        if len(u) >= ENOUGH_TO_FOLD and self.folded is not None:
            return self.adjoint_folded(u).to(self.dtype)
        return self.pull(u)

    def pull(self, u: Float[Tensor, "batch out_token out_channel"]) -> Float[Tensor, "batch in_token in_channel"]:
        """Tᵀ·u by the transposes of the program's steps."""
        pull = _Way(self.recording.pull, self.recording.pull_each, self.span, self.heads)
        return torch.cat(in_parts(u, CHUNK, lambda part: self._several(pull, part)))

    def pull_from_head(self, u: Tensor) -> Float[Tensor, "batch in_token in_channel"]:
        """Cotangents (batch, …) of what the head reads, or of its logits, to cotangents of the input."""
        options = {"to_logits": True}
        pull = _Way(self.recording.pull, self.recording.pull_each, self._to_end, self.heads, options)
        return torch.cat(in_parts(u, CHUNK, lambda part: self._several(pull, part)))

    def pull_logits(self, weights: Float[Tensor, "row class"], out_tokens: Sequence[int]) -> Tensor:
        """Gradients (row, token, channel) of weighted sums of logits, each at its own output."""
        rows = [self.recording.head_cotangent(one, i) for one, i in zip(weights, out_tokens, strict=True)]
        return self.pull_from_head(torch.cat(rows))

    # Several samples --------------------------------------------------------------------------------------------------

    def pull_samples(self, u: Tensor, *, to_logits: bool = False) -> Tensor:
        """Cotangents of all samples of the recording by one pull: (sample, token, channel)."""
        return self.recording.pull(u, self._to_end if to_logits else self.span, self.heads, to_logits=to_logits)

    def push_each_token(self, out_tokens: Sequence[int]) -> Float[Tensor, "sample in_token out_channel"]:
        """$T_{ij} x_j$ of each sample's own output i, for every input j: a push per token, of all samples together."""
        if self.folded is not None:
            return push_each_token(self.folded, torch.tensor(out_tokens)).to(self.dtype)
        x = self.recording.states[self.span.start]
        samples, places = torch.arange(len(x), device=x.device), torch.tensor(out_tokens, device=x.device)
        found = []
        for j in range(x.shape[1]):
            alone = torch.zeros_like(x)
            alone[:, j] = x[:, j]
            found.append(self.recording.push(alone, self.span, self.heads, linear=True)[samples, places])
        return torch.stack(found, 1)

    def of_sample(self, sample: int) -> FrozenOperator:
        """The same for another sample of the recording; what is folded is shared."""
        other = FrozenOperator(self.recording, self.span, self.heads, precision=self.precision, sample=sample)
        other.folded = None if self.folded is None else self.folded.of_sample(sample)
        return other

    # Many cotangents --------------------------------------------------------------------------------------------------

    @cached_property
    def folded(self) -> FoldedRows | None:
        """The folded adjoint, or None where a block cannot be folded or an input is too long to keep what it holds."""
        if self.recording.is_streamed:
            return None
        try:
            folded = FoldedRows(self.recording, self.span, self.heads, self.precision)
        except AnatomyError:
            return None
        return folded.of_sample(self.sample)

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
        try:
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
        finally:  # also when it is cancelled on the way
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


@dataclass(frozen=True)
class _Way:
    """Through a range of blocks, forwards or backwards: for one state or cotangent, and for several."""

    function: Callable[..., Tensor]
    of_several: Callable[..., list[Tensor]]
    span: Span
    heads: Heads
    options: dict[str, bool] = field(default_factory=dict)

    def one(self, item: Tensor) -> Tensor:
        return self.function(item, self.span, self.heads, **self.options)

    def each(self, items: Sequence[Tensor]) -> list[Tensor]:
        return self.of_several(items, self.span, self.heads, **self.options)


def _beside_zeros(one: Tensor, sample: int, n_samples: int) -> Tensor:
    """A state or cotangent of one sample, with zeros for the others."""
    together = one.new_zeros(n_samples, *one.shape)
    together[sample] = one
    return together
