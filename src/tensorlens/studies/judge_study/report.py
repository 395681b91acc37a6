"""A run of judges as tables and a page: for each judge its methods, best first, with intervals and cost."""

from __future__ import annotations

from typing import Any

from tensorlens.studies.judge_study.items import QUESTIONS
from tensorlens.studies.pages import Section, as_markdown, write_page
from tensorlens.studies.runs import Run


def judge_table(found: dict[str, Any]) -> str:
    """A Markdown table of one judge: what each method gets, its interval, its difference to the paper's T, its cost."""
    measure = next(iter(found["measures"]))  # the one that ranks
    compared = found["measures"][measure]
    rows = []
    for name, one in compared["methods"].items():
        difference = next((value for key, value in one.items() if key.startswith("less ")), None)
        seconds = found["seconds"].get(name)
        rows.append(
            {
                "method": name,
                measure.replace("_", " "): _with_interval(one),
                "less the paper's T": _signed(difference),
                "items": one["n"],
                "ms an item": "–" if seconds is None else f"{1000 * seconds:.3g}",
            }
        )
    rows.append(
        {
            "method": "(chance)",
            measure.replace("_", " "): f"{compared['random']:.3f}",
            "less the paper's T": "",
            "items": "",
            "ms an item": "",
        }
    )
    return as_markdown(rows)


def set_table(found: dict[str, Any]) -> str:
    """A Markdown table of one judge, by set."""
    compared = next(iter(found["measures"].values()))
    sets = list(compared["random_by_set"])
    rows = [
        {"method": name} | {one: _number(method.get("sets", {}).get(one)) for one in sets}
        for name, method in compared["methods"].items()
    ]
    rows.append({"method": "(chance)"} | {one: _number(compared["random_by_set"][one]) for one in sets})
    return as_markdown(rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _with_interval(one: dict[str, Any]) -> str:
    return "–" if one["mean"] is None else f"{one['mean']:.3f} [{one['interval'][0]:.3f}, {one['interval'][1]:.3f}]"


def _signed(one: dict[str, Any] | None) -> str:
    if one is None or one["mean"] is None:
        return "–"
    return f"{one['mean']:+.3f} [{one['interval'][0]:+.3f}, {one['interval'][1]:+.3f}]"


def counts_line(found: dict[str, Any]) -> str:
    """How many items were measured, and what became of the others."""
    left_out: dict[str, int] = {}
    for one in found["sets"].values():
        for reason, n in one["left_out"].items():
            left_out[reason] = left_out.get(reason, 0) + n
    said = "; ".join(f"{n} left out: {reason}" for reason, n in left_out.items())
    rows = f"{found['n_problems']} rows could not be used" if found["n_problems"] else ""
    return "; ".join(
        part for part in (f"{found['n_measured']} of {found['n_items']} items measured", said, rows) if part
    )


def write_report(run: Run, summary: dict[str, Any]) -> None:
    """Write `report.html` into a run's folder."""
    sections = []
    for name, found in summary["judges"].items():
        text = "\n".join([QUESTIONS[found["question"]], counts_line(found), *found["problems"]])
        tables = [judge_table(found), set_table(found)] if found["measures"] else []
        sections.append(Section(title=name, text=text, tables=tables))
    if summary.get("perturbation"):
        sections.append(Section(title="perturbation", tables=[area_table(summary["perturbation"])]))
    if summary.get("peers"):
        sections.append(Section(title="Peers", text="\n".join(peer_lines(summary))))
    write_page(run, f"Judges: {run.settings['model']}", sections)


def area_table(areas: dict[str, Any]) -> str:
    """A Markdown table of the areas of a perturbation study."""
    return as_markdown(
        [
            {
                "method": name,
                "HS-MSE": f"{one['auc']:.4g} [{one['interval'][0]:.4g}, {one['interval'][1]:.4g}]",
                "windows": one["n"],
            }
            for name, one in areas.items()
        ]
    )


def peer_lines(summary: dict[str, Any]) -> list[str]:
    """What is to be said of each peer: its version, its own example, its error."""
    return [
        f"{name} {about.get('version', '')}: {about['n']} items"
        + (f"; its own example: {about['check']}" if "check" in about else "")
        + (f"; {about['error']}" if "error" in about else "")
        for name, about in summary.get("peers", {}).items()
    ]
