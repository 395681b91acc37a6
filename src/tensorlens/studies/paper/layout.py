"""Tables in the paper's layout, as Markdown and LaTeX: its numbers beside ours, best bold, second underlined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorlens.errors import MissingExtraError
from tensorlens.studies.paper.protocol import BASELINES, CONTROLS, TENSOR
from tensorlens.studies.perturbation_study.measures import RISING
from tensorlens.studies.perturbation_study.report import LABELS, METRICS, TITLES, each_result
from tensorlens.studies.relation_study.report import survival
from tensorlens.studies.report import with_interval
from tensorlens.studies.runs import best_first
from tensorlens.views.study_figures.perturbation import perturbation_curves
from tensorlens.views.study_figures.relations import relation_bars, start_curves

NAMES = dict(zip(TENSOR, ("Norm", "In+Out", "In+Class"), strict=True)) | dict(
    zip(BASELINES, ("Attn", "W-Attn", "W-AttnResLN", "GlbEnc") * 2, strict=True)
)
GROUPS = {"Tensor": TENSOR, "Rollout over layers": BASELINES[:4], "Mean over heads and layers": BASELINES[4:]}
NOT_APPLICABLE = "N.A"
Cells = list[tuple[str, dict[str, str]]]
"""Head of each row, and its cells by method."""


def marked(values: Mapping[str, float], *, largest: bool) -> dict[str, tuple[str, int]]:
    """Each value to three digits, and its place among the different ones: 0 for the best, 1 for the second."""
    shown = {name: f"{value:.3g}" for name, value in values.items()}
    ranked = sorted({float(text) for text in shown.values()}, reverse=largest)
    return {name: (text, ranked.index(float(text))) for name, text in shown.items()}


def rows_of_condition(
    found: Mapping[str, Any],
    paper: Mapping[str, Mapping[str, str]],
    shown: Sequence[str],
    mark: Callable[[str, int], str],
) -> Cells:
    """For each metric our numbers on both scales, then the paper's."""
    rows: Cells = []
    for metric, label in METRICS.items():
        result = found.get("most", {}).get(metric)
        if result is None:
            continue
        arrow = "↑" if metric in RISING else "↓"
        for scale, words in (("auc", "mean height"), ("area", "area")):
            values = {name: one[scale] for name, one in result["methods"].items() if name in shown}
            best = marked(values, largest=metric in RISING)
            rows.append((f"{label} {arrow}, {words}", {name: mark(*best[name]) for name in best}))
        if paper.get(metric):
            rows.append((f"{label}, the paper", {name: paper[metric].get(name, "–") for name in shown}))
    return rows


def _in_markdown(text: str, place: int) -> str:
    return f"**{text}**" if place == 0 else f"<u>{text}</u>" if place == 1 else text


def _in_tex(text: str, place: int) -> str:
    return rf"\textbf{{{text}}}" if place == 0 else rf"\underline{{{text}}}" if place == 1 else text


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a table."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([str(row[head]) for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def perturbation_markdown(about: Mapping[str, Any], summary: Mapping[str, Any], shown: Sequence[str]) -> str:
    """One table for each condition, then controls and differences, deviations and what was left open."""
    parts = [f"# {about['title']}", about["line"]]
    for condition, found in summary["conditions"].items():
        rows = rows_of_condition(found, about["paper"], shown, _in_markdown)
        heads = {name: f"{_group_of(name)} {NAMES[name]}" for name in shown}
        parts += [
            f"## {condition}",
            markdown(
                [{"": head} | {heads[name]: cells.get(name, NOT_APPLICABLE) for name in shown} for head, cells in rows]
            ),
            markdown(_detail(found, shown)),
        ]
        gaps = [f"{name}: {gap['n']} samples. {gap['reason']}" for name, gap in found["missing"].items()]
        parts += ["\n".join(f"- missing: {gap}" for gap in gaps)] if gaps else []
    return "\n\n".join([*parts, *_ending(about)]) + "\n"


def _group_of(name: str) -> str:
    return {"tensor": "Tensor", "rollout": "Rollout", "mean": "Mean"}[name.split(".")[0]]


