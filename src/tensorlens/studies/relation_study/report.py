"""The tables and the report of a relation run, from its summary: Markdown for docs and terminals, one page of HTML."""

from __future__ import annotations

from typing import Any

from tensorlens.errors import MissingExtraError
from tensorlens.studies.pages import Section, markdown_table, write_page
from tensorlens.studies.relation_study.summary import METRICS, method_names
from tensorlens.studies.runs import Run
from tensorlens.views.study_figures.canvas import figure_svg
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


def category_table(summary: dict[str, Any], metric: str = "agreement") -> str:
    """A Markdown table: methods down, categories across, means with 95% intervals over relations."""
    categories = summary["categories"]
    head = ["method", *(f"{name} ({found['n_relations']})" for name, found in categories.items())]
    rows = [
        [label, *(_with_interval(found["methods"][name][metric]) for found in categories.values())]
        for name, label in ROWS.items()
        if name in method_names(summary)
    ]
    for line in ("majority", "chance"):
        rows.append([line, *(f"{found[line][metric]:.2f}" for found in categories.values())])
    if metric == "match":
        rows.append(["the model itself", *(f"{found['model_match']:.2f}" for found in categories.values())])
    return markdown_table(head, rows)


def difference_table(summary: dict[str, Any], metric: str = "agreement") -> str:
    """A Markdown table of paired differences between methods."""
    categories = summary["categories"]
    names = categories["all"]["differences"] if categories else {}
    rows = [
        [
            f"{_name(a)} less {_name(b)}",
            *(_with_interval(c["differences"][pair][metric], "+") for c in categories.values()),
        ]
        for pair in names
        for a, b in [pair.split(" - ")]
    ]
    return markdown_table(["difference", *categories], rows)


def start_table(summary: dict[str, Any]) -> str:
    """A Markdown table of agreement over the first block, all relations together."""
    methods = summary["categories"]["all"]["methods"]
    columns = {family: {s: m for s, m, _, _ in start_points(methods, family)} for family in CURVES}
    starts = sorted({start for column in columns.values() for start in column})
    rows = [[str(s), *(f"{column[s]:.2f}" if s in column else "" for column in columns.values())] for s in starts]
    return markdown_table(["first block", *(label for label, _, _ in CURVES.values())], rows)


def relation_table(summary: dict[str, Any], metric: str = "agreement") -> str:
    """A Markdown table of the main methods by relation, mean ± deviation over splits."""
    shown = [
        n
        for n in (
            "tensor.full.beta1@0",
            "tensor.subject.tuned@0",
            "lre.fixed@embedding",
            "lre.tuned@embedding",
            "control.mean_output",
        )
        if n in method_names(summary)
    ]
    rows = []
    for key, relation in summary["relations"].items():
        scores = (relation["methods"][name][metric] for name in shown)
        rows.append(
            [
                key,
                f"{relation['n_aligned']}/{relation['n_facts']}",
                f"{relation['n_test']:.0f}",
                *(f"{s['mean']:.2f} ± {s['std']:.2f}" for s in scores),
                f"{relation['majority'][metric]:.2f}",
                f"{relation['chance'][metric]:.2f}",
            ]
        )
    return markdown_table(["relation", "aligned", "tested", *map(_name, shown), "majority", "chance"], rows)


def left_out_table(summary: dict[str, Any]) -> str:
    """A Markdown table of the relations that do not survive, and why."""
    return markdown_table(["relation", "why"], [[key, reason] for key, reason in summary["left_out"].items()])


def survival(summary: dict[str, Any]) -> str:
    """One sentence: how many relations survive, and of which category."""
    parts = ", ".join(f"{len(keys)} {category}" for category, keys in summary["survived"].items())
    return f"{summary['n_survived']} of {summary['n_relations']} relations survive ({parts or 'none'})."


def write_report(run: Run, summary: dict[str, Any]) -> None:
    """Write `report.html` and the figures into a run's folder."""
    sections = [Section(title="What survives", text=_survival_text(summary))]
    if summary["relations"]:
        sections += _figures(run, summary)
        for metric in METRICS:
            tables = [
                category_table(summary, metric),
                difference_table(summary, metric),
                relation_table(summary, metric),
            ]
            sections.append(Section(title=f"By {metric}", tables=tables))
        sections.append(Section(title="Over the first block", tables=[start_table(summary)]))
    write_page(run, f"Relation decoding: {run.settings['model']}", sections)


def _figures(run: Run, summary: dict[str, Any]) -> list[Section]:
    try:
        drawn = {"relations.svg": relation_bars(summary), "starts.svg": start_curves(summary)}
    except MissingExtraError as error:
        return [Section(title="Figures", text=str(error))]
    pictures = []
    for name, figure in drawn.items():
        pictures.append(figure_svg(figure))
        run.write_text(name, pictures[-1])
    return [Section(title="Agreement with the model", pictures=pictures)]


def _survival_text(summary: dict[str, Any]) -> str:
    lines = [survival(summary) + f" Rule: {summary['rule']}."]
    lines += [f"{key}: {reason}" for key, reason in summary["left_out"].items()]
    lines += [f"{p['path']}: {p['place']}: {p['message']}" for p in summary["problems"]]
    return "\n".join(lines)


def _name(method: str) -> str:
    return ROWS.get(method, method).replace(" (paper)", "")


def _with_interval(score: dict[str, float], sign: str = "") -> str:
    return f"{score['mean']:{sign}.2f} [{score['low']:{sign}.2f}, {score['high']:{sign}.2f}]"
