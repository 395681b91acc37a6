"""Figures for print with matplotlib: a heat map, a row over the text, a row over the picture.

Each function returns a new `Figure`, without pyplot and global state. Lengths
are inches and the size is that of a paper column; everything but pictures and very large maps is vector.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens.errors import InputError, missing_extra
from tensorlens.views.labels import (
    distinct,
    drawable,
    fitted,
    font_families,
    shorten_inside,
    text_width,
    visible,
    wrapped,
)
from tensorlens.views.record import MapView, PatchGrid, limit_of, palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 3.35
"""Inches: one column of a two-column paper."""

_MARGIN = 0.05
_LEGEND = 0.36
_TITLE = 0.17
_HEADING = 0.2
_LINE_OF_TEXT = 0.15
LONGEST_HEADING = 240
_LARGEST_CELL = 0.3
_LABEL_SIZE = 7.5
_SMALLEST_LABEL = 4.0
_OPACITY = 0.9
_TEXT_SIZE = 8.5
_LINE = 0.21
_MOST_VECTOR_CELLS = 10_000
_INK, _MUTED, _EDGE = "#222930", "#5b6570", "#d7dbe0"
_SAVING = threading.Lock()


def heat_map(view: MapView) -> Figure:
    """The whole matrix: outputs down, inputs across; labels if they are readable, otherwise positions."""
    n_out, n_in = view.scores.shape
    size = min(_LABEL_SIZE, 0.85 * 72 * (_WIDTH - 0.6) / max(n_in, n_out / 1.35))
    left, top = (_TITLE + _gutter(tokens, size) for tokens in (view.out_tokens, view.in_tokens))
    heading, head = _heading(view)
    top += head
    cell_width = min(_LARGEST_CELL, (_WIDTH - left - _MARGIN) / n_in)
    lowest = 0.1 if 4 * n_out <= n_in else cell_width
    cell_height = min(_LARGEST_CELL, 1.35 * _WIDTH / n_out, max(cell_width, lowest))
    plot_width, plot_height = n_in * cell_width, n_out * cell_height
    height = top + plot_height + _LEGEND
    figure = _figure(height)
    _add_heading(figure, heading)
    axes = figure.add_axes((left / _WIDTH, _LEGEND / height, plot_width / _WIDTH, plot_height / height))
    colouring = _colouring(view, view.limit)
    _draw_cells(axes, view.coloured, colouring, min(cell_width, cell_height))
    _label_axis(axes.xaxis, view.in_tokens, min(size, 0.85 * 72 * cell_width))
    _label_axis(axes.yaxis, view.out_tokens, min(size, 0.85 * 72 * cell_height))
    axes.tick_params(axis="x", top=False, bottom=False, labeltop=True, labelbottom=False, labelrotation=90)
    down, across = view.axes
    muted = {"fontsize": _LABEL_SIZE, "color": _MUTED, "va": "top"}
    figure.text(left / _WIDTH, 1 - (head + 0.02) / height, f"{across} →", **muted)
    figure.text(0.02 / _WIDTH, 1 - top / height, f"← {down}", rotation=90, ha="left", **muted)
    length = min(max(plot_width, 0.8), 0.8 if view.aside else 1.6)
    _add_legend(figure, colouring, left, length)
    _add_aside(figure, view, None, left + length + 0.15)
    return figure


def row_over_text(view: MapView) -> Figure:
    """The input text, each token on the colour of its score for the only output."""
    heading, head = _heading(view)
    boxes, depth = _place_tokens(view.in_tokens, head)
    note = _wrapped(view.sums[0], _LABEL_SIZE - 0.5) if view.sums else ""
    height = depth + _LEGEND + 0.02 + _LINE_OF_TEXT * len(note.splitlines())
    figure = _figure(height)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    shown = view.coloured[0]
    colouring = _colouring(view, limit_of(shown))
    for j, (box, score) in enumerate(zip(boxes, shown, strict=True)):
        _draw_token(axes, box, colouring.to_rgba(float(score)), is_aside=j in view.aside)
    _add_heading(figure, heading)
    if note:
        axes.text(_MARGIN, depth + 0.02, note, va="top", **_style(_LABEL_SIZE - 0.5, _MUTED))
    _add_legend(figure, colouring, _MARGIN, min(1.6, _WIDTH / 2))
    _add_aside(figure, view, view.scores[0], _MARGIN + min(1.6, _WIDTH / 2) + 0.15)
    return figure


def patch_overlay(view: MapView, grid: PatchGrid) -> Figure:
    """The picture with its patches coloured by their score for the only output; without one, the patches alone."""
    of_patches = view.scores[0, grid.first : grid.first + grid.n_patches]
    limit = limit_of(of_patches)  # a class token beside them may be many times larger
    patches = np.clip(of_patches.reshape(grid.rows, grid.columns), -limit, limit)  # infinities are at the end of it
    side = _WIDTH - 2 * _MARGIN
    heading, head = _heading(view)
    height = side * grid.rows / grid.columns + _LEGEND + head
    figure = _figure(height)
    _add_heading(figure, heading)
    axes = figure.add_axes((_MARGIN / _WIDTH, _LEGEND / height, side / _WIDTH, 1 - (_LEGEND + head) / height))
    extent = (0.0, float(grid.columns), float(grid.rows), 0.0)
    colouring = _colouring(view, limit)
    alpha = np.ones_like(patches)
    if view.image is not None:
        axes.imshow(_muted(_picture(view.image)), extent=extent, interpolation="antialiased", aspect="auto")
        # A patch covers the picture by the size of its score, as in the page's overlay.
        alpha = _OPACITY * np.nan_to_num(np.abs(patches) / limit, nan=1.0)
    image = {"cmap": colouring.cmap, "norm": colouring.norm, "alpha": alpha, "extent": extent, "aspect": "auto"}
    axes.imshow(patches, interpolation="nearest" if view.image is None else "bilinear", **image)
    axes.set(xticks=[], yticks=[])
    _thin_frame(axes)
    _add_legend(figure, colouring, _MARGIN, min(1.6, _WIDTH / 2))
    return figure


def figure_of(view: MapView) -> Figure:
    """The figure that suits the map: picture, row or matrix."""
    check_matplotlib()
    if not view.scores.size:
        raise InputError(f"Expected a map with scores to draw, got {view.scores.shape}. Save it as .json instead.")
    if view.scores.shape[0] == 1:
        return row_over_text(view) if view.grid is None else patch_overlay(view, view.grid)
    return heat_map(view)


def write_figure(view: MapView, path: Path, kind: str) -> None:
    """Write `figure_of(view)` as "png", "svg" or "pdf"; the same map gives the same bytes."""
    figure = figure_of(view)
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    import matplotlib

    # Publishers refuse Type 3 fonts; the setting is global in matplotlib, so it is changed only for the write.
    with _SAVING, matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "tensorlens"}):
        figure.savefig(path, format=kind, dpi=300, metadata=dates)


def figure_writers(view: Callable[[], MapView]) -> dict[str, Callable[[Path], None]]:
    """By suffix, what draws a map into a file."""
    return {f".{kind}": lambda path, kind=kind: write_figure(view(), path, kind) for kind in ("png", "svg", "pdf")}


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), dpi=150)


def _colouring(view: MapView, limit: float) -> Any:
    """Colours and their limits, as matplotlib maps numbers to colours."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = Normalize(-limit if view.is_signed else 0.0, limit, clip=True)
    return ScalarMappable(scale, colour_map(is_signed=view.is_signed))


