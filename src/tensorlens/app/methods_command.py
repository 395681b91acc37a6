"""`tensorlens methods`."""

from __future__ import annotations

from rich.table import Table

from tensorlens.app.options import Json
from tensorlens.app.printing import print_json, print_table


def methods(json: Json = False) -> None:
    """The maps by name, with a line each.

    Example: tensorlens methods
    """
    from tensorlens.maps.methods import METHODS

    if json:
        print_json({name: method.summary for name, method in METHODS.items()})
        return
    table = Table("method", "what it shows", box=None, pad_edge=False, header_style="dim")
    table.columns[0].no_wrap = True
    for name, method in METHODS.items():
        table.add_row(name, method.summary)
    print_table(table)
