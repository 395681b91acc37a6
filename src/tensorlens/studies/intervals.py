"""Means with bootstrap intervals: the same seed and number of values give the same draws, so differences are paired."""

from __future__ import annotations

from typing import Any

import numpy as np

N_RESAMPLES = 2000


def resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Means of values drawn anew with replacement, as many as there are; (resample,)."""
    generator = np.random.default_rng(seed)
    some = (generator.integers(len(values), size=(100, len(values))) for _ in range(N_RESAMPLES // 100))
    return np.concatenate([values[drawn].mean(1) for drawn in some])


def interval(means: np.ndarray) -> tuple[float, float]:
    """The bounds of the middle 95 % of resampled means."""
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def short(value: Any, digits: int = 9) -> float:
    """Nine digits: far more than the data carry, and not the last bits, which depend on the machine."""
    return float(f"{float(value):.{digits}g}")
