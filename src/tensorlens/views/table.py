"""`Table`: numbers with names on both axes. Results for users have one, for pandas, numpy and matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens.errors import InputError, missing_extra
from tensorlens.views.figures import LONGEST_HEADING, check_matplotlib, colour_map
from tensorlens.views.labels import distinct, drawable, font_families, shorten_inside, visible, wrapped
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
    """A result with a table: ``found.to_pandas()``, ``numpy.asarray(found)`` and ``found.plot(ax=ax)``."""

    __slots__ = ()

    def _table(self) -> Table:
        raise NotImplementedError

    @property
    def headline(self) -> str:
        """The question that it answers, in one sentence."""
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
        values = np.vectorize(_whole, otypes=[object])(table.values) if table.values.dtype == object else table.values
        return DataFrame(values, index=[*map(_whole, table.rows)], columns=[*map(_whole, table.columns)])

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


def _whole(name: str) -> str:
    """A name without halves of characters, which pandas cannot hold."""
    return name.encode("utf-8", "backslashreplace").decode()


# With matplotlib: bars, or cells with their names ---------------------------------------------------------------------

MOST_DRAWN = 40
"""The rows and columns to draw: the strongest, in their order."""
_LONGEST = 28
_TITLE_SIZE = 9.0


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
        ax.set_xlabel(shorten_inside(_name(name), _LONGEST), family=font_families(), parse_math=False)
    else:
        _cells(ax, values, table)
    _set_title(ax, shorten_inside(drawable(visible(title)).strip(), LONGEST_HEADING))
    return ax


def _set_title(ax: Axes, title: str) -> None:
    """The title in two lines as wide as the axes at most; a longer one loses its middle."""
    ax.figure.figure.draw_without_rendering()  # only a layout shows how wide they are
    width = 0.95 * ax.get_window_extent().width / ax.figure.dpi
    lines = wrapped(title, _TITLE_SIZE, width)
    while lines.count("\n") > 1:
        title = shorten_inside(title, 9 * len(title) // 10)
        lines = wrapped(title, _TITLE_SIZE, width)
    ax.set_title(lines, fontsize=_TITLE_SIZE, family=font_families(), parse_math=False)


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
    labels = distinct({int(k): _name(names[k]) for k in kept}, _LONGEST)  # type: ignore[index]
    axis.set_ticks(range(len(kept)), labels, family=font_families(), parse_math=False)  # type: ignore[attr-defined]


def _name(text: str) -> str:
    return drawable(visible(str(text))).strip()
