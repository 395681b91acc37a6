"""`Table`: numbers with names on both axes. What users hold has one, for pandas, numpy and matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens.errors import InputError, missing_extra
from tensorlens.views.figures import check_matplotlib, colour_map
from tensorlens.views.labels import drawable, font_families, shorten, visible
from tensorlens.views.record import limit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True, eq=False)
class Table:
    """Numbers with names.

    Attributes:
        values: (row, column).
        rows: A name for each row.
        columns: A name for each column.
    """

    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]


class Tabular:
    """What has a table: ``found.to_pandas()``, ``numpy.asarray(found)`` and ``found.plot(ax=ax)``."""

    __slots__ = ()

    def _table(self) -> Table:
        raise NotImplementedError

    @property
    def headline(self) -> str:
        """What it answers, in one sentence."""
        raise NotImplementedError

    def to_pandas(self) -> DataFrame:
        """The numbers of ``numpy.asarray`` as a data frame, with their names as index and columns.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        if find_spec("pandas") is None:
            raise missing_extra("A data frame", "pandas", "notebook")
        from pandas import DataFrame  # pyright: ignore[reportMissingImports]

        table = self._table()
        return DataFrame(table.values, index=list(table.rows), columns=list(table.columns))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The numbers; a copy, so that writing to it changes nothing here."""
        if copy is False:
            raise ValueError("The numbers of a record are always copied; leave `copy=False` out.")
        return np.array(self._table().values, dtype=dtype)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw it with matplotlib: bars for one row or column, a heat map otherwise; the headline is the title.

        Args:
            ax: Where to draw; axes of a new figure if None.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return plot_table(self._table(), self.headline, ax)


# With matplotlib: bars, or cells with their names ---------------------------------------------------------------------

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
