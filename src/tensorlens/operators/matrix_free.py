"""`FrozenOperator`: the attention tensor of a frozen model, which is never stored.

`apply` goes by replay and single cotangents by backward passes. Many cotangents at once (rows, norms, sketches) go by
matrix products where the blocks can be folded, and by batched backward passes where they cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import Range, TensorSlice
from tensorlens.errors import AnatomyError
from tensorlens.folding.pull import FoldedRows, Way
from tensorlens.folding.search import state_of
from tensorlens.freezing.interpreter import Heads
from tensorlens.freezing.places import Span
from tensorlens.freezing.proof import Proof, compare, known_proof, remember_proof, tolerance_of
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import FactorReplay, Replay, read_logits
from tensorlens.memory import Pieces, fitting, free_bytes, in_parts
from tensorlens.models.precision import Precision, compute_type, tf32, tf32_allowed
from tensorlens.operators.base import Pulled, TensorOperator
from tensorlens.operators.engines import Engines, inner_width_by_sizes

CHUNK = 32
"""Cotangents pulled by backward passes at a time."""

MOST_STATES = {"cuda": 128, "cpu": 32}
"""States pushed at a time: a GPU has to be launched for each, a CPU's cache holds few."""

MOST_TO_HEAD = 8
"""States pushed to the head at a time: they come from long inputs, each of which keeps a device busy."""

ENOUGH_TO_FOLD = 8
"""Cotangents from which folding the blocks costs less than a backward pass for each."""

MOST_COTANGENTS = {"cuda": 12288, "cpu": 2048}
"""More cotangents at a time than this make no product faster, and let causal models do work above the diagonal."""


