"""Curves of a perturbation run: how far the output moves as more and more tokens go, one line per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from tensorlens.views.study_figures.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that stay apart for colour-blind readers (Okabe and Ito), then the same dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#555555")
STYLES = tuple((colour, dashes) for dashes, colour in product(("-", "--", ":", "-."), COLOURS))


def perturbation_curves(
    curves: Mapping[str, Sequence[float]], grid: Sequence[float], title: str, label: str, methods: Sequence[str]
) -> Figure:
    """A line chart with the legend in the given order.

    Args:
        curves: Heights by method, one for each point of the grid.
        grid: Fractions of tokens replaced.
        title: Printed above.
        label: What the height is.
        methods: All methods of the run, so that one has the same colour in every figure.
    """
    figure = new_figure(6.9, 3.4)  # as wide as a page with two columns
    axes = figure.subplots()
    for name, curve in curves.items():
        colour, dashes = STYLES[methods.index(name) % len(STYLES)]
        axes.plot(grid, curve, dashes, color=colour, lw=1.4, label=name)
    axes.set_title(title, fontsize=8, loc="left")
    axes.set_xlabel("fraction of tokens replaced", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.set_xlim(grid[0], grid[-1])
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=6.5, frameon=False, handlelength=2.6)
    return figure
