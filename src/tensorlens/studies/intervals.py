"""Means with bootstrap intervals: the same seed and number of units give the same draws, so differences are paired."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

N_RESAMPLES = 2000


def resampled_means(values: np.ndarray, seed: int, units: Sequence[Any] | None = None) -> np.ndarray:
    """Means of values drawn anew with replacement; (resample,).

    Args:
        values: One per sample.
        seed: Random seed for the draws.
        units: What each value belongs to, such as an article: all values of a unit are drawn together. Each value is
            its own unit if None.
    """
    _, of = np.unique(np.arange(len(values)) if units is None else np.array(units, dtype=str), return_inverse=True)
    sums, counts = np.bincount(of, values), np.bincount(of)
    generator = np.random.default_rng(seed)
    some = (generator.integers(len(sums), size=(100, len(sums))) for _ in range(N_RESAMPLES // 100))
    if units is None:
        return np.concatenate([values[drawn].mean(1) for drawn in some])
    return np.concatenate([sums[drawn].sum(1) / counts[drawn].sum(1) for drawn in some])


def interval(means: np.ndarray) -> tuple[float, float]:
    """The bounds of the middle 95 % of resampled means."""
    low, high = np.nanquantile(means, (0.025, 0.975))
    return float(low), float(high)


def short(value: Any, digits: int = 9) -> float:
    """Nine digits: far more than the data carry, and not the last bits, which depend on the machine."""
    return float(f"{float(value):.{digits}g}")