class FrozenOperator(TensorOperator):
    r"""$T_X$ of a frozen model over a range of blocks, perhaps with some heads silenced (Eq. 27).

    Costs nothing to hold beyond the frozen model until rows or norms are asked for, which may keep folded weights.

    Args:
        replay: The affine function of a recording.
        span: The range of blocks; all of them if None.
        heads: For each block named, a multiplier for each head.
        precision: How the products for rows, norms and sketches are computed: the model's own type, in float32 or
            better, if None.
    """

    def __init__(
        self, replay: Replay, span: Span | None = None, heads: Heads | None = None, *,
        precision: Precision | None = None,
    ) -> None:  # fmt: skip
        self.replay, self.recording, self.heads = replay, replay.recording, heads or {}
        self.precision: Precision | None = precision
        self.span = Span(0, replay.recording.n_blocks) if span is None else span
        self.compute_type = compute_type(precision, self.dtype)
        self.engines = Engines(self.replay, self.span, self.heads)

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
        return self.recording.states[self.span.start][0]

    @property
    def output(self) -> Float[Tensor, "out_token out_channel"]:
        """The state the recording found at the end of the range; X^N for the whole model."""
        return self.recording.states[self.span.stop][0]

    @property
    def bias(self) -> Float[Tensor, "out_token out_channel"]:
        """B: the frozen model at zero."""
        return self._at_zero

    @cached_property
    def _at_zero(self) -> Tensor:
        return self.replay.push(torch.zeros_like(self.input)[None], self.span, self.heads)[0]

    def logits_at_zero(self, out_token: int) -> Float[Tensor, " class"]:
        """What the biases give of the logits at one output: the frozen model and its head at zero."""
        return read_logits(self.recording, self._end_at_zero, out_token)[0]

    @cached_property
    def _end_at_zero(self) -> Tensor:
        return self.replay.push_to_head(torch.zeros_like(self.input)[None], self.span.start, self.heads)

    def push(self, x: Float[Tensor, "batch in_token in_channel"]) -> Float[Tensor, "batch out_token out_channel"]:
        """The affine map T·x + B, by replay."""
        together = MOST_STATES.get(self.device.type, 32) if len(x) > 1 and self.is_batchable else 1
        return torch.cat(in_parts(x, together, lambda part: self.replay.push(part, self.span, self.heads)))

    def push_to_head(self, x: Float[Tensor, "batch in_token in_channel"], read: Callable[[Tensor], Tensor]) -> Tensor:
        """What `read` takes of what the affine map and its head end with on each state: (batch, …)."""
        together = 1
        if self.is_streamed:  # one after the other, and what a block holds is made once for all of them
            together = fitting(4 * x[0].nbytes, len(x), self.device)
        elif len(x) > 1 and self.is_batchable:
            together = fitting(4 * self.bytes_per_cotangent, min(len(x), MOST_TO_HEAD), self.device)
        return torch.cat(
            in_parts(x, together, lambda part: read(self.replay.push_to_head(part, self.span.start, self.heads)))
        )

    @cached_property
    def is_batchable(self) -> bool:
        """Whether several states can be replayed at once. Tried, since a model may join batch and tokens (experts).

        Known from then on, for inputs that take the same way through the model.
        """
        if self.is_streamed:
            return True
        key = ("several states", *state_of(self.recording), self.span, tuple(self.heads), self.device.type)
        proof = None if self.recording.fingerprint is None else known_proof(self.recording.model, key)
        return (proof or remember_proof(self.recording.model, key, self._prove_batches())).holds

    def _prove_batches(self) -> Proof:
        # Another state with other sums over all of it: those of the same tokens in another order would be the same.
        noise = torch.randn(self.input.shape, generator=torch.Generator().manual_seed(0)).to(self.input)
        pair, accepted = torch.stack([self.input, noise * self.input]), 100 * torch.finfo(self.dtype).eps ** 0.75
        with tf32(False):  # whose rounding differs with the size of a batch
            try:
                together = self.replay.push(pair, self.span, self.heads)
            except Exception:  # noqa: BLE001  whatever the model's code makes of a second state
                return Proof(math.inf, accepted)
            alone = torch.cat([self.replay.push(one[None], self.span, self.heads) for one in pair])
        if together.shape != alone.shape:
            return Proof(math.inf, accepted)
        return Proof(float((together - alone).norm() / alone.norm()), accepted)

    def _apply(self, x: Tensor) -> Tensor:
        return self.push(x) - self.bias

    def _adjoint(self, u: Tensor) -> Tensor:
        if len(u) >= ENOUGH_TO_FOLD and self.folded is not None:
            found = self.adjoint_folded(u)
            if self._is_proved("states", lambda: (found, u), len(u)):
                return found.to(self.dtype)
        self.engines.note(self.engines.slow)
        return self.replay.pull(u, self.span, self.heads, chunk=CHUNK)

    def adjoint_folded(self, u: Tensor) -> Tensor:
        """Tᵀ·u by folded blocks, unproved."""
        assert self.folded is not None, "asked of an operator that folds"
        size = fitting(self.bytes_per_cotangent, len(u), self.device)
        parts = [self.folded.pull_states(part.transpose(0, 1).to(self.compute_type)) for part in u.split(size)]
        return torch.cat([part.transpose(0, 1) for part in parts])

    def pull_replayed(self, u: Tensor) -> Tensor:
        """Tᵀ·u one by one through the graph of a replay: shares nothing with the fast ways but the held factors."""
        with self.replay.graph(self.span, self.heads) as (x, y, _):
            return torch.cat([torch.autograd.grad(y, x, one[None].to(y), retain_graph=True)[0] for one in u])

    def _rows(self, out_token: int) -> TensorSlice:
        n_out, d_out, n_in, d_in = self.shape
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

    # Many cotangents -------------------------------------------------------------------------------------------------

    @cached_property
    def folded(self) -> FoldedRows | None:
        """The folded adjoint, or None where a block cannot be taken apart or factors are not kept."""
        if self.is_streamed or not self.recording.rules.holds_factors:
            return None
        try:
            return FoldedRows(self.recording, self.span, self.heads, self.precision)
        except AnatomyError:
            return None

    def beside(self, recording: Recording) -> FrozenOperator:
        """The same operator of another sample, recorded together with this one: what is folded is shared."""
        other = FrozenOperator(FactorReplay(recording), self.span, self.heads, precision=self.precision)
        if self.folded is not None:
            other.folded = self.folded.beside(recording)
        return other

    @property
    def may_fold(self) -> bool:
        """Whether folding is worth a try, as far as one can say without looking at a block."""
        recording = self.recording
        is_chain = not (recording.n_encoder_blocks or recording.side_channels or recording.starts_at_embedding)
        return is_chain and not self.is_streamed and recording.rules.holds_factors

    @property
    def is_streamed(self) -> bool:
        """Whether no factors are kept, because the input is long."""
        return not self.replay.keeps_factors

    @cached_property
    def bytes_per_cotangent(self) -> int:
        """Memory for one cotangent on its way: it, what attention and feed-forward make of it, and their sum."""
        inner = inner_width_by_sizes(self.recording)
        return (4 * self.n_channels + inner) * self.n_tokens * self.compute_type.itemsize

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
            pull = self._pull_back if folded is None else partial(self._pull_folded, folded, keep_matrices=keep)
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

    def _pull_folded(
        self, folded: FoldedRows, out_tokens: Sequence[int], starts: Tensor, *, keep_matrices: bool
    ) -> tuple[Tensor, Range]:
        """By matrix products, if they prove right; else by backward passes."""
        rows, seen, way = folded.pull(out_tokens, starts, keep_matrices=keep_matrices)
        in_a_row = out_tokens[-1] - out_tokens[0] == len(out_tokens) - 1  # others are gathered
        asked = (*starts.shape[:2], in_a_row, seen.size == self.n_tokens)
        if self._is_proved(way, lambda: self.as_states(rows, seen, out_tokens, starts), *asked):
            return rows, seen
        return self._pull_back(out_tokens, starts)

    def as_states(
        self, rows: Tensor, tokens: Range, out_tokens: Sequence[int], starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What was pulled as (1, token, channel), cotangents added up at random, and the cotangent it belongs to."""
        weights = torch.randn(starts.shape[:2], generator=torch.Generator().manual_seed(0)).to(starts)
        whole = rows.new_zeros(1, self.n_tokens, rows.shape[2])
        whole[0, slice(*tokens)] = torch.einsum("tcd,c->td", rows, weights.flatten().to(rows))
        u = starts.new_zeros(1, *self.shape[:2])
        for i, some, start in zip(out_tokens, weights, starts, strict=True):
            u[0, i] += some @ start
        return whole, u

    def _is_proved(self, way: Way, answer: Callable[[], tuple[Tensor, Tensor]], *asked: int) -> bool:
        """Whether folded answers of this kind agree with the replay; found out the first time one is given.

        Args:
            way: How the cotangents went.
            answer: What was pulled and from which cotangents, as (cotangent, token, channel).
            asked: How many outputs and cotangents, which counts by powers of two: work is cut otherwise for few than
                for many. And whether the outputs follow each other, and see every token.
        """
        magnitudes = tuple([int(size).bit_length() for size in (self.n_tokens, *asked)])
        heads = tuple([(n, tuple(multiplier.tolist())) for n, multiplier in self.heads.items()])
        key = (*state_of(self.recording), way, magnitudes, self.span, heads, self.precision, self.device.type)
        proof = None if self.recording.fingerprint is None else known_proof(self.recording.model, key)
        if proof is None:
            proof = self.prove(*answer())
            remember_proof(self.recording.model, key, proof)
        if proof.holds:
            self.engines.note("captured" if way == "captured" else "folded", way)
        else:
            self.engines.give_up(proof)
        return proof.holds

    @property
    def accepted(self) -> float:
        """How far folded answers may be from a replay's, by the types of both."""
        is_tf32 = self.precision == "tf32" or self.precision is None and tf32_allowed() and self.device.type == "cuda"
        return tolerance_of(self.dtype, self.compute_type, is_tf32=is_tf32)

    def prove(self, pulled: Tensor, u: Tensor) -> Proof:
        """Compare folded answers with the replay's; coarse products by their twins in float32 as well."""
        found = compare(pulled, u, self.pull_replayed, self.accepted)
        if found.holds and self.precision in ("tf32", "bfloat16"):
            # Rounding would hide a wrong structure, which does not depend on the precision.
            twin = FoldedRows(self.recording, self.span, self.heads, "float32")
            one = u[:1].transpose(0, 1).to(twin.dtype)
            exact = twin.pull_states(one).transpose(0, 1)
            tight = compare(exact, u[:1], self.pull_replayed, tolerance_of(self.dtype, twin.dtype, is_tf32=False))
            return found if tight.holds else tight
        return found

    def _matrices_fit(self, n_passes: int) -> bool:
        """Whether the token-wise matrices of all blocks, worth keeping for several passes, go into free memory."""
        n_bytes = (self.span.stop - self.span.start) * self.n_tokens * self.n_channels**2 * self.compute_type.itemsize
        return n_passes > 2 and n_bytes < 0.3 * free_bytes(self.device)

    def _pull_back(self, out_tokens: Sequence[int], starts: Tensor) -> tuple[Tensor, Range]:
        """By backward passes: (token, cotangent, in_channel), for all tokens."""
        self.engines.note(self.engines.slow)
        pulled = [
            self.replay.pull(
                start.to(self.dtype), self.span, self.heads, read=lambda y, i=i: y[0, i], chunk=CHUNK
            ).reshape(-1, self.n_tokens, self.n_channels)
            for i, start in zip(out_tokens, starts, strict=True)
        ]
        return torch.cat(pulled).transpose(0, 1), Range(0, self.n_tokens)
