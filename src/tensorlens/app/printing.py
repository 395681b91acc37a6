"""What commands print: strict JSON for scripts, tables for people."""

from __future__ import annotations

import json
import math
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def print_json(content: Any) -> None:
    """Print JSON that every reader takes: what is no number (NaN, infinity) is null."""
    typer.echo(json.dumps(finite(content), ensure_ascii=False, allow_nan=False))


def finite(value: Any) -> Any:
    """`value` with None in place of NaN and infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_rows(markdown: str) -> None:
    """Print a Markdown table as a table."""
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in markdown.splitlines()]
    table = Table(*head, box=None, pad_edge=False, header_style="dim")
    for row in rows:
        table.add_row(*map(Text, row))
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table; where nobody looks at a screen, as wide as its cells, so that no cell is broken."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(
            console.width, Measurement.get(console, console.options.update(width=10_000), table).maximum
        )
    console.print(table)
