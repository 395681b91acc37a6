"""`MeanTensor`: the mean of attention tensors over examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import TensorSlice
from tensorlens.errors import InputError
from tensorlens.models.modes import own_modes
from tensorlens.operators.operator import TensorOperator
from tensorlens.views.printing import Printed


class MeanTensor(TensorOperator, Printed):
    r"""The mean operator $\frac{1}{m}\sum_i T_{X_i}$ with the mean bias (Eq. 26), for relation decoding.

    Matrix-free: it holds the operators and averages what they do. All must have one shape.
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
