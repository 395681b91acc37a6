"""How studies report results: means with bootstrap intervals, tables, and a run's `report.html`.

The same seed and number of units give the same draws, so differences are paired. The page has no links to anywhere.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens.errors import MissingExtraError
from tensorlens.files import to_json
from tensorlens.maps.token_map import TokenMap
from tensorlens.studies.runs import Run
from tensorlens.views.page import page
from tensorlens.views.study_figures import figure_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_RESAMPLES = 2000


def resampled_means(values: np.ndarray, seed: int, units: Sequence[Any] | None = None) -> np.ndarray:
    """Means of values resampled with replacement; (resample,).

    Args:
        values: One per sample.
        seed: Random seed for the draws.
        units: The unit of each value, such as an article: all values of a unit are drawn together. Each value is its
            own unit if None.
    """
    _, of = np.unique(np.arange(len(values)) if units is None else np.array(units, dtype=str), return_inverse=True)
    sums, counts = np.bincount(of, values), np.bincount(of)
    generator = np.random.default_rng(seed)
    some = (generator.integers(len(sums), size=(100, len(sums))) for _ in range(N_RESAMPLES // 100))
    if units is None:
        return np.concatenate([values[drawn].mean(1) for drawn in some])
    return np.concatenate([sums[drawn].sum(1) / counts[drawn].sum(1) for drawn in some])


def interval(means: np.ndarray) -> tuple[float, float]:
    """The bounds of the middle 95 % of resampled means."""
    low, high = np.nanquantile(means, (0.025, 0.975))
    return float(low), float(high)


def short(value: Any, digits: int = 9) -> float:
    """Nine digits: far more than the data carry, and not the last bits, which depend on the machine."""
    return float(f"{float(value):.{digits}g}")


FEW_UNITS = 5
"""Below this many units, resampling may give the same mean every time, which says nothing."""


def with_interval(value: float, bounds: Sequence[float], n_units: int, form: str = ".5g") -> str:
    """A number with its interval, as tables show them; one of no width from few units is left out."""
    if n_units < FEW_UNITS and bounds[0] == bounds[1]:
        return f"{value:{form}}"
    return f"{value:{form}} [{bounds[0]:{form}}, {bounds[1]:{form}}]"


# Tables and the page --------------------------------------------------------------------------------------------------


Table = Sequence[Mapping[str, Any]]
"""Rows with the same keys, which are the heads of the columns."""

_STYLE = """<style>
.study { max-width: 60rem; margin: 1rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif }
.study table { border-collapse: collapse; margin: .75rem 0; font-size: 13px; display: block; overflow-x: auto }
.study th, .study td { padding: .25rem .75rem; text-align: left; border-bottom: 1px solid #8884; white-space: nowrap }
.study pre { overflow-x: auto; padding: .75rem; background: #8881 } .study .text { white-space: pre-line }
.study svg { max-width: 100%; height: auto; background: white }
</style>"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a page.

    Attributes:
        title: Its heading.
        text: Plain text, line breaks kept.
        figures: Functions that draw a figure each, called when the page is written.
        tables: Below the figures.
    """

    title: str
    text: str = ""
    figures: Sequence[Callable[[], Figure]] = ()
    tables: Sequence[Table] = ()


def write_page(run: Run, title: str, sections: Sequence[Section], maps: Sequence[TokenMap] = ()) -> None:
    """Write `report.html` into the folder of a run: the sections, how to run it again, and some maps."""
    again = (
        "With these settings and the same data, in the same folder, a run continues where it stopped; in a new folder "
        "it gives the same summary."
    )
    config = f"<pre>{html.escape(to_json(run.config, indent=1))}</pre>"
    last = "<h2>Maps of the first samples</h2>" if maps else ""
    body = "".join(map(_section, sections)) + _section(Section(title="Run it again", text=again)) + config + last
    plain = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n<body>\n'
    document = page([one.view() for one in maps], title=title) if maps else plain + "</body>\n</html>\n"
    text = f"<body>\n{_STYLE}<main class='study'><h1>{html.escape(title)}</h1>{body}</main>"
    run.write_text("report.html", document.replace("<body>", text, 1))


def _section(section: Section) -> str:
    text = f'<p class="text">{html.escape(section.text)}</p>' if section.text else ""
    try:
        drawn = [figure_svg(draw()) for draw in section.figures]
        figures = "".join(svg[svg.index("<svg") :] for svg in drawn)
    except MissingExtraError as error:
        figures = f"<p>{html.escape(str(error))}</p>"
    tables = "".join(f"<table>{_rows(table)}</table>" for table in section.tables if table)
    return f"<h2>{html.escape(section.title)}</h2>{text}{figures}{tables}"


def _rows(table: Table) -> str:
    lines = [("th", list(table[0])), *(("td", list(row.values())) for row in table)]
    return "".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>" for tag, cells in lines
    )


def markdown(rows: Table) -> str:
    """A Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)] if rows else []
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)