def _style(size: float = _LABEL_SIZE, colour: str = _INK) -> dict[str, Any]:
    """How a text is set."""
    return {"fontsize": size, "family": font_families(), "color": colour, "parse_math": False}


def colour_map(*, is_signed: bool) -> Any:
    """The colours of maps as matplotlib takes them."""
    from matplotlib.colors import LinearSegmentedColormap

    stops = palette("signed" if is_signed else "unsigned", "light")
    return LinearSegmentedColormap.from_list("tensorlens", list(stops), N=511).with_extremes(bad=_missing())


def _missing() -> str:
    return palette("missing", "light")[0]


def check_matplotlib() -> None:
    """Refuse to draw without matplotlib."""
    if find_spec("matplotlib") is None:
        raise missing_extra("A figure", "matplotlib", "plot")


def _draw_cells(axes: Axes, scores: np.ndarray, colouring: Any, cell: float) -> None:
    n_out, n_in = scores.shape
    numbers = np.clip(scores, -colouring.norm.vmax, colouring.norm.vmax)  # infinities are at the end of the scale
    image = {"cmap": colouring.cmap, "norm": colouring.norm}
    if scores.size <= _MOST_VECTOR_CELLS:
        line = 0.5 if cell >= 0.08 else 0.0
        masked = np.ma.masked_invalid(numbers)
        axes.pcolormesh(masked, edgecolors="white" if line else "face", linewidth=line or 0.1, **image)
    else:
        axes.imshow(numbers, extent=(0, n_in, n_out, 0), interpolation="nearest", aspect="auto", **image)
    axes.set(xlim=(0, n_in), ylim=(n_out, 0))
    _thin_frame(axes)


