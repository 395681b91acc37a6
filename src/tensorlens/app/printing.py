"""What commands print: strict JSON for scripts, tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tensorlens.strict_json import to_json


def print_json(content: Any) -> None:
    """Print JSON that every reader takes: what is no number (NaN, infinity) is null."""
    typer.echo(to_json(content))


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with the same keys as a table."""
    table = Table(*rows[0], box=None, pad_edge=False, header_style="dim")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row.values()))
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table; outside a terminal as wide as its cells, so that no cell is broken."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(
            console.width, Measurement.get(console, console.options.update(width=10_000), table).maximum
        )
    console.print(table)
