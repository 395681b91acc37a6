"""The summary of a fidelity run over its inputs (curves by kind of direction, bounds, properties), and its report."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from tensorlens.studies.properties import LINES, mean_properties
from tensorlens.studies.report import Section, Table, write_page
from tensorlens.studies.runs import Run
from tensorlens.views.study_figures import error_curves, property_panels

ERRORS = ("tensor", "jacobian", "nothing")


def fidelity_summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Curves by kind of direction, bounds and properties, pooled over inputs."""
    kinds = sorted({direction["kind"] for record in records for direction in record["directions"]})
    norms = [record["norms"] for record in records]
    alternatives = [norm.get("alternatives", {}) for norm in norms]
    return {
        "n_inputs": len(records),
        "kinds": {kind: _kind(records, kind) for kind in kinds},
        "norms": {
            "measured": _middle([norm["measured"]["value"] for norm in norms]),
            "relative_distance_to_jacobian": _middle([norm["frobenius"]["relative"] for norm in norms]),
            "stable_rank": _middle([norm["stable_rank"] for norm in norms]),
            "alternatives": {
                name: {what: _middle([one[name][what] for one in alternatives if name in one]) for what in numbers}
                for name, numbers in alternatives[0].items()
            },
            **{name: _middle([norm[name] for norm in norms]) for name in norms[0] if name.startswith("log10_")},
        },
        "holds": all(_holds(record) for record in records),
        "properties": mean_properties([record["properties"] for record in records]),
    }


def _kind(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Curves over the common sizes."""
    rows: dict[str, list[list[float]]] = {}
    sizes: list[float] = []
    for record in records:
        for one in record["directions"]:
            if one["kind"] == kind:
                kept = [i for i, size in enumerate(one["sizes"]) if size != one["natural_size"]]
                sizes = [one["sizes"][i] for i in kept]
                for name, curve in ({name: one[name] for name in ERRORS} | _bounds(record, one)).items():
                    rows.setdefault(name, []).append([curve[i] for i in kept])
    return {"sizes": sizes, "curves": {name: _band(curves) for name, curves in rows.items()}}


def _bounds(record: dict[str, Any], direction: dict[str, Any]) -> dict[str, list[float]]:
    r"""The right-hand side of Proposition 1 along a direction, for each value of $\Vert T\Vert_2$ at hand."""
    norms = record["norms"]
    values = {"bound_norm": math.log10(max(norms["measured"]["value"], 1e-300))}
    values |= {f"bound_{name}": norms[f"log10_{name}"] for name in ("weights", "measured")}
    ratio = math.log10(record["input_size"] / record["output_size"])
    pairs = list(zip(direction["sizes"], direction["nothing"], strict=True))
    return {
        # Above what a float holds the line stays at its edge.
        name: [10 ** min(log10 + math.log10(size) + ratio, 300) + change for size, change in pairs]
        for name, log10 in values.items()
        if log10 is not None
    }


def _holds(record: dict[str, Any]) -> bool:
    """Whether no error exceeds any right-hand side, up to rounding."""
    return all(
        error <= bound * (1 + 1e-3) + 1e-5
        for direction in record["directions"]
        for curve in _bounds(record, direction).values()
        for error, bound in zip(direction["tensor"], curve, strict=True)
    )


def _band(curves: list[list[float]]) -> dict[str, list[float]]:
    low, median, high = np.quantile(np.array(curves), (0.1, 0.5, 0.9), axis=0)
    return {"median": median.tolist(), "low": low.tolist(), "high": high.tolist()}


def _middle(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


# Tables and report ----------------------------------------------------------------------------------------------------


BOUNDS = {
    "log10_measured": "product, measured gates and attention",
    "log10_weights": "product, from weights",
    "log10_printed": "product as printed",
}


def norm_table(summary: dict[str, Any]) -> Table:
    """The norm, its bounds, and how many times too large each bound is."""
    norms = summary["norms"]
    true = math.log10(max(norms["measured"], 1e-300))
    first = {"what": "measured ‖T‖₂", "log10": f"{true:.2f}", "times the measured": "1"}
    return [first] + [
        {"what": label, "log10": f"{norms[name]:.2f}", "times the measured": f"1e{norms[name] - true:.1f}"}
        for name, label in BOUNDS.items()
        if norms[name] is not None
    ]


def alternative_table(summary: dict[str, Any]) -> Table:
    """The baselines in place of T: their norm, the bound from their blocks, and the error at the input itself."""
    return [
        {
            "in place of T": name,
            "‖R‖₂": f"{one['norm']:.3g}",
            "from its blocks": f"1e{one['log10_blocks']:.2f}",
            "‖RX − F(X)‖/‖F(X)‖": f"{one['at_x']:.3g}",
        }
        for name, one in summary["norms"].get("alternatives", {}).items()
    ]


def error_table(summary: dict[str, Any]) -> Table:
    """Median errors relative to F(X) at some sizes."""
    rows = []
    for kind, found in summary["kinds"].items():
        n = len(found["sizes"])
        for i in sorted({0, n // 3, 2 * n // 3, n - 1}):
            errors = {name: f"{curve['median'][i]:.2e}" for name, curve in found["curves"].items()}
            rows.append({"direction": kind, "‖ε‖/‖X‖": f"{found['sizes'][i]:.3g}", **errors})
    return rows


def property_table(summary: dict[str, Any]) -> Table:
    """The properties, whole model and each range."""
    return [
        {"range": f"{record['kind']} {record['start']}:{record['stop']}"}
        | {line: f"{record[line]:.3g}" for line in LINES}
        for record in summary["properties"]
    ]


def dynamics(summary: dict[str, Any]) -> dict[str, str]:
    """One line of a run, for comparing the checkpoints of a training run."""
    norms, whole = summary["norms"], [one for one in summary["properties"] if one["kind"] == "suffix"][:1]
    found = {
        "‖T‖₂": f"{norms['measured']:.4g}",
        "‖T − J‖/‖J‖": f"{norms['relative_distance_to_jacobian']:.3g}",
        "stable rank": f"{norms['stable_rank']:.3g}",
    }
    return found | {line: f"{one[line]:.3g}" for one in whole for line in LINES[1:]}


def fidelity_report(run: Run, summary: dict[str, Any]) -> None:
    """Write `report.html` into a run's folder."""
    none = " Baselines do not give F(X) at X, so the proposition does not apply to them: their error starts above zero."
    held = "Every error is below every right-hand side." + none if summary["holds"] else "A BOUND IS VIOLATED."
    sections = [
        Section(title="Bounds", text=held, tables=[norm_table(summary), alternative_table(summary)]),
        Section(title="Errors", figures=[partial(error_curves, summary)], tables=[error_table(summary)]),
    ]
    if summary["properties"]:
        drawn = [partial(property_panels, summary["properties"])]
        tables = [property_table(summary)]
        sections.append(Section(title="Properties by range of blocks", figures=drawn, tables=tables))
    write_page(run, f"Fidelity: {run.settings['model']}", sections)
