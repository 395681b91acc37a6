"""The pooled results of a relation run, with its tables and its report.

Means and deviations of a relation are over its splits, as in the paper's figure; those of a category are over its
relations, with bootstrap intervals that draw relations, since splits of one relation are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tensorlens.studies.report import Section, Table, interval, resampled_means, with_interval, write_page
from tensorlens.studies.runs import Run
from tensorlens.views.study_figures import relation_bars, start_curves

METRICS = ("agreement", "match")
GUESSES = ("chance", "majority")

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
    """The summary of a run."""
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
    return sorted(summary["categories"].get("all", {"methods": ()})["methods"])


def _relation(splits: list[dict[str, Any]]) -> dict[str, Any]:
    methods = [name for name in splits[0]["methods"] if all(name in split["methods"] for split in splits)]
    return {
        "category": splits[0]["category"],
        "n_splits": len(splits),
        "n_facts": splits[0]["n_facts"],
        "n_aligned": splits[0]["n_aligned"],
        "n_test": _mean([split["n_test"] for split in splits]),
        **_guesses(splits),
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
        **_guesses(relations),
        "model_match": _mean([r["model_match"] for r in relations]),
        "methods": {name: {metric: mean_with_interval(scores[metric][name]) for metric in METRICS} for name in methods},
        "differences": {
            f"{a} - {b}": {metric: mean_with_interval(scores[metric][a] - scores[metric][b]) for metric in METRICS}
            for a, b in COMPARISONS
            if a in methods and b in methods
        },
    }


def _guesses(some: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The random baselines, averaged over splits or relations."""
    return {line: {metric: _mean([one[line][metric] for one in some]) for metric in METRICS} for line in GUESSES}


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


# Tables and report ----------------------------------------------------------------------------------------------------


ROWS = {
    "tensor.full.beta1@0": "mean tensor, whole prompt (paper)",
    "tensor.full.tuned@0": "mean tensor, whole prompt, β tuned",
    "tensor.subject.beta1@0": "mean tensor, subject's tokens, β = 1",
    "tensor.subject.fixed@0": "mean tensor, subject's tokens, β = 2.5",
    "tensor.subject.tuned@0": "mean tensor, subject's tokens, β tuned",
    "lre.beta1@embedding": "LRE on the embedding, β = 1",
    "lre.fixed@embedding": "LRE on the embedding, β = 2.5 (paper)",
    "lre.tuned@embedding": "LRE on the embedding, β tuned",
    "lre.tuned@chosen": "LRE, block and β tuned",
    "lre.bias@embedding": "LRE's constant alone",
    "tensor.subject.bias@0": "subject-only tensor's constant alone",
    "control.mean_output": "mean training output",
}
"""The rows of the table, in order. Tuned means: on training examples, each predicted from the others."""
MAIN = (
    "tensor.full.beta1@0",
    "tensor.subject.tuned@0",
    "lre.fixed@embedding",
    "lre.tuned@embedding",
    "control.mean_output",
)
"""The methods that are shown by relation."""


def category_table(summary: dict[str, Any], metric: str = "agreement") -> Table:
    """Methods down, categories across, means with 95% intervals over relations."""
    categories = {f"{name} ({found['n_relations']})": found for name, found in summary["categories"].items()}
    rows = [
        {"method": label} | {head: _score(one["methods"][name][metric], one) for head, one in categories.items()}
        for name, label in ROWS.items()
        if name in method_names(summary)
    ]
    for line in reversed(GUESSES):
        rows.append({"method": line} | {head: f"{found[line][metric]:.2f}" for head, found in categories.items()})
    if metric == "match":
        own = {head: f"{found['model_match']:.2f}" for head, found in categories.items()}
        rows.append({"method": "the model itself"} | own)
    return rows


def difference_table(summary: dict[str, Any], metric: str = "agreement") -> Table:
    """Paired differences between methods, by category."""
    categories = summary["categories"]
    return [
        {"difference": " less ".join(map(_name, pair.split(" - ")))}
        | {name: _score(one["differences"][pair][metric], one, "+.2f") for name, one in categories.items()}
        for pair in (categories["all"]["differences"] if categories else {})
    ]


def start_table(summary: dict[str, Any]) -> Table:
    """Agreement over the first block, by category and by relation."""
    every = summary["categories"]["all"]["methods"]
    starts = sorted({int(name.split("@")[1]) for name in every if name.startswith("tensor.full.beta1@")})
    families = {"Tensor": "tensor.full.beta1", "LRE": "lre.fixed"}
    return [
        {"": head}
        | {
            f"{label} from {start}": f"{score['agreement']['mean']:.3f}" if score else ""
            for start in starts
            for label, family in families.items()
            for score in [one["methods"].get(f"{family}@{start}")]
        }
        for head, one in (summary["categories"] | summary["relations"]).items()
    ]


def relation_table(summary: dict[str, Any], metric: str = "agreement") -> Table:
    """The main methods by relation, mean ± deviation over splits."""
    shown = [name for name in MAIN if name in method_names(summary)]
    return [
        {"relation": key, "aligned": f"{one['n_aligned']}/{one['n_facts']}", "tested": f"{one['n_test']:.0f}"}
        | {
            _name(name): f"{score['mean']:.2f} ± {score['std']:.2f}"
            for name in shown
            for score in [one["methods"][name][metric]]
        }
        | {line: f"{one[line][metric]:.2f}" for line in reversed(GUESSES)}
        for key, one in summary["relations"].items()
    ]


def survival(summary: dict[str, Any]) -> str:
    """One sentence: how many relations survive, and of which category."""
    parts = ", ".join(f"{len(keys)} {category}" for category, keys in summary["survived"].items())
    return f"{summary['n_survived']} of {summary['n_relations']} relations survive ({parts or 'none'})."


def relation_report(run: Run, summary: dict[str, Any]) -> None:
    """Write `report.html` into a run's folder."""
    lines = [survival(summary) + f" Rule: {summary['rule']}."]
    lines += [f"{key}: {reason}" for key, reason in summary["left_out"].items()]
    lines += [f"{one['path']}: {one['place']}: {one['message']}" for one in summary["problems"]]
    sections = [Section(title="What survives", text="\n".join(lines))]
    if summary["relations"]:
        drawn = [partial(relation_bars, summary), partial(start_curves, summary)]
        sections.append(Section(title="Agreement with the model", figures=drawn))
        for metric in METRICS:
            tables = [make(summary, metric) for make in (category_table, difference_table, relation_table)]
            sections.append(Section(title=f"By {metric}", tables=tables))
        sections.append(Section(title="Over the first block", tables=[start_table(summary)]))
    write_page(run, f"Relation decoding: {run.settings['model']}", sections)


def _name(method: str) -> str:
    return ROWS.get(method, method).replace(" (paper)", "")


def _score(score: dict[str, float], category: dict[str, Any], form: str = ".2f") -> str:
    return with_interval(score["mean"], (score["low"], score["high"]), category["n_relations"], form)
