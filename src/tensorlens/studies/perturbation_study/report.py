"""The report of a perturbation run: curves and tables, what is missing, and a few maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tensorlens.maps.token_map import TokenMap
from tensorlens.studies.perturbation_study.measures import ORDERS, Order, is_better
from tensorlens.studies.report import Section, Table, with_interval, write_page
from tensorlens.studies.runs import Run, best_first
from tensorlens.views.study_figures.perturbation import perturbation_curves

METRICS = {"hs_mse": "HS-MSE", "abs_aopc": "abs-AOPC", "aopc": "AOPC, signed", "accuracy": "accuracy"}
LABELS = {
    "hs_mse": "mean squared change of the output state",
    "abs_aopc": "absolute change of probability",
    "aopc": "drop of probability",
    "accuracy": "accuracy",
}
TITLES: dict[tuple[Order, str], str] = {
    (order, metric): f"{METRICS[metric]}, {order} relevant first "
    f"({'higher' if is_better(order, metric) else 'lower'} is better)"
    for order in ORDERS
    for metric in METRICS
}
FEW = 20
"""Samples below which intervals by resampling mean little."""


def perturbation_report(run: Run, summary: dict[str, Any], maps: Sequence[TokenMap]) -> None:
    """Write `report.html` from a run's summary, with some maps below."""
    sections = [Section(title="What was measured", text=_head(run.settings, summary), tables=[_against(summary)])]
    for condition, order, metric, result in each_result(summary):
        ranked = best_first(result["methods"], largest=is_better(order, metric))
        curves = {name: result["methods"][name]["curve"] for name in ranked}
        title = f"{condition}: {TITLES[order, metric]}"
        draw = partial(perturbation_curves, curves, summary["grid"], title, LABELS[metric], run.settings["methods"])
        sections.append(Section(title=title, figures=[draw], tables=[_table(result, ranked)]))
    missing = _missing(summary)
    sections += [Section(title="Missing", text="\n".join(missing))] if missing else []
    write_page(run, f"Perturbation study of {run.settings['model']}", sections, maps)


def each_result(summary: Mapping[str, Any]) -> Iterator[tuple[str, Order, str, dict[str, Any]]]:
    """Condition, order, metric and what was found there."""
    for condition, found in summary.get("conditions", {}).items():
        for order, metric in TITLES:
            if metric in found.get(order, {}):
                yield condition, order, metric, found[order][metric]


def _head(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    token, n_measured = settings["data"].get("replacement_token"), summary["n_measured"]
    stands = f"`token` stands for {token}. " if token and "token" in settings["replacements"] else ""
    few = f" With {n_measured} samples they say little." if n_measured < FEW else ""
    return (
        f"{n_measured} of {summary['n_samples']} samples measured, {summary['n_skipped']} skipped. Tokens replaced: "
        f"{', '.join(f'{100 * fraction:g}%' for fraction in summary['grid'])}, ranked by "
        f"{'magnitude' if settings['absolute'] else 'signed score'}. {stands}"
        f"Gate convention: {settings['rules'].get('gate')}.\n"
        "The best map of the tensor against the best of the paper's eight baselines, both chosen after the fact; 95 % "
        f"intervals by resampling the samples, and the part of resamples in which the tensor is ahead.{few}"
    )


def _against(summary: Mapping[str, Any]) -> Table:
    return [
        {
            "condition": condition,
            "metric": METRICS[metric],
            "tensor": against["first"],
            "baseline": against["second"],
            "difference": with_interval(against["advantage"], against["interval"], against["n"], "+.4g"),
            "ahead in": f"{against['probability']:.3f}",
        }
        for condition, order, metric, result in each_result(summary)
        for against in [result.get("tensor_against_baseline")]
        if order == "most" and against and against["n"]
    ]


def _table(result: Mapping[str, Any], ranked: Sequence[str]) -> Table:
    each = result.get("tensor_against_each", {})
    return [
        {
            "method": name,
            "AUC [95 % interval]": with_interval(one["auc"], one["interval"], one["n_units"]),
            "samples": one["n"],
            "best tensor method ahead in": f"{each[name]['probability']:.3f}"
            if "probability" in each.get(name, {})
            else "",
        }
        for name in ranked
        for one in [result["methods"][name]]
    ]


def _missing(summary: Mapping[str, Any]) -> list[str]:
    gaps = {
        (method, gap["n"], gap["reason"])
        for found in summary.get("conditions", {}).values()
        for method, gap in found["missing"].items()
    }
    lines = [f"{method}: {n} samples. {reason}" for method, n, reason in sorted(gaps)]
    return lines + [f"skipped {one['name']}: {one['reason']}" for one in summary["skipped"]]
