"""What the items of a run say together: a mean for each method and measure, with intervals, and who beats whom.

Intervals are paired bootstraps: the items of every set are drawn anew with replacement, the same ones for all methods.
A judge's number is the mean over its sets, so that a large set counts no more than a small one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorlens.studies.judge_study.measures import MEASURES
from tensorlens.studies.resampling import N_RESAMPLES

REFERENCE = "tensor.in_class"
"""The paper's operator: every other method has its difference to it beside it."""


def summarise(records: Sequence[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run, by judge.

    Args:
        records: The items, in the order of their index.
        settings: The run's settings, with the measures and problems of each judge.
    """
    return {
        "n_items": len(records),
        "judges": {
            name: _judge([record for record in records if record["judge"] == name], about, settings["seed"])
            for name, about in settings["judges"].items()
        },
    }


def _judge(records: Sequence[dict[str, Any]], about: dict[str, Any], seed: int) -> dict[str, Any]:
    measured = [record for record in records if "left_out" not in record]
    methods = list(dict.fromkeys(name for record in measured for name in record["scores"]))
    sets = list(dict.fromkeys(record["set"] for record in records))
    return {
        "question": about["question"],
        "n_items": len(records),
        "n_measured": len(measured),
        "n_problems": len(about["problems"]),
        "problems": about["problems"][:50],
        "sets": {one: _counts([record for record in records if record["set"] == one]) for one in sets},
        "missing": _missing(measured),
        "seconds": {name: _cost(measured, name) for name in methods},
        "measures": {
            measure: compare(measured, sets, methods, measure, seed, about.get("reference", REFERENCE))
            for measure in about["measures"]
        }
        if measured
        else {},
    }


def _counts(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    left_out = Counter(record["left_out"] for record in records if "left_out" in record)
    return {"n": len(records), "n_measured": len(records) - sum(left_out.values()), "left_out": dict(left_out)}


def _missing(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    reasons: dict[str, Counter[str]] = {}
    for record in records:
        for name, reason in record.get("missing", {}).items():
            reasons.setdefault(name, Counter())[reason] += 1
    return {name: {"n": sum(some.values()), "reason": some.most_common(1)[0][0]} for name, some in reasons.items()}


def _cost(records: Sequence[dict[str, Any]], name: str) -> float | None:
    found = [record["seconds"][name] for record in records if name in record.get("seconds", {})]
    return _short(float(np.median(found))) if found else None


def compare(
    records: Sequence[dict[str, Any]],
    sets: Sequence[str],
    methods: Sequence[str],
    measure: str,
    seed: int,
    reference: str = REFERENCE,
) -> dict[str, Any]:
    """One measure of every method, over all sets and in each; best first."""
    known = MEASURES[measure]
    tables, chance = [], []
    for one in sets:
        some = [record for record in records if record["set"] == one]
        if some:
            tables.append(np.array([[value_of(record, name, measure) for name in methods] for record in some]))
            chance.append(float(np.mean([known.random(record["truth"]) for record in some])))
    names = [one for one in sets if any(record["set"] == one for record in records)]
    draws = _draws([len(table) for table in tables], seed)
    by_method = {name: _method([table[:, k] for table in tables], draws, names) for k, name in enumerate(methods)}
    if reference in methods:
        base = [table[:, methods.index(reference)] for table in tables]
        for k, name in enumerate(methods):
            difference = [table[:, k] - own for table, own in zip(tables, base, strict=True)]
            by_method[name][f"less {reference}"] = _method(difference, draws, ())
    order = sorted(methods, key=lambda name: by_method[name]["mean"] or 0.0, reverse=known.perfect > 0)
    return {
        "perfect": known.perfect,
        "random": _short(float(np.mean(chance))),
        "random_by_set": dict(zip(names, map(_short, chance), strict=True)),
        "methods": {name: by_method[name] for name in order},
    }


def value_of(record: dict[str, Any], name: str, measure: str) -> float:
    """The measure of one item by one method; NaN where it has no scores."""
    scores = record["scores"].get(name)
    return np.nan if scores is None else MEASURES[measure].compute(scores, record["truth"])


def _draws(sizes: Sequence[int], seed: int) -> list[np.ndarray]:
    """For each set how often each of its items is drawn, (resample, item)."""
    random = np.random.default_rng(seed)
    return [random.multinomial(size, np.full(size, 1 / size), N_RESAMPLES).astype(np.float64) for size in sizes]


def _method(columns: Sequence[np.ndarray], draws: Sequence[np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    """The mean over sets with its interval, and the mean of each set."""
    present = [np.isfinite(column) for column in columns]
    kept = [k for k, some in enumerate(present) if some.any()]
    if not kept:
        return {"mean": None, "interval": None, "n": 0}
    means = [float(columns[k][present[k]].mean()) for k in kept]
    with np.errstate(invalid="ignore"):
        resampled = [
            (draws[k] @ np.where(present[k], columns[k], 0.0)) / (draws[k] @ present[k].astype(np.float64))
            for k in kept
        ]
    low, high = np.nanquantile(np.mean(resampled, axis=0), (0.025, 0.975))
    found: dict[str, Any] = {
        "mean": _short(float(np.mean(means))),
        "interval": [_short(low), _short(high)],
        "n": int(sum(some.sum() for some in present)),
    }
    if names:
        found["sets"] = {names[k]: _short(mean) for k, mean in zip(kept, means, strict=True)}
    return found


def _short(value: float) -> float:
    return float(f"{value:.6g}")