def _detail(found: Mapping[str, Any], shown: Sequence[str]) -> list[dict[str, str]]:
    """Every method with its interval, and by how much the best of T is ahead of it."""
    rows = []
    metrics = [metric for metric in METRICS if metric in found.get("most", {})]
    for name in (*shown, *CONTROLS):
        row = {"method": name}
        for metric in metrics:
            result = found["most"][metric]
            one, against = result["methods"].get(name), result.get("tensor_against_each", {}).get(name, {})
            row[METRICS[metric]] = (
                "" if one is None else with_interval(one["auc"], one["interval"], ".4g", one["n_units"])
            )
            row[f"{METRICS[metric]}: T is ahead by"] = (
                with_interval(against["advantage"], against["interval"], "+.3g", against["n"])
                if against.get("n")
                else ""
            )
        rows.append(row)
    return rows


def _ending(about: Mapping[str, Any]) -> list[str]:
    parts = ["## Deviations", "\n".join(f"- {line}" for line in about["deviations"]) or "- none"]
    return [
        *parts,
        "## What the paper leaves open, and what was taken",
        "\n".join(f"- {line}" for line in about["open"]),
    ]


def perturbation_tex(about: Mapping[str, Any], summary: Mapping[str, Any], shown: Sequence[str]) -> str:
    """The same as one table of LaTeX, with the paper's groups of columns."""
    groups = {head: [name for name in names if name in shown] for head, names in GROUPS.items()}
    columns = "|".join("c" * len(names) for names in groups.values() if names)
    heads = " & ".join(rf"\multicolumn{{{len(n)}}}{{c}}{{\textbf{{{h}}}}}" for h, n in groups.items() if n)
    lines = [rf"\begin{{tabular}}{{ll|{columns}}}", r"\toprule", rf"& Method: & {heads} \\", r"\midrule"]
    lines.append(" & ".join(["Condition", "Metric", *(NAMES[name] for name in shown)]) + r" \\")
    for condition, found in summary["conditions"].items():
        lines.append(r"\midrule")
        for i, (head, cells) in enumerate(rows_of_condition(found, about["paper"], shown, _in_tex)):
            row = [condition if i == 0 else "", head, *(cells.get(name, NOT_APPLICABLE) for name in shown)]
            lines.append(" & ".join(map(_tex, row)) + r" \\")
    return _tex_table([*lines, r"\bottomrule", r"\end{tabular}"], about)


def _tex(text: str) -> str:
    for sign, written in (
        ("↑", r"$\uparrow$"),
        ("↓", r"$\downarrow$"),
        ("±", r"$\pm$"),
        ("–", "--"),
        ("β", r"$\beta$"),
    ):
        text = text.replace(sign, written)
    for sign in "<>":
        text = text.replace(f"{sign} ", f"${sign}$ ")
    return text.replace("_", r"\_").replace("%", r"\%")


def _tex_table(lines: Sequence[str], about: Mapping[str, Any]) -> str:
    said = " ".join([about["line"], *(f"Deviation: {line}." for line in about["deviations"])])
    said = "".join(f"\\{sign}" if sign in "&#{}" else sign for sign in said.replace("\\", "/"))
    caption = rf"\caption{{\textbf{{{about['title']}.}} {_tex(said)}}}"
    return "\n".join([r"\begin{table*}[t]", r"\centering", r"\small", *lines, caption, r"\end{table*}"]) + "\n"


# Relations ------------------------------------------------------------------------------------------------------------

ROWS = {
    "tensor.full.beta1@0": "Tensor",
    "tensor.subject.beta1@0": "Tensor, subject's tokens alone",
    "lre.fixed@embedding": "LRE, β = 2.5",
    "lre.tuned@embedding": "LRE, β tuned on training examples",
    "control.mean_output": "mean training output",
}


def relation_rows(summary: Mapping[str, Any]) -> list[dict[str, str]]:
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
    for line, label in (("chance", "random guess"), ("majority", "most common answer")):
        found = summary["categories"].items()
        rows.append({"": label} | {category: f"{one[line]['agreement']:.3f}" for category, one in found})
    return rows


