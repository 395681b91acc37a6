"""Measures of rankings beyond those of evidence, added to the table of the library."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tensorlens.studies.judge_study import MEASURES, Measure, Scores, Truth, as_floats


def recall_at(k: int) -> Callable[[Scores, Truth], float]:
    """Share of the evidence among the first k."""

    def compute(scores: Scores, truth: Truth) -> float:
        values, is_evidence = as_floats(scores), np.array(truth) > 0
        found = 0.0
        for value in values[is_evidence]:
            above, ties = int((values > value).sum()), int((values == value).sum())
            found += min(1.0, max(0.0, (k - above) / ties))
        return found / int(is_evidence.sum())

    return compute


def outside(scores: Scores, truth: Truth) -> float:
    """Share of the magnitude that lies on units which are not evidence; 0 is best."""
    values = np.abs(np.where(np.isfinite(as_floats(scores)), as_floats(scores), 0.0))
    return float(values[np.array(truth) <= 0].sum() / values.sum()) if values.sum() else math.nan


def pearson(scores: Scores, truth: Truth) -> float:
    """Correlation of predicted and true effects; 0 where one of them does not vary."""
    return _correlation(np.where(np.isfinite(as_floats(scores)), as_floats(scores), 0.0), np.array(truth))


def spearman(scores: Scores, truth: Truth) -> float:
    """Correlation of the ranks of predicted and true effects, ties by their mean rank."""
    return _correlation(_ranks(as_floats(scores)), _ranks(np.array(truth, dtype=np.float64)))


def _spearman_by_magnitude(scores: Scores, truth: Truth) -> float:
    return spearman([None if one is None else abs(one) for one in scores], np.abs(truth).tolist())


def _ranks(values: np.ndarray) -> np.ndarray:
    order = np.sort(values)
    return (np.searchsorted(order, values, "left") + np.searchsorted(order, values, "right") - 1) / 2


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / size) if size else 0.0


def _nothing(truth: Truth) -> float:
    return 0.0


MEASURES |= {
    "recall_at_5": Measure(compute=recall_at(5)),
    "outside": Measure(compute=outside, random=lambda truth: sum(one <= 0 for one in truth) / len(truth), perfect=0.0),
    "spearman": Measure(compute=spearman, random=_nothing),
    "spearman_by_magnitude": Measure(compute=_spearman_by_magnitude, random=_nothing),
    "pearson": Measure(compute=pearson, random=_nothing),
}
