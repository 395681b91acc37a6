"""The command line: `tensorlens COMMAND`, or `python -m tensorlens COMMAND`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tensorlens.__about__ import __version__
from tensorlens.app.check_command import check
from tensorlens.app.explore_command import explore
from tensorlens.app.families_command import families
from tensorlens.app.fidelity_command import fidelity
from tensorlens.app.map_command import map_
from tensorlens.app.methods_command import methods
from tensorlens.app.perturb_command import perturb
from tensorlens.app.relations_command import relations
from tensorlens.errors import TensorLensError

app = typer.Typer(
    name="tensorlens",
    help="A Transformer, at a given input, as one exact linear operator: F(X) = T·X + B.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("map")(map_)
app.command("check")(check)
app.command("methods")(methods)
app.command("perturb")(perturb)
app.command("relations")(relations)
app.command("fidelity")(fidelity)
app.command("families")(families)
app.command("explore")(explore)


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"tensorlens {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line; what goes wrong on purpose is one message and exit code 2."""
    try:
        app()
    except TensorLensError as error:
        typer.echo(f"tensorlens: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
