"""`report.html` of a perturbation run: curves, tables, a few maps, and how to run it again. One file, no network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorlens.errors import MissingExtraError
from tensorlens.maps.token_map import TokenMap
from tensorlens.strict_json import to_json
from tensorlens.studies.pages import html_table
from tensorlens.studies.results import best_first
from tensorlens.studies.runs import Run
from tensorlens.views.page import page
from tensorlens.views.study_figures.canvas import figure_svg
from tensorlens.views.study_figures.perturbation import perturbation_curves

TITLES = {
    ("most", "hs_mse"): "HS-MSE, most relevant first (higher is better)",
    ("most", "abs_aopc"): "Change of probability, most relevant first (higher is better)",
    ("least", "hs_mse"): "HS-MSE, least relevant first (lower is better)",
    ("least", "abs_aopc"): "Change of probability, least relevant first (lower is better)",
}
METRICS = {"hs_mse": "HS-MSE", "abs_aopc": "abs-AOPC"}
FEW = 20
"""Samples below which intervals by resampling mean little."""
LABELS = {"hs_mse": "mean squared change of the output state", "abs_aopc": "absolute change of probability"}
STYLE = """
<style>
.study { max-width: 60rem; margin: 1rem auto; padding: 0 1rem; font-family: system-ui, sans-serif; }
.study table { border-collapse: collapse; margin: 0.75rem 0; font-variant-numeric: tabular-nums; }
.study th, .study td { padding: 0.2rem 0.75rem; text-align: right; border-bottom: 1px solid #8884; }
.study th:first-child, .study td:first-child { text-align: left; }
.study tr.best td { font-weight: 600; }
.study pre { overflow-x: auto; padding: 0.75rem; background: #8881; }
.study svg { max-width: 100%; height: auto; background: white; }
</style>
"""


def write_report(run: Run, summary: dict[str, Any]) -> None:
    """Write `report.html` and the curves as `figures/*.svg` from what the run's folder holds."""
    sections = []
    for condition, order, metric, result in each_result(summary):
        curves = {name: result["methods"][name]["curve"] for name in best_first(result["methods"], order)}
        title = f"{condition}: {TITLES[order, metric]}"
        try:
            svg = figure_svg(
                perturbation_curves(curves, summary["grid"], title, LABELS[metric], run.settings["methods"])
            )
        except MissingExtraError as error:
            picture = f"<p>{html.escape(str(error))}</p>"
        else:
            run.write_text(f"figures/{'-'.join(condition.split(', '))}-{order}-{metric}.svg", svg)
            picture = svg[svg.index("<svg") :]
        sections.append(f"<h2>{html.escape(title)}</h2>{picture}{_table(result, order)}")
    views = [TokenMap.load(path).view() for path in _examples(run.folder, summary)]
    document = page(views, title=f"Perturbation study of {run.settings['model']}")
    text = f"{STYLE}<main class='study'>{_head(run, summary)}{''.join(sections)}{_missing(summary)}{_again(run)}</main>"
    run.write_text("report.html", document.replace("<body>", f"<body>\n{text}", 1))


def each_result(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Condition, order, metric and what was found there."""
    for condition, found in summary.get("conditions", {}).items():
        for order, metric in TITLES:
            if metric in found.get(order, {}):
                yield condition, order, metric, found[order][metric]


def _head(run: Run, summary: Mapping[str, Any]) -> str:
    settings = run.settings
    lines = [
        f"<h1>Perturbation study of {html.escape(settings['model'])}</h1>",
        f"<p>{summary['n_measured']} of {summary['n_samples']} samples measured, {summary['n_skipped']} skipped. "
        f"Tokens replaced: {', '.join(f'{100 * fraction:g}%' for fraction in summary['grid'])}, ranked by "
        f"{'magnitude' if settings['absolute'] else 'signed score'}. {_replaced(settings)}"
        f"Gate convention: {html.escape(str(settings['rules'].get('gate')))}.</p>",
        "<p>The best map of the tensor against the best of the paper's eight baselines, both chosen after the fact; 95 "
        "% intervals by resampling the samples, and the part of resamples in which the tensor is ahead."
        f"{_few(summary['n_measured'])}</p>",
    ]
    rows = []
    for condition, order, metric, result in each_result(summary):
        against = result.get("tensor_against_baseline")
        if order == "most" and against and against["n"]:
            low, high = against["interval"]
            found = f"{against['advantage']:+.4g} [{low:+.4g}, {high:+.4g}]"
            cells = [condition, METRICS[metric], against["first"], against["second"], found]
            rows.append([*cells, f"{against['probability']:.3f}"])
    heads = ("condition", "metric", "tensor", "baseline", "difference", "ahead in")
    return "".join(lines) + (html_table(heads, rows) if rows else "")


def _replaced(settings: Mapping[str, Any]) -> str:
    token = settings["data"].get("replacement_token")
    return (
        f"<code>token</code> stands for {html.escape(token)}. " if token and "token" in settings["replacements"] else ""
    )


def _few(n_measured: int) -> str:
    return f" With {n_measured} samples they say little." if n_measured < FEW else ""


def _table(result: Mapping[str, Any], order: str) -> str:
    rows = []
    each = result.get("tensor_against_each", {})
    for name in best_first(result["methods"], order):
        found = result["methods"][name]
        low, high = found["interval"]
        behind = f"{each[name]['probability']:.3f}" if "probability" in each.get(name, {}) else ""
        rows.append([name, f"{found['auc']:.5g}", f"[{low:.5g}, {high:.5g}]", str(found["n"]), behind])
    heads = ("method", "AUC", "95 % interval", "samples", "best tensor method ahead in")
    return html_table(heads, rows, best=result["best"].values())


def _missing(summary: Mapping[str, Any]) -> str:
    gaps = {
        (method, gap["n"], gap["reason"]): condition
        for condition, found in summary.get("conditions", {}).items()
        for method, gap in found["missing"].items()
    }
    items = [f"<li><b>{html.escape(m)}</b>: {n} samples. {html.escape(reason)}</li>" for m, n, reason in sorted(gaps)]
    items += [f"<li>skipped {html.escape(s['name'])}: {html.escape(s['reason'])}</li>" for s in summary["skipped"]]
    return f"<h2>Missing</h2><ul>{''.join(items)}</ul>" if items else ""


def _again(run: Run) -> str:
    config = html.escape(to_json(run.config, indent=1))
    return (
        "<h2>Run it again</h2><p>With these settings and the same data, in the same folder, a run goes on where it "
        f"stopped; in a new folder it gives the same summary.</p><pre>{config}</pre><h2>Maps of the first samples</h2>"
    )


def _examples(folder: Path, summary: Mapping[str, Any]) -> list[Path]:
    """Maps of the best method of each group, for the first samples."""
    first = next(((order, result) for _, order, _, result in each_result(summary)), None)
    chosen = list(first[1]["best"].values()) if first else []
    paths = [folder / "maps" / f"{index}.{method}.json" for index in range(3) for method in chosen]
    return [path for path in paths if path.is_file()]
