r"""Operators that are never stored as a matrix: the contract, `FrozenOperator` of a recorded pass, and `MeanTensor`.

`apply` runs the linear part of the program, `adjoint` walks it backwards, the bias is the program at zero. Many
cotangents at once (rows, norms, sketches) go by matrix products if the blocks can be folded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import FullTensor, HiddenBatch, Range, TensorSlice
from tensorlens.errors import AnatomyError, InputError, SizeError
from tensorlens.memory import SHARE_OF_DENSE, SHARE_OF_TOKEN_MATRICES, Portions, fitting, free_bytes, in_parts
from tensorlens.models.runner import Precision, compute_type, matmul_mode, own_modes
from tensorlens.program.folding import FoldedBlocks
from tensorlens.program.program import of_each
from tensorlens.recording.recording import Heads, Recording, Span
from tensorlens.views.printing import Printed

CHUNK = 32
"""Cotangents pulled at a time if blocks are not folded."""

MOST_STATES = {"cuda": 128, "cpu": 32}
"""States pushed at a time: each costs a launch on a GPU, and a CPU's cache holds few."""

ENOUGH_TO_FOLD = 8
"""From this number of cotangents on, folding the blocks is cheaper than pulling each cotangent."""

MOST_COTANGENTS = {"cuda": 12288, "cpu": 2048}
"""More cotangents at a time would not make products faster, and would add work above the diagonal."""


# The contract --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """Cotangents of some outputs, pulled to the input.

    Attributes:
        rows: (token, cotangent, in_channel); cotangents of all outputs in a row, ordered by output.
        tokens: The input tokens they belong to; those of all other tokens are zero.
        outputs: Which of the requested outputs.
        cotangents: Which of the cotangents of each output.
    """

    rows: Tensor
    tokens: Range
    outputs: Range
    cotangents: Range

    def is_all(self, n_outputs: int, n_cotangents: int, n_tokens: int) -> bool:
        """Whether this is everything that was requested, at all tokens."""
        return (self.outputs.size, self.cotangents.size, self.tokens.size) == (n_outputs, n_cotangents, n_tokens)


class TensorOperator(ABC):
    r"""A linear map $T \in R^{L×D×L×D}$ on hidden states, with a bias: $F(X) = T·X + B$.

    Abstract. A subclass sets the attributes and gives `bias` and the actions on a batch; nothing here stores the
    tensor.

    Attributes:
        shape: Output tokens, output channels, input tokens, input channels.
        dtype: Type of the numbers.
        device: Where inputs are expected and results are given.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    @abstractmethod
    def bias(self) -> Float[Tensor, "out_token out_channel"]:
        """B, the value of the map at zero. It is never computed as F(X) - T·X, which would make every check void."""

    @abstractmethod
    def _apply(self, x: Float[Tensor, "batch in_token in_channel"]) -> Float[Tensor, "batch out_token out_channel"]:
        """T·x for a batch."""

    @abstractmethod
    def _adjoint(self, u: Float[Tensor, "batch out_token out_channel"]) -> Float[Tensor, "batch in_token in_channel"]:
        """Tᵀ·u for a batch."""

    @abstractmethod
    def _rows(self, out_token: int) -> TensorSlice:
        """T[i] for a position that exists."""

    @property
    def n_tokens(self) -> int:
        """L, the number of input tokens."""
        return self.shape[2]

    @property
    def n_channels(self) -> int:
        """D, the number of input channels."""
        return self.shape[3]

    @own_modes
    def apply(self, x: HiddenBatch) -> Float[Tensor, "*batch out_token out_channel"]:
        """T·x (Eq. 4) for x of shape (L, D) or (batch, L, D). Linear: the bias is not added."""
        batch = self._checked(x, self.shape[2:], "apply")
        found = self._apply(batch) if len(batch) else batch.new_empty(0)
        return found.reshape(*x.shape[:-2], *self.shape[:2])

    @own_modes
    def adjoint(self, u: HiddenBatch) -> Float[Tensor, "*batch in_token in_channel"]:
        """Tᵀ·u, shapes as in `apply`: the gradient of ⟨u, T·x⟩ by x."""
        batch = self._checked(u, self.shape[:2], "adjoint")
        found = self._adjoint(batch) if len(batch) else batch.new_empty(0)
        return found.reshape(*u.shape[:-2], *self.shape[2:])

    @own_modes
    def rows(self, out_token: int) -> TensorSlice:
        """The dense slice T[i] of shape (out_channel, in_token, in_channel) for one output (Eq. 20)."""
        return self._rows(check_token(out_token, self.shape[0]))

    def pull_outputs(
        self, out_tokens: Sequence[int], starts: Float[Tensor, "output cotangent out_channel"]
    ) -> Iterator[Pulled]:
        """Tᵀ·u for cotangents that live on one output each, a piece at a time and in no more memory than is free."""
        n_cotangents = starts.shape[1]
        for row, i in enumerate(out_tokens):
            u = starts.new_zeros(n_cotangents, *self.shape[:2])
            u[:, i] = starts[row]
            yield Pulled(
                rows=self.adjoint(u).transpose(0, 1),
                tokens=Range(0, self.n_tokens),
                outputs=Range(row, row + 1),
                cotangents=Range(0, n_cotangents),
            )

    @own_modes
    def dense(self) -> FullTensor:
        """The whole tensor. Refused, with its size, if it does not fit in free memory."""
        check_fits(self.shape, self.dtype, self.device)
        return torch.stack([self._rows(i) for i in range(self.shape[0])])

    @property
    def T(self) -> Transposed:  # noqa: N802
        """The transpose: `T.T @ u` is `T.adjoint(u)`."""
        return Transposed(self)

    def __matmul__(self, x: HiddenBatch) -> Float[Tensor, "*batch out_token out_channel"]:
        """`T @ x` is `T.apply(x)`."""
        return self.apply(x)

    def _checked(self, x: Tensor, expected: tuple[int, ...], action: str) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() < 2 or tuple(x.shape[-2:]) != tuple(expected):
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"`{action}` expected a tensor of shape (…, {expected[0]}, {expected[1]}) (token, channel); got {got}."
            )
        if not x.is_floating_point():
            raise InputError(f"`{action}` expected floating-point numbers; got {x.dtype}. Convert with `.float()`.")
        if x.layout is not torch.strided or x.is_meta:
            kind = "meta" if x.is_meta else str(x.layout).removeprefix("torch.")
            raise InputError(f"`{action}` expected an ordinary dense tensor; got a {kind} one.")
        return x.to(device=self.device, dtype=self.dtype).reshape(-1, *expected).contiguous()


