r"""How a ranking is compared with the answer; for each measure what a perfect and what a random ranking gets.

Ties are broken at random, and the expectation is what counts: a method that says nothing gets what chance gets. A score
that is not a number is the lowest of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Scores = Sequence[float | None]
Truth = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number for a ranking.

    Attributes:
        compute: From the scores of the units and their truth.
        random: What scores without any sense get, from the truth alone.
        perfect: The best value there is.
    """

    compute: Callable[[Scores, Truth], float]
    random: Callable[[Truth], float]
    perfect: float = 1.0


def numbers(scores: Scores) -> np.ndarray:
    """Scores as floats, the missing ones as the lowest."""
    found = np.array([np.nan if one is None else one for one in scores], dtype=np.float64)
    return np.where(np.isnan(found), -np.inf, found)


def _first_place(n_ties: int, n_evidence: int) -> list[float]:
    """Chances that the first of `n_evidence` among `n_ties` in random order stands at place 1, 2 and so on."""
    whole = math.comb(n_ties, n_evidence)
    return [math.comb(n_ties - place, n_evidence - 1) / whole for place in range(1, n_ties - n_evidence + 2)]


def reciprocal_rank(scores: Scores, truth: Truth) -> float:
    """1 over the rank of the evidence that stands highest."""
    values, is_evidence = numbers(scores), np.array(truth) > 0
    best = values[is_evidence].max()
    above, ties = int((values > best).sum()), values == best
    chances = _first_place(int(ties.sum()), int((ties & is_evidence).sum()))
    return sum(chance / (above + place) for place, chance in enumerate(chances, 1))


def top_one(scores: Scores, truth: Truth) -> float:
    """Whether a piece of evidence stands first."""
    values, is_evidence = numbers(scores), np.array(truth) > 0
    ties = values == values.max()
    return float((ties & is_evidence).sum() / ties.sum())


def recall_at(k: int) -> Callable[[Scores, Truth], float]:
    """Share of the evidence among the first k."""

    def compute(scores: Scores, truth: Truth) -> float:
        values, is_evidence = numbers(scores), np.array(truth) > 0
        found = 0.0
        for value in values[is_evidence]:
            above, ties = int((values > value).sum()), int((values == value).sum())
            found += min(1.0, max(0.0, (k - above) / ties))
        return found / int(is_evidence.sum())

    return compute


def by_magnitude(compute: Callable[[Scores, Truth], float]) -> Callable[[Scores, Truth], float]:
    """The same measure with signs ignored."""
    return lambda scores, truth: compute([None if one is None else abs(one) for one in scores], truth)


def outside(scores: Scores, truth: Truth) -> float:
    """Share of the magnitude that lies on units which are no evidence; 0 is best."""
    values = np.abs(np.where(np.isfinite(numbers(scores)), numbers(scores), 0.0))
    return float(values[np.array(truth) <= 0].sum() / values.sum()) if values.sum() else math.nan


def pearson(scores: Scores, truth: Truth) -> float:
    """Correlation of predicted and true effects; NaN where one of them does not vary."""
    return _correlation(np.where(np.isfinite(numbers(scores)), numbers(scores), 0.0), np.array(truth))


def spearman(scores: Scores, truth: Truth) -> float:
    """Correlation of the ranks of predicted and true effects, ties by their mean rank."""
    return _correlation(_ranks(numbers(scores)), _ranks(np.array(truth, dtype=np.float64)))


def _ranks(values: np.ndarray) -> np.ndarray:
    order = np.sort(values)
    return (np.searchsorted(order, values, "left") + np.searchsorted(order, values, "right") - 1) / 2


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / size) if size else 0.0


def _no_sense(compute: Callable[[Scores, Truth], float]) -> Callable[[Truth], float]:
    """What a ranking gets in which all units are tied, that is, stand in random order."""
    return lambda truth: compute([0.0] * len(truth), truth)


MEASURES: dict[str, Measure] = {
    "reciprocal_rank": Measure(compute=reciprocal_rank, random=_no_sense(reciprocal_rank)),
    "reciprocal_rank_by_magnitude": Measure(compute=by_magnitude(reciprocal_rank), random=_no_sense(reciprocal_rank)),
    "top_1": Measure(compute=top_one, random=_no_sense(top_one)),
    "recall_at_5": Measure(compute=recall_at(5), random=_no_sense(recall_at(5))),
    "outside": Measure(compute=outside, random=lambda truth: sum(one <= 0 for one in truth) / len(truth), perfect=0.0),
    "spearman": Measure(compute=spearman, random=lambda truth: 0.0),
    "spearman_by_magnitude": Measure(
        compute=lambda scores, truth: spearman([None if s is None else abs(s) for s in scores], np.abs(truth).tolist()),
        random=lambda truth: 0.0,
    ),
    "pearson": Measure(compute=pearson, random=lambda truth: 0.0),
}
"""Every measure by name."""
