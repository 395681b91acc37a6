"""An empty figure, and a finished one as SVG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from tensorlens.errors import missing_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("Drawing a figure", "matplotlib", "plot") from None
    return Figure(figsize=(width, height), layout="constrained")


def figure_svg(figure: Figure) -> str:
    """A figure as an SVG document, the same bytes each time, its words as text that can be searched and read aloud."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tensorlens", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
