"""The pooled results of a perturbation run (curves, areas with intervals, who beats whom), and the report.

Intervals are paired bootstraps: all methods see the same resampled samples, so that what makes a sample hard for all of
them cancels in their differences. Numbers depend on the samples' content alone, not on the order they were finished in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from tensorlens.maps.token_map import TokenMap
from tensorlens.studies.report import Section, Table, interval, resampled_means, short, with_interval, write_page
from tensorlens.studies.runs import Run, best_first
from tensorlens.views.study_figures import Panel, perturbation_curves

Order = Literal["most", "least"]
ORDERS: tuple[Order, ...] = ("most", "least")
METRICS = ("hs_mse", "abs_aopc", "aopc", "accuracy")
RISING = ("hs_mse", "abs_aopc", "aopc")
"""Metrics that grow as more is lost; accuracy falls."""
GROUPS = {"tensor": "tensor", "rollout": "baseline", "mean": "baseline", "control": "control"}


def is_better(order: Order, metric: str) -> bool:
    """Whether a larger area is better: more is lost early where the most relevant tokens go first."""
    return (order == "most") == (metric in RISING)


def auc(curves: np.ndarray, grid: Sequence[float]) -> np.ndarray:
    """Area under each curve (…, step) over its range: the mean height, by trapezoids.

    Convention: divided by the range, so it does not depend on where the grid ends. Times the range it is the
    other scale of the AUC, the area itself; the paper does not say which one it reports.
    """
    points = list(zip(grid, np.moveaxis(curves, -1, 0), strict=True))
    steps = ((b - a) * (low + high) / 2 for (a, low), (b, high) in zip(points, points[1:], strict=False))
    return sum(steps, np.zeros(())) / (grid[-1] - grid[0])


def group(method: str) -> str:
    """Whether a method is the tensor's, one of the paper's eight baselines, a control, or another peer."""
    family, _, measure = method.partition(".")
    return "peer" if measure.endswith("without_sink") else GROUPS.get(family, "peer")


def perturbation_summary(records: Sequence[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run, by condition, order and metric."""
    measured = [record for record in records if "skipped" not in record]
    conditions = list(dict.fromkeys(name for record in measured for name, _ in record["conditions"].items()))
    skipped = [{"name": record["name"], "reason": record["skipped"]} for record in records if "skipped" in record]
    return {
        "n_samples": len(records),
        "n_measured": len(measured),
        "n_skipped": len(skipped),
        "skipped": skipped[:50],
        "grid": settings["grid"],
        "n_tokens": _span([record["n_tokens"] for record in measured]),
        "n_labelled": sum("label" in record for record in measured),
        "conditions": {name: _condition(measured, name, settings) for name in conditions},
    }


def _span(values: Sequence[int]) -> dict[str, Any]:
    return {"min": min(values), "mean": short(np.mean(values)), "max": max(values)} if values else {}


def _condition(records: Sequence[dict[str, Any]], condition: str, settings: dict[str, Any]) -> dict[str, Any]:
    cells = [record["conditions"][condition] for record in records if condition in record["conditions"]]
    found: dict[str, Any] = {"missing": _missing(cells, settings["methods"])}
    units = [record.get("unit") for record in records if condition in record["conditions"]]
    for order in ORDERS:
        for metric in METRICS:
            curves = {method: curves_of(cells, method, order, metric) for method in settings["methods"]}
            curves = {method: array for method, array in curves.items() if np.isfinite(array).any()}
            if curves:
                found.setdefault(order, {})[metric] = Comparing(order, metric, units, settings).result(curves)
    return found


def _missing(cells: Sequence[dict[str, Any]], methods: Sequence[str]) -> dict[str, Any]:
    """For each method with gaps: how many, and the most frequent reason."""
    gaps = {method: [cell[method]["missing"] for cell in cells if "missing" in cell[method]] for method in methods}
    return {
        method: {"n": len(reasons), "reason": Counter(sorted(reasons)).most_common(1)[0][0]}
        for method, reasons in gaps.items()
        if reasons
    }


def curves_of(cells: Sequence[dict[str, Any]], method: str, order: str, metric: str) -> np.ndarray:
    """(sample, step), NaN where the method has no curve."""
    curves = [cell[method].get(order, {}).get(metric) for cell in cells]
    n_steps = max((len(curve) for curve in curves if curve is not None), default=1)
    return np.array([curve if curve is not None else [np.nan] * n_steps for curve in curves], dtype=np.float64)


