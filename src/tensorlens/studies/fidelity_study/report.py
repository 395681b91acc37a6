"""The tables and the report of a fidelity run, from its summary."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from tensorlens.studies.fidelity_study.properties import LINES
from tensorlens.studies.report import Section, Table, write_page
from tensorlens.studies.runs import Run
from tensorlens.views.study_figures.fidelity import error_curves, property_panels

BOUNDS = {
    "log10_measured": "product, measured gates and attention",
    "log10_weights": "product, from weights",
    "log10_printed": "product as printed",
}


def norm_table(summary: dict[str, Any]) -> Table:
    """The norm, the bounds, how much too large each is."""
    norms = summary["norms"]
    true = math.log10(max(norms["measured"], 1e-300))
    first = {"what": "measured ‖T‖₂", "log10": f"{true:.2f}", "times the measured": "1"}
    return [first] + [
        {"what": label, "log10": f"{norms[name]:.2f}", "times the measured": f"1e{norms[name] - true:.1f}"}
        for name, label in BOUNDS.items()
        if norms[name] is not None
    ]


def alternative_table(summary: dict[str, Any]) -> Table:
    """The baselines in the place of T: their norm, the bound from their blocks, and the error at the input itself."""
    return [
        {
            "in the place of T": name,
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
            errors = {name: f"{found['curves'][name]['median'][i]:.2e}" for name in found["curves"]}
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
    """One line of a run, to be compared over checkpoints of a training."""
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
