"""Maps in the terminal: bars for one row, a grid for a small matrix, the strongest inputs for a long one.

Every number is printed, so that nothing is lost without colour. Tokens are `Text`, never markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from rich.cells import set_cell_size
from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tensorlens.views.captions import bias_line
from tensorlens.views.labels import shorten, visible
from tensorlens.views.record import MapView, PatchGrid, by_strength, palette

_LISTED_INPUTS = 24
_SUMMED_OUTPUTS = 12
_INPUTS_A_LINE = 4
_LABEL_WIDTH = 16
_CELL_WIDTH = 5
_BAR_WIDTH = 24


def show(view: MapView, console: Console | None = None) -> None:
    """Print the map; without a console, to standard output."""
    console = console or Console(highlight=False)
    console.print(Group(_heading(view), _body(view, console.width), _caption(view)))


def show_body(view: MapView, console: Console | None = None) -> None:
    """Print the map and its sums, without its heading and provenance."""
    console = console or Console(highlight=False)
    sums = [Text(f"{line[:1].upper()}{line[1:]}.") for line in view.sums[:1] if len(view.sums) == 1]
    console.print(Group(_body(view, console.width), *sums))


def _body(view: MapView, width: int) -> RenderableType:
    n_out, n_in = view.scores.shape
    if not n_out or not n_in:
        return Padding(Text("Nothing to show: the map is empty.", style="italic"), (1, 0), expand=False)
    if n_out == 1:
        return _one_row(view)
    if _LABEL_WIDTH + 4 + n_in * _CELL_WIDTH <= width and n_out <= 2 * _LISTED_INPUTS:
        return _matrix(view)
    return _strongest(view)


def _heading(view: MapView) -> Text:
    n_out, n_in = view.scores.shape
    heading = Text(visible(view.title), style="bold")
    if view.title.startswith("Why "):  # the question names the output
        return heading
    outputs = (
        f"output {view.position(0)} {_label(view.out_tokens[0], 24).strip()}" if n_out == 1 else f"{n_out} outputs"
    )
    heading.append(f"   {outputs} × {n_in} input{'s'[: n_in != 1]}", style="dim")
    return heading


def _one_row(view: MapView) -> RenderableType:
    row = view.scores[0]
    parts: list[RenderableType] = []
    if view.grid is not None:
        parts.append(Padding(_patches(row, view.grid, view), (1, 0, 0, 0), expand=False))
    n_listed = _LISTED_INPUTS if view.grid is None else _LISTED_INPUTS // 3
    in_colours = [j for j in range(len(row)) if j not in view.aside]
    is_long = len(in_colours) > n_listed
    if is_long:
        in_colours = [j for j in by_strength(row) if j not in view.aside][:n_listed]
    parts.append(Padding(_bars(view, in_colours), (1, 0), expand=False))
    if is_long:
        parts += [Text(f"The {n_listed} strongest of {len(row)} inputs.", style="dim"), Text()]
    return Group(*parts)


def _bars(view: MapView, order: Iterable[int]) -> Table:
    """Inputs in the colour scale, then inputs outside it and a sink, on one scale; a bar that is too long is broken."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    coloured = [(str(j), view.in_tokens[j], float(view.scores[0, j])) for j in order]
    aside = [(str(j), view.in_tokens[j], float(view.scores[0, j])) for j in view.aside]
    aside += [("", "attention sink", given) for given in view.sink]
    for lines, is_aside in ((coloured, False), (aside, True)):
        for place, name, score in lines:
            style = "dim" if is_aside else ""
            number = Text(_number(score, view), style=style)
            table.add_row(place, Text(_label(name, 24), style=style), number, _bar(score, view, is_aside=is_aside))
    return table


def _bar(score: float, view: MapView, *, is_aside: bool = False) -> Text:
    """A bar from a common zero: to the left below zero, to the right above."""
    share = abs(score) / view.limit if score == score else 0.0
    half = _BAR_WIDTH // 2 if view.is_signed else _BAR_WIDTH
    length = round(share * half) if share < 1 else half
    colour = Style(dim=True) if is_aside else Style(color=_colour(0.7 if score > 0 else -0.7, view.is_signed))
    bar = "█" * (length - 2) + "╱╱" if share > 1.005 else "█" * length
    if not view.is_signed:
        return Text(bar, style=colour)
    left = Text(" " * (half - length) + bar[::-1] if score < 0 else " " * half, style=colour)
    return Text.assemble(left, ("│", "dim"), Text(bar if score > 0 else "", style=colour))


