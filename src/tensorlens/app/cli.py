"""The command line: `tensorlens COMMAND`, or `python -m tensorlens COMMAND`.

No command imports torch before it runs: `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from tensorlens.__about__ import __version__
from tensorlens.app.answer_command import answer_
from tensorlens.app.check_command import check
from tensorlens.app.explore_command import explore
from tensorlens.app.fidelity_command import fidelity_
from tensorlens.app.inside_command import inside
from tensorlens.app.interrupts import interruptible
from tensorlens.app.map_command import map_
from tensorlens.app.maps_command import maps
from tensorlens.app.methods_command import methods
from tensorlens.app.models_command import models
from tensorlens.app.options import with_records
from tensorlens.app.perturb_command import perturb
from tensorlens.app.relations_command import relations_
from tensorlens.errors import TensorLensError
from tensorlens.studies.processes import tell_launcher

app = typer.Typer(
    name="tensorlens",
    help="Which inputs made this output? A Transformer, at a given input, as one exact linear operator: "
    "F(X) = T·X + B.\n\n"
    'Begin with: tensorlens map smollm2-135m "The Eiffel Tower is in the city of"\n\n'
    "A study that was stopped continues when the same command is given again.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def _add(name: str, command: Callable[..., None], short: str, *, continues: bool = False) -> None:
    app.command(name, short_help=short)(interruptible(with_records(command), continues=continues))


_add("map", map_, "Which inputs made this output?")
_add("answer", answer_, "Which parts of the prompt made this answer?")
_add("inside", inside, "Where in the model? Heads, flow and graph.")
_add("maps", maps, "A map of every row of a data set, as parquet.", continues=True)
_add("explore", explore, "The same in the browser.")
_add("check", check, "Is the operator exact for this model?")
_add("models", models, "The bundled models, and how to install them.")
_add("methods", methods, "The kinds of map, with a line each.")
_add("perturb", perturb, "Study: which method finds what matters?", continues=True)
_add("relations", relations_, "Study: relations decoded by the mean tensor.", continues=True)
_add("fidelity", fidelity_, "Study: how far from the input does T hold?", continues=True)


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
    """Run the command line; an error that we raise is one message and exit code 2."""
    try:
        app()
    except TensorLensError as error:
        if not tell_launcher(str(error)):
            typer.echo(f"tensorlens: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
