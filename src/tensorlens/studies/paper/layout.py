"""Tables in the paper's layout, as Markdown and LaTeX: its numbers beside ours, best bold, second underlined.

A table is a list of rows with the same keys. Cells are marked as in Markdown (``**best**``, ``<u>second</u>``), and
`tex_table` turns the marks into LaTeX's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensorlens.errors import MissingExtraError
from tensorlens.files import write_whole
from tensorlens.studies.paper.protocol import BASELINES, CONTROLS, TENSOR, TableSettings
from tensorlens.studies.perturbation_report import METRIC_NAMES, RISING, TITLES, curves_panel, each_result
from tensorlens.studies.relation_report import relation_table, start_table, survival
from tensorlens.studies.report import markdown, with_interval
from tensorlens.views.study_figures import figure_svg, perturbation_curves, relation_bars, start_curves

NAMES = dict(zip(TENSOR, ("Norm", "In+Out", "In+Class"), strict=True)) | dict(
    zip(BASELINES, ("Attn", "W-Attn", "W-AttnResLN", "GlbEnc") * 2, strict=True)
)
GROUPS = {"Tensor": TENSOR, "Rollout over layers": BASELINES[:4], "Mean over heads and layers": BASELINES[4:]}
NOT_APPLICABLE = "N.A"
TEX = (
    (r"\*\*(.*?)\*\*", r"\\textbf{\1}"),
    (r"<u>(.*?)</u>", r"\\underline{\1}"),
    (r"([<>]) ", r"$\1$ "),
    (r"([_%&#])", r"\\\1"),
    ("↑", r"$\\uparrow$"),
    ("↓", r"$\\downarrow$"),
    ("±", r"$\\pm$"),
    ("–", "--"),
    ("β", r"$\\beta$"),
)
"""Replacements for LaTeX, in this order."""
Rows = list[dict[str, str]]


class About(NamedTuple):
    """The texts around a table."""

    table: TableSettings
    line: str
    deviations: Sequence[str]
    left_open: Sequence[str]


def marked(values: Mapping[str, float], *, largest: bool) -> dict[str, str]:
    """Each value to three digits, the best bold and the second underlined; none of them where all are equal."""
    shown = {name: f"{value:.3g}" for name, value in values.items()}
    if len(set(shown.values())) == 1:
        return shown
    ranked = [*sorted({float(text) for text in shown.values()}, reverse=largest), None, None]
    marks = {ranked[1]: "<u>{}</u>", ranked[0]: "**{}**"}
    return {name: marks.get(float(text), "{}").format(text) for name, text in shown.items()}


def condition_rows(found: Mapping[str, Any], table: TableSettings, shown: Sequence[str]) -> Rows:
    """For each metric our numbers on both scales, then the paper's; columns are methods."""
    rows: Rows = []
    for metric, label in METRIC_NAMES.items():
        result = found.get("most", {}).get(metric)
        if result is None:
            continue
        arrow = "↑" if metric in RISING else "↓"
        for scale, words in (("auc", "mean height"), ("area", "area")):
            values = {name: one[scale] for name, one in result["methods"].items() if name in shown}
            best = marked(values, largest=metric in RISING)
            cells = {name: best.get(name, NOT_APPLICABLE) for name in shown}
            rows.append({"": f"{label} {arrow}, {words}"} | cells)
        if paper := table.numbers(metric):
            rows.append({"": f"{label}, the paper"} | {name: paper[name] for name in shown})
    return rows


def tex_table(parts: Sequence[Rows], about: About, columns: str, heads: Sequence[Sequence[str]]) -> str:
    """The same rows as LaTeX, with a rule between parts and the deviations in the caption."""
    lines = [r"\toprule", *(" & ".join(head) + r" \\" for head in heads)]
    for rows in parts:
        lines += [r"\midrule", *(" & ".join(map(_tex, row.values())) + r" \\" for row in rows)]
    said = " ".join([about.line, *(f"Deviation: {line}." for line in about.deviations)])
    caption = rf"\caption{{\textbf{{{about.table.title}.}} {_tex(re.sub(r'[{}]', ' ', said.replace(chr(92), '/')))}}}"
    inner = [rf"\begin{{tabular}}{{{columns}}}", *lines, r"\bottomrule", r"\end{tabular}", caption]
    return "\n".join([r"\begin{table*}[t]", r"\centering", r"\small", *inner, r"\end{table*}"]) + "\n"


def _tex(text: str) -> str:
    for sign, written in TEX:
        text = re.sub(sign, written, text)
    return text


def perturbation_texts(about: About, summary: Mapping[str, Any], shown: Sequence[str]) -> dict[str, str]:
    """By suffix: one table per condition, then controls and differences, deviations and what was left open."""
    parts, tables = [f"# {about.table.title}", about.line], []
    heads = {"": ""} | {name: f"{name.split('.')[0].capitalize()} {NAMES[name]}" for name in shown}
    for condition, found in summary["conditions"].items():
        rows = condition_rows(found, about.table, shown)
        tables.append([{"of": condition if i == 0 else ""} | row for i, row in enumerate(rows)])
        named = [{heads[key]: cell for key, cell in row.items()} for row in rows]
        parts += [f"## {condition}", markdown(named), markdown(_detail(found, shown))]
        gaps = [f"{name}: {gap['n']} samples. {gap['reason']}" for name, gap in found["missing"].items()]
        parts += ["\n".join(f"- missing: {gap}" for gap in gaps)] if gaps else []
    groups = {head: sum(name in shown for name in names) for head, names in GROUPS.items()}
    columns = "ll|" + "|".join("c" * n for n in groups.values() if n)
    above = [rf"\multicolumn{{{n}}}{{c}}{{\textbf{{{head}}}}}" for head, n in groups.items() if n]
    own = ["Condition", "Metric", *(NAMES[name] for name in shown)]
    tex = tex_table(tables, about, columns, [["", "Method:", *above], own])
    return {"md": "\n\n".join([*parts, *_ending(about)]) + "\n", "tex": tex}


