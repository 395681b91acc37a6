"""The tables and the report of a relation run, from its summary."""

from __future__ import annotations

from functools import partial
from typing import Any

from tensorlens.studies.relation_study.summary import METRICS, method_names
from tensorlens.studies.report import Section, Table, with_interval, write_page
from tensorlens.studies.runs import Run
from tensorlens.views.study_figures.relations import CURVES, relation_bars, start_curves, start_points

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
    for line in ("majority", "chance"):
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
    """Agreement over the first block, all relations together."""
    methods = summary["categories"]["all"]["methods"]
    columns = {CURVES[family][0]: {s: m for s, m, _, _ in start_points(methods, family)} for family in CURVES}
    starts = sorted({start for column in columns.values() for start in column})
    return [
        {"first block": start}
        | {head: f"{column[start]:.2f}" if start in column else "" for head, column in columns.items()}
        for start in starts
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
        | {line: f"{one[line][metric]:.2f}" for line in ("majority", "chance")}
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
