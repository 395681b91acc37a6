"""Tables on matplotlib's axes: bars for one row or column, a heat map otherwise."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from tensorlens.errors import InputError
from tensorlens.views.figures import check_matplotlib, colour_map
from tensorlens.views.labels import drawable, font_families, shorten, visible
from tensorlens.views.record import limit_of
from tensorlens.views.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_DRAWN = 40
"""Rows and columns that are drawn, the strongest of them, in their order."""
_LONGEST = 28


def plot_table(table: Table, title: str, ax: Axes | None) -> Axes:
    """Draw a table; see `Tabular.plot`."""
    check_matplotlib()
    values = np.asarray(table.values)
    if values.dtype.kind not in "fiu" or not values.size:
        raise InputError("This record has no numbers to plot; `to_pandas` returns its contents.")
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.subplots(layout="constrained")[1]  # so that notebooks show it
    values = np.where(np.isfinite(values), values, np.nan).astype(float)
    if 1 in values.shape:
        across = values.shape[0] == 1
        _bars(ax, values.ravel(), table.columns if across else table.rows)
        name = (table.rows if across else table.columns)[0]
        ax.set_xlabel(_name(name), family=font_families(), parse_math=False)
    else:
        _cells(ax, values, table)
    ax.set_title(fill(drawable(visible(title)), 60), fontsize=10, family=font_families(), parse_math=False)
    return ax


def _strongest(sizes: np.ndarray) -> np.ndarray:
    """The places of the largest, in their order."""
    return np.sort(np.argsort(-np.nan_to_num(sizes), kind="stable")[:MOST_DRAWN])


def _bars(ax: Axes, values: np.ndarray, names: object) -> None:
    kept = _strongest(np.abs(values))
    below, above = colour_map(is_signed=True)([0.15, 0.85])
    ax.barh(range(len(kept)), values[kept], color=[below if one < 0 else above for one in values[kept]])
    ax.axvline(0, color="#5b6570", linewidth=0.8)
    ax.invert_yaxis()
    _ticks(ax.yaxis, names, kept)


def _cells(ax: Axes, values: np.ndarray, table: Table) -> None:
    rows, columns = (_strongest(np.nansum(np.abs(values), axis=axis)) for axis in (1, 0))
    shown = values[np.ix_(rows, columns)]
    is_signed = bool((values < 0).any())
    limit = limit_of(shown)
    image = ax.imshow(
        shown, cmap=colour_map(is_signed=is_signed), vmin=-limit if is_signed else 0, vmax=limit, aspect="auto"
    )
    ax.figure.colorbar(image, ax=ax)
    _ticks(ax.yaxis, table.rows, rows)
    _ticks(ax.xaxis, table.columns, columns)
    ax.tick_params(axis="x", labelrotation=90)


def _ticks(axis: object, names: object, kept: np.ndarray) -> None:
    labels = [_name(names[k]) for k in kept]  # type: ignore[index]
    axis.set_ticks(range(len(kept)), labels, family=font_families(), parse_math=False)  # type: ignore[attr-defined]


def _name(text: str) -> str:
    return shorten(drawable(visible(str(text))), _LONGEST).strip()
