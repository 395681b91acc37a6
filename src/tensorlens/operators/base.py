"""The contract of an attention tensor: a few primitives, everything else derived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import FullTensor, HiddenBatch, Range, TensorSlice
from tensorlens.errors import InputError, SizeError
from tensorlens.memory import SHARE_OF_DENSE, free_bytes
from tensorlens.models.modes import own_modes


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """Cotangents of some outputs, pulled to the input.

    Attributes:
        rows: (token, cotangent, in_channel); cotangents of all outputs in a row, ordered by output.
        tokens: The input tokens they are for; all others are zero.
        outputs: Which of the outputs asked for.
        cotangents: Which of the cotangents of each.
    """

    rows: Tensor
    tokens: Range
    outputs: Range
    cotangents: Range

    def is_all(self, n_outputs: int, n_cotangents: int, n_tokens: int) -> bool:
        """Whether this is everything that was asked for, at all tokens."""
        return (self.outputs.size, self.cotangents.size, self.tokens.size) == (n_outputs, n_cotangents, n_tokens)


class TensorOperator(ABC):
    r"""A linear map $T \in R^{L×D×L×D}$ on hidden states, with a bias: $F(X) = T·X + B$.

    Abstract. A subclass gives `shape`, `bias`, `dtype`, `device`, and the actions on a batch; nothing here stores the
    tensor.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """Output tokens, output channels, input tokens, input channels."""

    @property
    @abstractmethod
    def bias(self) -> Float[Tensor, "out_token out_channel"]:
        """B, what the map adds at zero. Never computed as F(X) - T·X, which would make every check void."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where inputs are expected and results are given."""

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
        """The whole tensor. Refused with its size when it does not fit into the memory that is free."""
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
    """Tᵀ as something to multiply with."""

    def __init__(self, operator: TensorOperator) -> None:
        self.operator = operator
        self.shape = operator.shape[2:] + operator.shape[:2]

    def __matmul__(self, u: HiddenBatch) -> Float[Tensor, "*batch in_token in_channel"]:
        """Tᵀ·u."""
        return self.operator.adjoint(u)

    @property
    def T(self) -> TensorOperator:  # noqa: N802
        """Back again."""
        return self.operator


def check_token(token: int, n_tokens: int, name: str = "out_token") -> int:
    """A position as a number from 0; negative ones count from the end."""
    is_whole = isinstance(token, Integral) and not isinstance(token, bool)  # numpy's numbers are whole too
    if not is_whole or not -n_tokens <= token < n_tokens:
        raise InputError(
            f"`{name}` must be a position from {-n_tokens} to {n_tokens - 1} ({n_tokens} tokens); got {token!r}."
        )
    return int(token) % n_tokens


def check_fits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a tensor that would take more than its share of the free memory."""
    needed, free = torch.Size(shape).numel() * dtype.itemsize, free_bytes(device)
    if needed > SHARE_OF_DENSE * free:
        raise SizeError(
            f"The dense tensor of shape {tuple(shape)} in {dtype} takes {needed / 2**30:.1f} GiB; "
            f"{free / 2**30:.1f} GiB are free on {device}. "
            "Use `rows(i)` for one output, `apply`/`adjoint`, or a map, none of which stores it."
        )