class Comparing:
    """Compares the methods of one condition by one metric."""

    def __init__(self, order: Any, metric: str, units: Sequence[str | None], settings: dict[str, Any]) -> None:
        self.grid, self.seed = settings["grid"], settings["seed"]
        self.units = np.array(units, dtype=str) if any(unit is not None for unit in units) else None
        self.sign = 1.0 if is_better(order, metric) else -1.0

    def result(self, curves: dict[str, np.ndarray]) -> dict[str, Any]:
        """Areas with intervals, the best of each group of methods, and the tensor's advantage over the others."""
        areas = {name: self.areas(array) for name, array in curves.items()}
        methods = {name: self._method(areas[name], curves[name]) for name in areas}
        found: dict[str, Any] = {"methods": methods}
        best = {name: self._best(methods, name) for name in ("tensor", "baseline", "peer", "control")}
        found["best"] = {name: method for name, method in best.items() if method is not None}
        if best["tensor"] and best["baseline"]:
            found["tensor_against_baseline"] = self.against(areas, best["tensor"], best["baseline"])
        if best["tensor"]:
            found["tensor_against_each"] = {
                name: self.against(areas, best["tensor"], name) for name in areas if group(name) != "tensor"
            }
        return found

    def areas(self, curves: np.ndarray) -> np.ndarray:
        """The area under the curve of each sample."""
        return auc(curves, self.grid)

    def _best(self, methods: dict[str, Any], wanted: str) -> str | None:
        candidates = sorted(method for method in methods if group(method) == wanted)
        return max(candidates, key=lambda method: self.sign * methods[method]["auc"], default=None)

    def _resampled(self, values: np.ndarray, present: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """How many values there are, and means of them resampled, those of a unit together."""
        units = None if self.units is None else self.units[present].tolist()
        n = int(present.sum())
        n_units = n if units is None else len(set(units))
        return {"n": n, "n_units": n_units}, resampled_means(values[present], self.seed, units)

    def _method(self, areas: np.ndarray, curves: np.ndarray) -> dict[str, Any]:
        present = np.isfinite(areas)
        counts, resampled = self._resampled(areas, present)
        mean = areas[present].mean()
        return counts | {
            "auc": short(mean),
            "area": short(mean * (self.grid[-1] - self.grid[0])),
            "interval": [*map(short, interval(resampled))],
            "curve": [*map(short, curves[present].mean(0))],
        }

    def against(self, areas: dict[str, np.ndarray], first: str, second: str) -> dict[str, Any]:
        """The paired difference of two methods, over the samples that both have; positive where the first is better."""
        difference = (areas[first] - areas[second]) * self.sign
        present = np.isfinite(difference)
        if not present.any():
            return {"first": first, "second": second, "n": 0}
        counts, resampled = self._resampled(difference, present)
        return {
            "first": first,
            "second": second,
            **counts,
            "advantage": short(difference[present].mean()),
            "interval": [*map(short, interval(resampled))],
            "probability": short((resampled > 0).mean() + (resampled == 0).mean() / 2),
        }


# Report ---------------------------------------------------------------------------------------------------------------


METRIC_NAMES = {"hs_mse": "HS-MSE", "abs_aopc": "abs-AOPC", "aopc": "AOPC, signed", "accuracy": "accuracy"}
LABELS = {
    "hs_mse": "mean squared change of the output state",
    "abs_aopc": "absolute change of probability",
    "aopc": "drop of probability",
    "accuracy": "accuracy",
}
TITLES: dict[tuple[Order, str], str] = {
    (order, metric): f"{METRIC_NAMES[metric]}, {order} relevant first "
    f"({'higher' if is_better(order, metric) else 'lower'} is better)"
    for order in ORDERS
    for metric in METRIC_NAMES
}
FEW = 20
"""Samples below which intervals by resampling mean little."""


def perturbation_report(run: Run, summary: dict[str, Any], maps: Sequence[TokenMap]) -> None:
    """Write `report.html` from a run's summary, with some maps below."""
    sections = [Section(title="What was measured", text=_head(run.settings, summary), tables=[_against(summary)])]
    for condition in summary["conditions"]:
        panels, tables = [], []
        for name, order, metric, result in each_result(summary):
            if name == condition:
                panels.append(curves_panel(TITLES[order, metric], order, metric, result))
                title = f"{condition}: {TITLES[order, metric]}"
                tables.append(Section(title=title, tables=[_table(result, _ranked(order, metric, result))]))
        draw = partial(perturbation_curves, panels, summary["grid"], run.settings["methods"])
        sections += [Section(title=condition, figures=[draw] if panels else []), *tables]
    missing = _missing_lines(summary)
    sections += [Section(title="Missing", text="\n".join(missing))] if missing else []
    write_page(run, f"Perturbation study of {run.settings['model']}", sections, maps)


def curves_panel(title: str, order: Order, metric: str, result: Mapping[str, Any]) -> Panel:
    """The curves that a figure draws of one result, the best method first."""
    curves = {name: result["methods"][name]["curve"] for name in _ranked(order, metric, result)}
    return title, LABELS[metric], curves


def _ranked(order: Order, metric: str, result: Mapping[str, Any]) -> list[str]:
    return best_first(result["methods"], largest=is_better(order, metric))


def each_result(summary: Mapping[str, Any]) -> Iterator[tuple[str, Order, str, dict[str, Any]]]:
    """Condition, order, metric and what was found there."""
    for condition, found in summary.get("conditions", {}).items():
        for order, metric in TITLES:
            if metric in found.get(order, {}):
                yield condition, order, metric, found[order][metric]


def best_methods(summary: Mapping[str, Any]) -> list[str]:
    """The best method of each group in the first result."""
    return next((list(result["best"].values()) for *_, result in each_result(summary)), [])


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
            "metric": METRIC_NAMES[metric],
            "tensor": against["first"],
            "baseline": against["second"],
            "difference": with_interval(against["advantage"], against["interval"], against["n_units"], "+.4g"),
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


def _missing_lines(summary: Mapping[str, Any]) -> list[str]:
    gaps = {
        (method, gap["n"], gap["reason"])
        for found in summary.get("conditions", {}).values()
        for method, gap in found["missing"].items()
    }
    lines = [f"{method}: {n} samples. {reason}" for method, n, reason in sorted(gaps)]
    return lines + [f"skipped {one['name']}: {one['reason']}" for one in summary["skipped"]]