def relation_markdown(about: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Accuracies by category and by relation, with error bars and random baselines, then over starting layers."""
    parts = [f"# {about['title']}", about["line"], survival(dict(summary))]
    parts += ["\n".join(f"- left out: {key}: {reason}" for key, reason in summary["left_out"].items())]
    if summary["relations"]:
        each = summary["relations"].items()
        parts += [
            "## Accuracy by category: agreement with the model, mean ± deviation over splits",
            markdown(relation_rows(summary)),
            f"The tensor is ahead of LRE (β = 2.5) on {n_ahead(summary)} of {len(summary['relations'])} relations.",
            "## By relation",
            markdown([_by_relation(key, one) for key, one in each]),
            "## Over starting layers",
            markdown([_by_start(c, one["methods"], summary) for c, one in summary["categories"].items()]),
            markdown([_by_start(key, one["methods"], summary) for key, one in each]),
        ]
    return "\n\n".join(part for part in [*parts, *_ending(about)] if part) + "\n"


def n_ahead(summary: Mapping[str, Any]) -> int:
    """Relations on which the mean tensor agrees with the model more often than LRE with its fixed scale."""
    pairs = [[one["methods"].get(name) for name in list(ROWS)[::2][:2]] for one in summary["relations"].values()]
    both = [(ours["agreement"]["mean"], other["agreement"]["mean"]) for ours, other in pairs if ours and other]
    return sum(ours > other for ours, other in both)


def _by_relation(key: str, one: Mapping[str, Any]) -> dict[str, str]:
    scores = {label: one["methods"].get(name) for name, label in ROWS.items()}
    return {
        "relation": key,
        "tested": f"{one['n_test']:.0f}",
        **{
            label: "" if score is None else f"{score['agreement']['mean']:.3f} ± {score['agreement']['std']:.3f}"
            for label, score in scores.items()
        },
        "random guess": f"{one['chance']['agreement']:.3f}",
    }


def _by_start(head: str, methods: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    every = summary["categories"]["all"]["methods"]
    starts = sorted({int(name.split("@")[1]) for name in every if name.startswith("tensor.full.beta1@")})
    row = {"": head}
    for start in starts:
        for label, name in (("Tensor", f"tensor.full.beta1@{start}"), ("LRE", f"lre.fixed@{start}")):
            score = methods.get(name)
            row[f"{label} from {start}"] = "" if score is None else f"{score['agreement']['mean']:.3f}"
    return row


def relation_tex(about: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The table by category as LaTeX, the better of tensor and LRE bold."""
    rows = relation_rows(summary)
    heads = [head for head in rows[0] if head]
    lines = [
        rf"\begin{{tabular}}{{l{'c' * len(heads)}}}",
        r"\toprule",
        " & ".join(["Method", *heads]) + r" \\",
        r"\midrule",
    ]
    for place, row in enumerate(rows):
        cells = []
        for head in heads:
            values = [rows[i][head] for i in (0, 2)]
            is_best = place in (0, 2) and NOT_APPLICABLE not in values and row[head] == max(values)
            cells.append(rf"\textbf{{{row[head]}}}" if is_best else row[head])
        lines.append(" & ".join(map(_tex, [row[""], *cells])) + r" \\")
    return _tex_table([*lines, r"\bottomrule", r"\end{tabular}"], about)


# Figures --------------------------------------------------------------------------------------------------------------


def write_figures(folder: Path, summary: dict[str, Any], methods: Sequence[str]) -> str | None:
    """Curves, or bars and curves of relations, as .svg and .pdf; why there are none, if so."""
    drawn: dict[str, Any] = {}
    try:
        if "conditions" in summary:
            for condition, order, metric, result in each_result(summary):
                if order == "most":
                    ranked = best_first(result["methods"], largest=metric in RISING)
                    curves = {name: result["methods"][name]["curve"] for name in ranked}
                    title = f"{condition}: {TITLES[order, metric]}"
                    drawn[f"{condition}-{metric}".replace(", ", "-")] = perturbation_curves(
                        curves, summary["grid"], title, LABELS[metric], methods
                    )
        elif summary["relations"]:
            drawn = {"relations": relation_bars(summary), "starting-layers": start_curves(summary)}
    except MissingExtraError as error:
        return str(error)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        for suffix in ("svg", "pdf"):
            figure.savefig(folder / f"{name}.{suffix}", metadata={"CreationDate": None} if suffix == "pdf" else None)
    return None
