"""Records in the terminal and in notebooks: tables of text that is shown and never interpreted."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tensorlens.views.labels import visible

WIDTH = 100
"""Width of a line in a notebook, in characters."""

_PRE = '<pre style="white-space:pre-wrap;font-family:ui-monospace,monospace;line-height:1.35">{code}</pre>'


def heading(text: str) -> Text:
    """A line in bold."""
    return Text(visible(text), style="bold")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Table:
    """A table: rows of text below the names of their columns.

    Args:
        columns: Their names.
        rows: The cells.
        numbers: The columns of numbers, which are right-aligned.
    """
    made = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        made.add_column(Text(visible(name) if name else ""), justify="right" if place in numbers else "left")
    for row in rows:
        made.add_row(*(Text(visible(cell) if cell else "") for cell in row))
    return made


def print_parts(parts: Iterable[RenderableType], console: Console | None) -> None:
    """Print a record; without a console, to standard output."""
    console = console or Console(highlight=False)
    for part in parts:
        console.print(part)


def as_html(show: Callable[[Console], object]) -> str:
    """The printed text of an object, for a notebook."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, highlight=False)
    show(console)
    return console.export_html(inline_styles=True, code_format=_PRE)


class Printed:
    """A mixin: notebooks show the object as it prints."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return text_as_html(str(self))


def text_as_html(text: str) -> str:
    """Lines of text, for a notebook."""
    lines = "\n".join(visible(line) if line else "" for line in text.splitlines())
    return as_html(lambda console: console.print(Text(lines)))