class Transposed:
    """Tᵀ as an operand of `@`."""

    def __init__(self, operator: TensorOperator) -> None:
        self.operator = operator
        self.shape = operator.shape[2:] + operator.shape[:2]

    def __matmul__(self, u: HiddenBatch) -> Float[Tensor, "*batch in_token in_channel"]:
        """Tᵀ·u."""
        return self.operator.adjoint(u)

    @property
    def T(self) -> TensorOperator:  # noqa: N802
        """The original operator."""
        return self.operator


def check_token(token: int, n_tokens: int, name: str = "out_token") -> int:
    """A position as a number from 0; negative numbers count from the end."""
    is_whole = isinstance(token, Integral) and not isinstance(token, bool)  # NumPy integers too
    if not is_whole or not -n_tokens <= token < n_tokens:
        raise InputError(
            f"`{name}` must be a position from {-n_tokens} to {n_tokens - 1} ({n_tokens} tokens); got {token!r}."
        )
    return int(token) % n_tokens


def check_fits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a dense tensor that needs more than its share of the free memory."""
    needed, free = torch.Size(shape).numel() * dtype.itemsize, free_bytes(device)
    if needed > SHARE_OF_DENSE * free:
        raise SizeError(
            f"The dense tensor of shape {tuple(shape)} in {dtype} takes {needed / 2**30:.1f} GiB; "
            f"{free / 2**30:.1f} GiB are free on {device}. "
            "Use `rows(i)` for one output, `apply`/`adjoint`, or a map, none of which stores it."
        )


# A recorded pass ------------------------------------------------------------------------------------------------------


class FrozenOperator(TensorOperator):
    r"""$T_X$ of a recorded pass over a range of blocks, perhaps with some heads left out (Eq. 27).

    Args:
        recording: The pass.
        span: The range of blocks; all of them if None.
        heads: A multiplier per head, for each block named.
        precision: The precision of products for rows, norms and sketches: the model's own type, in float32 or
            better, if None.
        sample: Which sample of a recording of several; in every question the others are zero.

    Attributes:
        input: The state entering the first block of the range; X⁰ for the whole model.
        output: The state the recording found at the end of the range; X^N for the whole model.
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
        self.input: Float[Tensor, "in_token in_channel"] = recording.states[self.span.start][sample]
        self.output: Float[Tensor, "out_token out_channel"] = recording.states[self.span.stop][sample]
        self.shape = (*self.output.shape, *self.input.shape)  # type: ignore[assignment]
        self.dtype, self.device = self.input.dtype, self.input.device
        self.compute_type = compute_type(precision, self.dtype)

    def but(self, **changes: Any) -> FrozenOperator:
        """A copy with a different span, heads, precision or sample."""
        now = {"span": self.span, "heads": self.heads, "precision": self.precision, "sample": self.sample}
        other = FrozenOperator(self.recording, **now | changes)
        if changes.keys() == {"sample"}:
            other.folded = self.folded
        return other

    @property
    def is_whole(self) -> bool:
        """Whether it has all blocks and all heads."""
        return self.span == Span(0, self.recording.n_blocks) and not self.heads

    @property
    def n_blocks(self) -> int:
        """Number of blocks in the range."""
        return self.span.stop - self.span.start

    # Forwards ---------------------------------------------------------------------------------------------------------

    @cached_property
    def bias(self) -> Float[Tensor, "out_token out_channel"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """B: the program at zero."""
        return self.push(torch.zeros_like(self.input)[None])[0]

    def push(self, x: Float[Tensor, "batch in_token in_channel"]) -> Float[Tensor, "batch out_token out_channel"]:
        """The affine map T·x + B."""
        return self._forwards(x, self.span)

    def _apply(self, x: Tensor) -> Tensor:
        return self._forwards(x, self.span, linear=True)

    def push_to_head(self, x: Float[Tensor, "batch in_token in_channel"], *, linear: bool = False) -> Tensor:
        """The readout (batch, …) of the affine map, or of its linear part, and the head at each state."""
        return self._forwards(x, self._to_end, linear=linear, to_logits=True)

    @property
    def _to_end(self) -> Span:
        return Span(self.span.start, self.recording.n_blocks)

    def logits_at_zero(self, out_token: int) -> Float[Tensor, " class"]:
        """The part of the biases in the logits at one output: the program and the head at zero."""
        return self.recording.logits(self._end_at_zero, out_token)[0]

    @cached_property
    def _end_at_zero(self) -> Tensor:
        return self.push_to_head(torch.zeros_like(self.input)[None])

    def _forwards(self, x: Tensor, span: Span, **options: bool) -> Tensor:
        most = MOST_STATES.get(self.device.type, 32)
        if len(x) > 1:
            most = fitting(4 * self.bytes_per_cotangent, most, self.device)
        each = partial(self.recording.push_each, span=span, heads=self.heads, **options)
        return torch.cat(in_parts(x, most, partial(self._several, each)))

    def _several(self, each: Callable[[list[Tensor]], list[Tensor]], items: Tensor) -> Tensor:
        """Several states or cotangents through the program: together if torch can, otherwise block by block.

        Args:
            each: Takes a list of them.
            items: All of them.
        """
        n_samples, sample = self.recording.n_samples, self.sample
        if n_samples > 1:
            return torch.cat([each([beside_zeros(item, sample, n_samples)])[0][sample, None] for item in items])
        if len(items) == 1 or self.recording.is_streamed:
            return torch.cat(each([item[None] for item in items]))
        return of_each(lambda item: each([item[None]])[0][0], items)

    # Backwards --------------------------------------------------------------------------------------------------------

    def _adjoint(self, u: Tensor) -> Tensor:
        if len(u) >= ENOUGH_TO_FOLD and self.folded is not None:
            return self.adjoint_folded(u).to(self.dtype)
        return self.pull(u)

    def pull(self, u: Float[Tensor, "batch out_token out_channel"]) -> Float[Tensor, "batch in_token in_channel"]:
        """Tᵀ·u by the transposes of the program's steps."""
        return self._backwards(u, self.span)

    def pull_from_head(self, u: Tensor) -> Float[Tensor, "batch in_token in_channel"]:
        """Cotangents (batch, …) of the head's input, or of its logits, to cotangents of the model's input."""
        return self._backwards(u, self._to_end, to_logits=True)

    def _backwards(self, u: Tensor, span: Span, **options: bool) -> Tensor:
        each = partial(self.recording.pull_each, span=span, heads=self.heads, **options)
        return torch.cat(in_parts(u, CHUNK, partial(self._several, each)))

    # Several samples --------------------------------------------------------------------------------------------------

    def pull_samples(self, u: Tensor, *, to_logits: bool = False) -> Tensor:
        """Cotangents of all samples of the recording by one pull: (sample, token, channel)."""
        return self.recording.pull(u, self._to_end if to_logits else self.span, self.heads, to_logits=to_logits)

    def push_each_token(self, out_tokens: Sequence[int]) -> Float[Tensor, "sample in_token out_channel"]:
        """$T_{ij} x_j$ of each sample's own output i, for every input j: a push per token, of all samples together."""
        x, places = self.recording.states[self.span.start], torch.tensor(out_tokens)
        if self.folded is not None:
            with self._folding():
                return self.folded.push_each_token(x, places).to(self.dtype)
        samples, found = torch.arange(len(x), device=x.device), list[Tensor]()
        for j in range(x.shape[1]):
            alone = torch.zeros_like(x)
            alone[:, j] = x[:, j]
            pushed = self.recording.push(alone, self.span, self.heads, linear=True)
            found.append(pushed[samples, places.to(x.device)])
        return torch.stack(found, 1)

    # Many cotangents --------------------------------------------------------------------------------------------------

    @cached_property
    def folded(self) -> FoldedBlocks | None:
        """The folded blocks; None if one cannot be folded, or if the input is too long to keep its constants."""
        if self.recording.is_streamed:
            return None
        try:
            blocks = [
                self.recording.part(Span(n, n + 1), {n: self.heads[n]} if n in self.heads else None)
                for n in range(*self.span)
            ]
            return FoldedBlocks(blocks, self.span.start, self.recording.name, self.compute_type)
        except AnatomyError:
            return None

    @contextmanager
    def _folding(self) -> Iterator[None]:
        """A context for products of folded blocks: in the requested precision, and only if no weight has changed."""
        self.recording.part(self.span, self.heads)
        with matmul_mode(self.precision):
            yield

    def adjoint_folded(self, u: Tensor, *, by_matrices: bool = False) -> Tensor:
        """Tᵀ·u by folded blocks; `by_matrices` as rows and norms go, with the token-wise matrices of all tokens."""
        assert self.folded is not None, "only for an operator that folds"
        size = fitting(self.bytes_per_cotangent, len(u), self.device)
        pull = partial(self.folded.pull, sample=self.sample, keep_matrices=by_matrices)
        with self._folding():
            parts = [pull(part.transpose(0, 1)).transpose(0, 1) for part in u.split(size)]
        self.folded.forget_matrices()
        return torch.cat(parts)

    def _rows(self, out_token: int) -> TensorSlice:
        _, d_out, n_in, d_in = self.shape
        units = torch.eye(d_out, dtype=self.compute_type, device=self.device)
        rows: Tensor | None = None
        for piece in self.pull_outputs((out_token,), units[None]):
            if piece.is_all(1, d_out, n_in):  # no second copy of a tensor that may be large
                return piece.rows.transpose(0, 1).to(self.dtype)
            if rows is None:
                rows = torch.zeros(d_out, n_in, d_in, dtype=self.dtype, device=self.device)
            rows[slice(*piece.cotangents), slice(*piece.tokens)] = piece.rows.transpose(0, 1)
        assert rows is not None, "there is at least one output channel"
        return rows

    @cached_property
    def bytes_per_cotangent(self) -> int:
        """About the memory for one cotangent on its way: the widest slot of the program, twice, and the state."""
        sizes = [math.prod(spec.shape) for spec in self.recording.program.specs.values()]
        widest = max(sizes) // self.recording.n_samples
        return (2 * widest + 4 * self.input.numel()) * self.compute_type.itemsize

    def pull_outputs(
        self, out_tokens: Sequence[int], starts: Float[Tensor, "output cotangent out_channel"]
    ) -> Iterator[Pulled]:
        """Cotangents that live on one output each, pulled to the input, as many at a time as fit in free memory.

        Outputs are processed in groups, so a causal model does little work above the diagonal. If memory still runs
        out, the groups are halved.
        """
        most = min(MOST_COTANGENTS.get(self.device.type, 2048), len(out_tokens) * starts.shape[1])
        most = fitting(self.bytes_per_cotangent, most, self.device)
        pieces = Portions(len(out_tokens), starts.shape[1], most)
        folded = self.folded if len(out_tokens) * starts.shape[1] >= ENOUGH_TO_FOLD else None
        keep = folded is not None and self.matrices_fit(pieces.n_passes)
        try:
            for outputs, cotangents in pieces:
                tokens, part = out_tokens[slice(*outputs)], starts[slice(*outputs), slice(*cotangents)]
                pulled = pieces.attempt(partial(self._pull_some, folded, tokens, part, keep))
                if pulled is not None:
                    rows, seen = pulled
                    yield Pulled(rows=rows, tokens=seen, outputs=outputs, cotangents=cotangents)
                    del rows, pulled
                elif folded is not None:
                    keep = False
                    folded.forget_matrices()
        finally:  # also if it is cancelled
            if folded is not None:
                folded.forget_matrices()

    def matrices_fit(self, n_passes: int) -> bool:
        """Whether the token-wise matrices of all blocks, worth keeping for several passes, fit in free memory."""
        n_bytes = self.n_blocks * self.n_tokens * self.n_channels**2 * self.compute_type.itemsize
        return n_passes > 2 and n_bytes < SHARE_OF_TOKEN_MATRICES * free_bytes(self.device)

    def _pull_some(
        self, folded: FoldedBlocks | None, out_tokens: Sequence[int], starts: Tensor, keep: bool
    ) -> tuple[Tensor, Range]:
        """Some cotangents by folded blocks, or by the program: (token, cotangent, in_channel), and the tokens."""
        if folded is not None:
            with self._folding():
                return folded.pull_outputs(out_tokens, starts, self.sample, keep_matrices=keep)
        pulled = []
        for i, start in zip(out_tokens, starts, strict=True):
            u = torch.zeros(len(start), *self.shape[:2], dtype=self.dtype, device=self.device)
            u[:, i] = start.to(self.dtype)
            pulled.append(self.pull(u))
        return torch.cat(pulled).transpose(0, 1), Range(0, self.n_tokens)


def beside_zeros(one: Tensor, sample: int, n_samples: int) -> Tensor:
    """A state or cotangent of one sample, with zeros for the others."""
    together = one.new_zeros(n_samples, *one.shape)
    together[sample] = one
    return together


# A mean ---------------------------------------------------------------------------------------------------------------


class MeanTensor(TensorOperator, Printed):
    r"""The mean operator $\frac{1}{m}\sum_i T_{X_i}$ with the mean bias (Eq. 26), for relation decoding.

    Matrix-free: it keeps the operators and averages their results. All must have the same shape.
    """

    def __init__(self, tensors: Sequence[TensorOperator]) -> None:
        self.tensors = tuple(tensors) if isinstance(tensors, Iterable) else (tensors,)
        if not self.tensors:
            raise InputError("`MeanTensor` expected at least one attention tensor; got none.")
        wrong = [one for one in self.tensors if not isinstance(one, TensorOperator)]
        if wrong or not isinstance(tensors, Iterable):
            raise InputError(f"`MeanTensor` expected a list of attention tensors; got {(*wrong, tensors)[0]!r}.")
        shapes = {tensor.shape for tensor in self.tensors}
        if len(shapes) > 1:
            raise InputError(
                f"`MeanTensor` expected attention tensors of one shape; got {sorted(shapes)}. Use examples with "
                "the same number of tokens."
            )
        first = self.tensors[0]
        self.shape, self.dtype, self.device = first.shape, first.dtype, first.device

    def __repr__(self) -> str:
        """One line: how many operators, of which size."""
        n_out, d_out, n_in, d_in = self.shape
        return f"MeanTensor({len(self.tensors)} operators, {n_out} × {d_out} from {n_in} × {d_in})"

    @property
    @own_modes
    def bias(self) -> Float[Tensor, "out_token out_channel"]:
        """The mean of the biases."""
        return self._mean([tensor.bias for tensor in self.tensors])

    @own_modes
    def __call__(self, x: Tensor) -> Tensor:
        r"""The affine prediction $\bar T·x + \bar B$."""
        return self.apply(x) + self.bias

    def _apply(self, x: Tensor) -> Tensor:
        return self._mean([tensor.apply(x) for tensor in self.tensors])

    def _adjoint(self, u: Tensor) -> Tensor:
        return self._mean([tensor.adjoint(u) for tensor in self.tensors])

    def _rows(self, out_token: int) -> TensorSlice:
        # A running sum: one slice at a time is all the memory this takes.
        total = self.tensors[0].rows(out_token)
        for tensor in self.tensors[1:]:
            total = total + tensor.rows(out_token).to(total)
        return total / len(self.tensors)

    def _mean(self, parts: list[Tensor]) -> Tensor:
        return torch.stack([part.to(parts[0]) for part in parts]).mean(0)