def _gutter(tokens: tuple[str, ...], size: float) -> float:
    if size < _SMALLEST_LABEL:
        return text_width(str(len(tokens)), _LABEL_SIZE - 1) + 0.06
    return max(text_width(label, size) for label in _labels(dict(enumerate(tokens)))) + 0.06


def _label_axis(axis: Any, tokens: tuple[str, ...], size: float) -> None:
    """Tokens when a cell holds a readable line, otherwise a few positions."""
    axis.set_tick_params(length=0, pad=2, labelcolor=_INK, labelsize=max(size, _LABEL_SIZE - 1))
    if size < _SMALLEST_LABEL:
        step = next(step for step in (10, 20, 50, 100, 200, 500, 1000, 10**9) if len(tokens) / step <= 8)
        axis.set_ticks(np.arange(0, len(tokens), step) + 0.5, [str(k) for k in range(0, len(tokens), step)])
        return
    axis.set_ticks(np.arange(len(tokens)) + 0.5, _labels(dict(enumerate(tokens))), **_style(size))


def _labels(tokens: Mapping[int, str]) -> list[str]:
    return distinct({place: drawable(visible(token)).strip() for place, token in tokens.items()}, 16)


def _place_tokens(tokens: tuple[str, ...], top: float) -> tuple[list[tuple[float, float, float, str]], float]:
    """Left edge, top, width and text of each token, broken into lines; and the depth of all lines."""
    boxes, x, y = [], _MARGIN, _MARGIN + top
    for token in tokens:
        text = shorten_inside(drawable(visible(token)), 40).replace(" ", "\u00a0")
        text = fitted(text, _TEXT_SIZE, _WIDTH - 2 * _MARGIN - 0.03)
        box_width = text_width(text, _TEXT_SIZE) + 0.03
        if x + box_width > _WIDTH - _MARGIN and x > _MARGIN:
            x, y = _MARGIN, y + _LINE
        boxes.append((x, y, box_width, text))
        x += box_width + 0.01
        if "\n" in token:
            x, y = _MARGIN, y + _LINE
    return boxes, y + _LINE


