"""`tensorlens methods`."""

from __future__ import annotations

import json as json_module

import typer
from rich.console import Console
from rich.table import Table

from tensorlens.app.options import Json
from tensorlens.maps.methods import METHODS


def methods(json: Json = False) -> None:
    """The maps by name, with a line each.

    Example: tensorlens methods
    """
    if json:
        typer.echo(json_module.dumps({name: method.summary for name, method in METHODS.items()}, ensure_ascii=False))
        return
    table = Table("method", "what it shows", box=None, pad_edge=False)
    for name, method in METHODS.items():
        table.add_row(name, method.summary)
    Console().print(table)
