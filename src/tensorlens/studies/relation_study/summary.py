"""What the splits of a relation run say together: by relation, by category, with intervals.

Means and deviations of a relation are over its splits, as in the paper's figure; those of a category are over its
relations, with bootstrap intervals that draw relations, since splits of one relation are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorlens.studies.intervals import interval, resampled_means

METRICS = ("agreement", "match")

COMPARISONS = (
    ("tensor.full.beta1@0", "lre.fixed@embedding"),
    ("tensor.full.beta1@0", "lre.tuned@embedding"),
    ("tensor.full.beta1@0", "control.mean_output"),
    ("tensor.subject.beta1@0", "lre.beta1@embedding"),
    ("tensor.subject.tuned@0", "lre.tuned@embedding"),
    ("tensor.subject.beta1@0", "tensor.subject.bias@0"),
)
"""Pairs whose difference is reported: the paper's, then those with like inputs and like freedom, then controls."""


def relation_summary(records: list[dict[str, Any]], problems: list[dict[str, Any]], min_test: int) -> dict[str, Any]:
    """The summary of a run.

    Args:
        records: One for each split.
        problems: What was wrong with the files.
        min_test: Test facts that a scored split has at least.
    """
    by_relation: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_relation.setdefault(record["relation"], []).append(record)
    kept, left_out = {}, {}
    for key, splits in by_relation.items():
        scored = [split for split in splits if "skipped" not in split]
        if 2 * len(scored) >= len(splits):
            kept[key] = _relation(scored)
        else:
            left_out[key] = next(split["skipped"] for split in splits if "skipped" in split)
    categories = sorted({relation["category"] for relation in kept.values()})
    return {
        "n_relations": len(by_relation),
        "n_survived": len(kept),
        "survived": {c: [k for k, r in kept.items() if r["category"] == c] for c in categories},
        "rule": f"a split needs {min_test} test facts; a relation needs half of its splits",
        "categories": {c: _category([r for r in kept.values() if r["category"] == c]) for c in categories}
        | ({"all": _category(list(kept.values()))} if kept else {}),
        "relations": kept,
        "left_out": left_out,
        "problems": problems,
    }


def method_names(summary: dict[str, Any]) -> list[str]:
    """Every method of a summary, in a fixed order."""
    overall = summary["categories"].get("all")
    return sorted(overall["methods"]) if overall else []


def _relation(splits: list[dict[str, Any]]) -> dict[str, Any]:
    methods = [name for name in splits[0]["methods"] if all(name in split["methods"] for split in splits)]
    return {
        "category": splits[0]["category"],
        "n_splits": len(splits),
        "n_facts": splits[0]["n_facts"],
        "n_aligned": splits[0]["n_aligned"],
        "n_test": float(np.mean([split["n_test"] for split in splits])),
        "chance": {metric: _mean([split["chance"][metric] for split in splits]) for metric in METRICS},
        "majority": {metric: _mean([split["majority"][metric] for split in splits]) for metric in METRICS},
        "model_match": _mean([share(split["model_match"]) for split in splits]),
        "methods": {
            name: {metric: _spread([share(s["methods"][name][metric]) for s in splits]) for metric in METRICS}
            for name in methods
        },
        "scales": {name: _mean([s["methods"][name]["scale"] for s in splits]) for name in methods if ".tuned@" in name},
    }


def _category(relations: list[dict[str, Any]]) -> dict[str, Any]:
    methods = [name for name in relations[0]["methods"] if all(name in r["methods"] for r in relations)]
    scores = {
        metric: {name: np.array([r["methods"][name][metric]["mean"] for r in relations]) for name in methods}
        for metric in METRICS
    }
    return {
        "n_relations": len(relations),
        "n_test": float(sum(r["n_test"] for r in relations)),
        "chance": {metric: _mean([r["chance"][metric] for r in relations]) for metric in METRICS},
        "majority": {metric: _mean([r["majority"][metric] for r in relations]) for metric in METRICS},
        "model_match": _mean([r["model_match"] for r in relations]),
        "methods": {name: {metric: mean_with_interval(scores[metric][name]) for metric in METRICS} for name in methods},
        "differences": {
            f"{a} - {b}": {metric: mean_with_interval(scores[metric][a] - scores[metric][b]) for metric in METRICS}
            for a, b in COMPARISONS
            if a in methods and b in methods
        },
    }


def share(bits: str) -> float:
    """The share of ones."""
    return bits.count("1") / max(len(bits), 1)


def mean_with_interval(values: np.ndarray) -> dict[str, float]:
    """Mean and 95% bootstrap interval of it."""
    low, high = interval(resampled_means(values, seed=0))
    return {"mean": float(values.mean()), "low": low, "high": high}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}