def _matrix(view: MapView) -> RenderableType:
    """Each cell is the score in percent of the largest, on its colour."""
    table = Table.grid(padding=0)
    table.add_column(justify="right", no_wrap=True)
    header = [Text("out ╲ in ", style="dim")]
    for token in view.in_tokens:
        table.add_column(width=_CELL_WIDTH, no_wrap=True, justify="right")
        header.append(Text(set_cell_size(_label(token, _CELL_WIDTH - 1).strip(), _CELL_WIDTH - 1) + " ", style="dim"))
    table.add_row(*header)
    for i, token in enumerate(view.out_tokens):
        cells = [_cell(float(score), view, j in view.aside) for j, score in enumerate(view.scores[i])]
        table.add_row(Text(f"{_label(token, _LABEL_WIDTH)} "), *cells)
    note = Text(f"Each cell is 100 × score ÷ {view.limit:.3g}, the largest score by size.", style="dim")
    if view.aside:
        names = ", ".join(_label(view.in_tokens[j], _LABEL_WIDTH).strip() for j in view.aside)
        note.append(f"\nSet aside, not in the colours: {names}.")
    return Padding(Group(table, Text(), note), (1, 0), expand=False)


def _cell(score: float, view: MapView, is_aside: bool = False) -> Text:
    share = score / view.limit
    if share != share:
        return Text(" nan ", style="dim")
    bounded = max(-1.0, min(share, 1.0))
    text = f"{share * 100:.0f}" if np.isfinite(share) else ("inf" if share > 0 else "-inf")
    style = Style(bgcolor=_colour(bounded, view.is_signed), color="black" if abs(bounded) < 0.55 else "white")
    style = Style(dim=True) if is_aside else style
    return Text("0 ".rjust(_CELL_WIDTH) if text == "-0" else f"{text} ".rjust(_CELL_WIDTH), style=style)


def _patches(row: np.ndarray, grid: PatchGrid, view: MapView) -> Text:
    """The picture's patches as blocks, or, without colour, as digits 0–9 relative to the largest size."""
    picture = Text(end="")
    values = row[grid.first : grid.first + grid.n_patches].reshape(grid.rows, grid.columns)
    for line in values:
        for score in line:
            share = max(-1.0, min(float(score) / view.limit, 1.0)) if score == score else 0.0
            digit = "·" if score != score else str(min(int(abs(share) * 10), 9))
            style = Style(bgcolor=_colour(share, view.is_signed), color="black" if abs(share) < 0.55 else "white")
            picture.append(f"{'-' if share < 0 and digit != '0' else ' '}{digit}", style=style)
        picture.append("\n")
    return picture


def _strongest(view: MapView) -> RenderableType:
    """For a long map: some outputs, each with its strongest inputs."""
    n_out = len(view.out_tokens)
    shown = (
        range(n_out) if n_out <= _SUMMED_OUTPUTS else np.linspace(0, n_out - 1, _SUMMED_OUTPUTS).astype(int).tolist()
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("output", no_wrap=True, justify="right")
    table.add_column("strongest inputs", overflow="fold")
    for i in shown:
        table.add_row(Text(f"{view.position(i)}  {_label(view.out_tokens[i], _LABEL_WIDTH)}"), _inputs_of(view, i))
    note = f"{len(shown)} of {n_out} outputs. For one of them: .show(out_token=…); for all: .save('map.html')."
    return Padding(Group(table, Text(), Text(note, style="dim")), (1, 0), expand=False)


def _inputs_of(view: MapView, i: int) -> Text:
    line = Text()
    for j in [j for j in by_strength(view.scores[i]) if j not in view.aside][:_INPUTS_A_LINE]:
        score = float(view.scores[i, j])
        line.append(_label(view.in_tokens[j], _LABEL_WIDTH).strip(), style="bold")
        colour = _colour(0.7 if score > 0 else -0.7, view.is_signed)
        line.append(f" {_number(score, view)}   ", style=Style(color=colour))
    return line


def _caption(view: MapView) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    of_row = [(name, values[0]) for name, values in view.row_caption if len(values) == 1]
    of_sum = [("Sum", view.sums[0])] if len(view.sums) == 1 else []
    for name, value in (*of_sum, *view.caption, *of_row, *bias_line(view.bias_share)):
        table.add_row(Text(name), Text(visible(value)))
    return table


def _label(token: str, width: int) -> str:
    return shorten(visible(token), width)


def _number(score: float, view: MapView) -> str:
    """With as many decimals as show three digits of the largest score, and a plus where there may be a minus."""
    magnitude, sign = math.floor(math.log10(view.limit)), "+" if view.is_signed else ""
    return f"{score:{sign}.{max(2 - magnitude, 0)}f}" if -4 <= magnitude <= 5 else f"{score:{sign}.2e}"


def _colour(share: float, is_signed: bool) -> Color:
    stops = palette("signed" if is_signed else "unsigned", "light")
    position = (share + 1) / 2 if is_signed else max(share, 0.0)
    return Color.parse(stops[round(position * (len(stops) - 1))])