def _draw_token(axes: Axes, box: tuple[float, float, float, str], colour: Any, *, is_aside: bool = False) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import FancyBboxPatch

    x, y, width, text = box
    rounded = "round,pad=0,rounding_size=0.025"
    face = {"facecolor": "white", "edgecolor": _MUTED, "linestyle": ":", "linewidth": 0.6}
    face = face if is_aside else {"facecolor": colour, "edgecolor": "none"}
    colour = "white" if is_aside else colour
    axes.add_patch(FancyBboxPatch((x, y), width, _LINE - 0.03, boxstyle=rounded, **face))
    red, green, blue = (part**2.2 for part in to_rgb(colour))
    ink = "#111418" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.19 else "#ffffff"
    axes.text(x + 0.015, y + 0.13, text, **_style(_TEXT_SIZE, ink))


def _heading(view: MapView) -> tuple[str, float]:
    """The title of a figure, in lines that fit its width, and the height of these lines."""
    lines = _wrapped(view.heading, _LABEL_SIZE)
    return lines, _HEADING + _LINE_OF_TEXT * lines.count("\n")


def _add_heading(figure: Figure, text: str) -> None:
    width, height = figure.get_size_inches()
    figure.text(_MARGIN / width, 1 - 0.03 / height, text, va="top", **_style())


def _wrapped(text: str, size: float) -> str:
    """The text in lines for the width of a figure; letters are set on whole pixels, so lines may come out wider."""
    text = shorten_inside(drawable(visible(text)).strip(), LONGEST_HEADING)
    return wrapped(text, size, 0.93 * (_WIDTH - 2 * _MARGIN))


def _add_aside(figure: Figure, view: MapView, row: np.ndarray | None, left: float) -> None:
    """Beside the legend: the inputs without a colour, each with a bar if there is one row."""
    if not view.aside:
        return
    width, height = figure.get_size_inches()
    names = ", ".join(_labels({j: view.in_tokens[j] for j in view.aside[:3]}))
    sign = "+" if view.is_signed else ""
    numbers = "" if row is None else " " + ", ".join(f"{row[j]:{sign}.3g}" for j in view.aside[:3])
    room = 0.93 * (width - left - _MARGIN) - text_width(f"set aside: {numbers}", _LABEL_SIZE - 0.5)
    line = f"set aside: {fitted(names, _LABEL_SIZE - 0.5, room)}{numbers}"
    figure.text(left / width, 0.13 / height, line, va="top", **_style(_LABEL_SIZE - 0.5, _MUTED))
    if row is not None:
        bar = figure.add_axes((left / width, 0.2 / height, max(width - left - _MARGIN, 0.1) / width, 0.065 / height))
        bar.set_facecolor(_missing())
        bar.set(xticks=[], yticks=[])
        _thin_frame(bar)


def _add_legend(figure: Figure, colouring: Any, left: float, length: float) -> None:
    width, height = figure.get_size_inches()
    place = figure.add_axes((left / width, 0.2 / height, length / width, 0.065 / height))
    bar = figure.colorbar(colouring, cax=place, orientation="horizontal")
    low, high = colouring.norm.vmin, colouring.norm.vmax
    ends = [f"−{high:.3g}", "0", f"+{high:.3g}"] if low < 0 else ["0", f"{high:.3g}"]
    bar.set_ticks([low, 0.0, high] if low < 0 else [low, high], labels=ends)
    labels = bar.ax.get_xticklabels()
    labels[0].set_horizontalalignment("left")
    labels[-1].set_horizontalalignment("right")
    bar.ax.tick_params(length=0, labelsize=_LABEL_SIZE - 0.5, pad=2, labelcolor=_MUTED)
    bar.outline.set(linewidth=0.3, edgecolor=_EDGE)


def _thin_frame(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set(linewidth=0.4, color=_EDGE)


def _muted(picture: np.ndarray) -> np.ndarray:
    """The picture without colour and nearly white, so that an overlay can be seen."""
    grey = picture.mean(axis=2, keepdims=True).repeat(3, axis=2)
    return (0.4 * grey + 0.6 * 255).astype(np.uint8)


def _picture(image: str) -> np.ndarray:
    from PIL import Image

    data = base64.b64decode(image.partition(",")[2])
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))
