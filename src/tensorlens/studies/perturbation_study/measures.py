"""The effect of a perturbation, as numbers: which tokens go at each step, how far the output moves, the area under it.

Mathematics only: scores, states and probabilities in, numbers out. Definitions as in the paper's first evaluation, with
what it leaves open marked as a convention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.tolerances import in_float64

Order = Literal["most", "least"]
ORDERS: tuple[Order, ...] = ("most", "least")
METRICS = ("hs_mse", "abs_aopc", "aopc", "accuracy")
RISING = ("hs_mse", "abs_aopc", "aopc")
"""Metrics that grow as more is lost; accuracy falls."""
GRID = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""Convention: the paper says 0 to 30 %, but not in how many steps."""


def ranking(scores: Float[Tensor, " token"], maskable: Sequence[int], order: Order, *, absolute: bool) -> list[int]:
    """The maskable tokens in the order in which they are replaced; of equal scores the earlier token goes first.

    Convention: by signed score, since the paper replaces the highest first; `absolute` goes by magnitude.
    """
    kept = in_float64(scores[list(maskable)])
    if not bool(torch.isfinite(kept).all()):
        raise InputError("The scores contain NaN or infinity, which cannot be ranked.")
    kept = kept.abs() if absolute else kept
    return [maskable[i] for i in kept.argsort(descending=order == "most", stable=True).tolist()]


def masks_along(ranked: Sequence[int], n_tokens: int, grid: Sequence[float]) -> Bool[Tensor, "step token"]:
    """Which tokens are replaced at each fraction f above zero: the first ⌈f·M⌉ of the M maskable ones."""
    places = torch.full((n_tokens,), len(ranked))
    places[list(ranked)] = torch.arange(len(ranked))
    # Rounded first: 0.15 · 20 is a little more than 3 in floating point.
    counts = torch.tensor([math.ceil(round(fraction * len(ranked), 9)) for fraction in grid[1:]])
    return places < counts[:, None]


def hidden_state_mse(
    clean: Float[Tensor, " channel"], perturbed: Float[Tensor, "copy channel"]
) -> Float[Tensor, " copy"]:
    r"""HS-MSE: $\frac1D \lVert F(X)_o - F(X_f)_o \rVert^2$."""
    return (in_float64(perturbed) - in_float64(clean)).square().mean(-1)


def probability_drop(clean: Float[Tensor, " class"], perturbed: Float[Tensor, "copy class"]) -> Float[Tensor, " copy"]:
    r"""AOPC: $p_X(c) - p_{X_f}(c)$ for the class c that wins on the clean input.

    Paper: its AOPC is the absolute value of this, here abs-AOPC.
    """
    winner = int(clean.argmax())
    probability = in_float64(clean).softmax(-1)[winner]
    return probability - in_float64(perturbed).softmax(-1)[:, winner]


def is_right(logits: Float[Tensor, "copy class"], label: int) -> Float[Tensor, " copy"]:
    """1 where the label wins: the accuracy of one sample, as the paper's text defines its curve."""
    return in_float64((logits.argmax(-1) == label).float())


def is_better(order: Order, metric: str) -> bool:
    """Whether a larger area is better: more is lost early where the most relevant tokens go first."""
    return (order == "most") == (metric in RISING)


def auc(curve: Sequence[float], grid: Sequence[float]) -> float:
    """Area under a curve over its range: the mean height, by trapezoids.

    Convention: divided by the range, so it does not depend on where the grid ends. Times the range it is the
    other scale of the AUC, the area itself; the paper does not say which one it reports.
    """
    area = sum(
        (right - left) * (low + high) / 2
        for left, right, low, high in zip(grid[:-1], grid[1:], curve[:-1], curve[1:], strict=True)
    )
    return area / (grid[-1] - grid[0])


def check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    """The grid as floats: from 0 upwards, to at most 1."""
    values = tuple(float(value) for value in grid)
    if (
        len(values) < 2
        or values[0] != 0
        or values[-1] > 1
        or not all(a < b for a, b in zip(values, values[1:], strict=False))
    ):
        raise InputError(f"Expected a grid of rising fractions from 0 to at most 1; got {list(grid)}.")
    return values
