"""The tables and the report of a fidelity run, from its summary."""

from __future__ import annotations

import math
from typing import Any

from tensorlens.errors import MissingExtraError
from tensorlens.studies.fidelity_study.properties import LINES
from tensorlens.studies.pages import Section, as_markdown, write_page
from tensorlens.studies.runs import Run
from tensorlens.views.study_figures.canvas import figure_svg
from tensorlens.views.study_figures.fidelity import error_curves, property_panels


def norm_table(summary: dict[str, Any]) -> str:
    """A Markdown table: the norm, the bounds, how much too large each is."""
    norms = summary["norms"]
    true = math.log10(max(norms["measured"], 1e-300))
    rows = [{"what": "measured ‖T‖₂", "log10": f"{true:.2f}", "times the measured": "1"}]
    labels = {
        "log10_measured": "product, measured gates and attention",
        "log10_weights": "product, from weights",
        "log10_printed": "product as printed",
    }
    for name, label in labels.items():
        if norms[name] is not None:
            rows.append(
                {"what": label, "log10": f"{norms[name]:.2f}", "times the measured": f"1e{norms[name] - true:.1f}"}
            )
    return as_markdown(rows)


def error_table(summary: dict[str, Any]) -> str:
    """A Markdown table: median errors relative to F(X) at some sizes."""
    rows = []
    for kind, found in summary["kinds"].items():
        n = len(found["sizes"])
        for i in sorted({0, n // 3, 2 * n // 3, n - 1}):
            errors = {name: f"{found['curves'][name]['median'][i]:.2e}" for name in found["curves"]}
            rows.append({"direction": kind, "‖ε‖/‖X‖": f"{found['sizes'][i]:.3g}", **errors})
    return as_markdown(rows)


def property_table(summary: dict[str, Any]) -> str:
    """A Markdown table of the properties, whole model and each range."""
    rows = []
    for record in summary["properties"]:
        name = f"{record['kind']} {record['start']}:{record['stop']}"
        rows.append({"range": name} | {line: f"{record[line]:.3g}" for line in LINES})
    return as_markdown(rows)


def write_report(run: Run, summary: dict[str, Any]) -> None:
    """Write `report.html` and the figures into a run's folder."""
    held = "Every error is below every right-hand side." if summary["holds"] else "A BOUND IS VIOLATED."
    sections = [Section(title="Bounds", text=held, tables=[norm_table(summary)])]
    try:
        drawn = {"fidelity.svg": error_curves(summary)}
        if summary["properties"]:
            drawn["properties.svg"] = property_panels(summary["properties"])
        for name, figure in drawn.items():
            svg = figure_svg(figure)
            run.write_text(name, svg)
            sections.append(Section(title=name.removesuffix(".svg").capitalize(), pictures=[svg]))
    except MissingExtraError as error:
        sections.append(Section(title="Figures", text=str(error)))
    sections.append(Section(title="Errors", tables=[error_table(summary)]))
    if summary["properties"]:
        sections.append(Section(title="Properties by range of blocks", tables=[property_table(summary)]))
    write_page(run, f"Fidelity: {run.settings['model']}", sections)
