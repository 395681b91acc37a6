"""What commands print: strict JSON for scripts, tables for people, and stages while a model works."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tensorlens.strict_json import to_json


def stage(name: str) -> None:
    """Say on standard error what is being done now; of several processes, the first one says it."""
    if os.environ.get("RANK", "0") == "0":
        typer.secho(f"{name} …", err=True, dim=True)


PATIENCE_SECONDS = 1.0


@contextmanager
def while_waiting(name: str) -> Iterator[None]:
    """Say on standard error what is being done, if it takes longer than a second."""
    timer = threading.Timer(PATIENCE_SECONDS, stage, (name,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_json(content: Any) -> None:
    """Print JSON that every reader takes: NaN and infinity become null."""
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