def _detail(found: Mapping[str, Any], shown: Sequence[str]) -> list[dict[str, str]]:
    """Every method with its interval, and by how much the best of T is ahead of it."""
    rows = []
    for name in (*shown, *CONTROLS):
        row = {"method": name}
        for metric, result in found.get("most", {}).items():
            one, ahead = result["methods"].get(name), result.get("tensor_against_each", {}).get(name, {})
            label = METRIC_NAMES[metric]
            row[label] = with_interval(one["auc"], one["interval"], one["n_units"], ".4g") if one else ""
            gain = round(ahead.get("advantage", 0.0), 12)  # areas that are equal differ by rounding
            said = with_interval(gain, ahead["interval"], ahead["n_units"], "+.3g") if ahead.get("n") else ""
            row[f"{label}: T is ahead by"] = said
        rows.append(row)
    return rows


def _ending(about: About) -> list[str]:
    parts = ["## Deviations", "\n".join(f"- {line}" for line in about.deviations) or "- none"]
    return [
        *parts,
        "## What the paper leaves open, and what was taken",
        "\n".join(f"- {line}" for line in about.left_open),
    ]


# Relations ------------------------------------------------------------------------------------------------------------

ROWS = {
    "tensor.full.beta1@0": "Tensor",
    "tensor.subject.beta1@0": "Tensor, subject's tokens alone",
    "lre.fixed@embedding": "LRE, β = 2.5",
    "lre.tuned@embedding": "LRE, β tuned on training examples",
    "control.mean_output": "mean training output",
}


def relation_rows(summary: Mapping[str, Any]) -> Rows:
    """By category: mean over relations ± mean deviation over splits, with the random baselines."""
    rows = []
    for name, label in ROWS.items():
        row = {"": label}
        for category, found in summary["categories"].items():
            score = found["methods"].get(name)
            keys = [k for c, some in summary["survived"].items() if category in (c, "all") for k in some]
            spread = [summary["relations"][k]["methods"][name]["agreement"]["std"] for k in keys] if score else []
            mean = score["agreement"]["mean"] if score else 0.0
            row[category] = f"{mean:.3f} ± {sum(spread) / len(spread):.3f}" if score else NOT_APPLICABLE
        rows.append(row)
    for category in summary["categories"]:  # the better of the paper's two is bold
        best = max((rows[i] for i in (0, 2)), key=lambda row: (row[category] != NOT_APPLICABLE, row[category]))
        best[category] = f"**{best[category]}**"
    for line, label in (("chance", "random guess"), ("majority", "most common answer")):
        found = summary["categories"].items()
        rows.append({"": label} | {category: f"{one[line]['agreement']:.3f}" for category, one in found})
    return rows


def relation_texts(about: About, summary: Mapping[str, Any], _: Sequence[str] = ()) -> dict[str, str]:
    """By suffix: accuracies with error bars and random baselines; in Markdown by relation and over starts too."""
    rows = relation_rows(summary)
    parts = [f"# {about.table.title}", about.line, survival(dict(summary))]
    parts += ["\n".join(f"- left out: {key}: {reason}" for key, reason in summary["left_out"].items())]
    if summary["relations"]:
        parts += [
            "## Accuracy by category: agreement with the model, mean ± deviation over splits",
            markdown(rows),
            f"The tensor is ahead of LRE (β = 2.5) on {n_ahead(summary)} of {len(summary['relations'])} relations.",
            "## By relation",
            markdown(relation_table(dict(summary))),
            "## Over starting layers",
            markdown(start_table(dict(summary))),
        ]
    heads = ["Method", *list(rows[0])[1:]]
    return {
        "md": "\n\n".join(part for part in [*parts, *_ending(about)] if part) + "\n",
        "tex": tex_table([rows], about, "l" + "c" * (len(heads) - 1), [heads]),
    }


def n_ahead(summary: Mapping[str, Any]) -> int:
    """Relations on which the mean tensor agrees with the model more often than LRE with its fixed scale."""
    pairs = [[one["methods"].get(name) for name in list(ROWS)[::2][:2]] for one in summary["relations"].values()]
    both = [(ours["agreement"]["mean"], other["agreement"]["mean"]) for ours, other in pairs if ours and other]
    return sum(ours > other for ours, other in both)


# Figures --------------------------------------------------------------------------------------------------------------


def write_figures(folder: Path, summary: dict[str, Any], methods: Sequence[str]) -> str | None:
    """Curves, or bars and curves of relations, as .svg and .pdf; the reason if there are none."""
    drawn: dict[str, Any] = {}
    try:
        if "conditions" in summary:
            for condition, order, metric, result in each_result(summary):
                if order == "most":
                    panel = curves_panel(f"{condition}: {TITLES[order, metric]}", order, metric, result)
                    name = f"{condition}-{metric}".replace(", ", "-")
                    drawn[name] = perturbation_curves([panel], summary["grid"], methods)
        elif summary["relations"]:
            drawn = {"relations": relation_bars(summary), "starting-layers": start_curves(summary)}
    except MissingExtraError as error:
        return str(error)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        write_whole(folder / f"{name}.svg", figure_svg(figure))
        figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None})
    return None
