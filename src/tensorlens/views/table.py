"""`Table`: numbers with names on both axes. What users hold has one, for pandas, numpy and matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens.errors import missing_extra

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
        from tensorlens.views.plotting import plot_table

        return plot_table(self._table(), self.headline, ax)
