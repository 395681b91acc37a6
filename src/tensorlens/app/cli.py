"""The command line: `tensorlens COMMAND`, or `python -m tensorlens COMMAND`.

No command imports torch before it runs: `--help` answers at once. Results go to standard output, everything else
(stages, progress, hints, errors) to standard error.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tensorlens.__about__ import __version__
from tensorlens.app.answer_command import answer_, similar
from tensorlens.app.explain_command import explain_, map_
from tensorlens.app.explore_command import explore
from tensorlens.app.inspect_commands import check_, circuit_, inside, methods, models, size_
from tensorlens.app.maps_command import maps
from tensorlens.app.options import with_records
from tensorlens.app.study_commands import fidelity_, paper, perturb, relations_
from tensorlens.errors import InputError, TensorLensError
from tensorlens.models.bundled import BUNDLED
from tensorlens.studies.processes import tell_launcher

WRONG_USE = 2
"""Exit code for an error of this library; click uses the same for an unknown option."""
STOPPED = 130
"""Exit code that shells expect from a program stopped by Ctrl-C."""
WrongCommand: Any = typer.BadParameter.__base__
"""The error that typer raises for every command that it cannot read; the class has moved between its versions."""


class _Commands(TyperGroup):
    """Commands whose wrong use is answered with a line that works, as our own errors are, not with a box."""

    def main(self, *given: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*given, standalone_mode=False, **extra)
        try:
            code = super().main(*given, standalone_mode=False, **extra)
        except WrongCommand as error:
            if type(error).__name__ != "NoArgsIsHelpError":  # which has printed the help
                typer.echo(_what_works(error), err=True)
            sys.exit(WRONG_USE)
        sys.exit(code or 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        first = args[0]
        if first not in self.commands and (" " in first or first in BUNDLED):
            words = args if first in BUNDLED else ["smollm2-135m", *args]
            line = " ".join(f'"{word}"' if " " in word else word for word in words)
            raise InputError(f"Expected a command first: tensorlens explain {line}")
        return super().resolve_command(ctx, args)


def _what_works(error: Any) -> str:
    """The fault of a command as it was typed, and an example of the same command."""
    message, context = error.format_message(), error.ctx
    if message.startswith("Got unexpected extra argument"):
        message += ". Put a text of several words in quotes."
    if context is None:
        return f"tensorlens: {message}"
    lines = (context.command.help or "").splitlines()
    examples = [line.strip() for line in lines if line.strip().startswith("Example:")]
    if context.parent is not None and (option := getattr(error, "option_name", None)):
        commands = context.parent.command.commands.items()
        taking = [name for name, other in commands if any(option in one.opts for one in other.params)]
        message = f"No such option: {option}. `tensorlens {taking[0]}` has it." if taking else message
    return "\n".join([f"tensorlens: {message}", *examples, f"Options: {context.command_path} --help"])


app = typer.Typer(
    cls=_Commands,
    name="tensorlens",
    help="Which inputs made this output? TensorLens writes a Transformer, at a given input, as one exact "
    "linear operator: F(X) = T·X + B.\n\n"
    'Begin with: tensorlens explain smollm2-135m "The Eiffel Tower is in the city of"\n\n'
    "Every command has --help, and --quiet to print results and errors only. "
    "Run the same command again to resume an interrupted study.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]


def _add(group: str, name: str, command: Callable[..., None], short: str, *, continues: bool = False) -> None:
    """Register a command under a group of the help.

    Args:
        group: Heading in the help.
        name: The command's name.
        command: The function.
        short: Its line in the help.
        continues: Whether finished work is on disk, so that running the same command again resumes it.
    """
    app.command(name, short_help=short, rich_help_panel=group)(_well_behaved(with_records(command), continues))


def _well_behaved(command: Callable[..., None], continues: bool) -> Callable[..., None]:
    """The command with `--quiet`, which prints one line when it is interrupted."""

    @wraps(command)
    def called(*given: Any, quiet: bool = False, **values: Any) -> None:
        try:
            with _quietly(quiet):
                command(*given, **values)
        except KeyboardInterrupt:
            if "RANK" not in os.environ:  # of several processes, only the one that started them prints
                more = " Run the same command again to resume." if continues else ""
                typer.echo(f"\ntensorlens: stopped.{more}", err=True)
            raise typer.Exit(STOPPED) from None

    signature = inspect.signature(command)
    last = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    called.__signature__ = signature.replace(parameters=[*signature.parameters.values(), last])  # type: ignore[attr-defined]
    called.__annotations__ = command.__annotations__ | {"quiet": Quiet}
    return called


@contextmanager
def _quietly(quiet: bool) -> Iterator[None]:
    """Discard stages, progress bars, hints and warnings on standard error. Errors are raised, and printed outside."""
    if not quiet:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        yield


_add("Explain", "explain", explain_, "Why does the model say this? Begin here.")
_add("Explain", "map", map_, "Which inputs made this output?")
_add("Explain", "answer", answer_, "Which parts of the prompt made this answer?")
_add("Explain", "similar", similar, "Which pairs of words make two texts similar?")
_add("Explain", "explore", explore, "Explore maps interactively in the browser.")
_add("Inspect", "inside", inside, "Where in the model? Heads, flow and graph.")
_add("Inspect", "circuit", circuit_, "Which edges carry the difference between two inputs?")
_add("Inspect", "check", check_, "Is the operator exact for this model?")
_add("Inspect", "size", size_, "What will it cost? Memory and time from the config alone.")
_add("Inspect", "models", models, "List the bundled models, and how to install them.")
_add("Inspect", "methods", methods, "List the available map methods.")
_add("Data sets", "maps", maps, "Map every row of a data set into a table.", continues=True)
_add("Studies", "perturb", perturb, "Which method finds the tokens that matter?", continues=True)
_add("Studies", "paper", paper, "Reproduce the paper's tables, with its numbers beside ours.", continues=True)
_add("Studies", "relations", relations_, "Decode relations with the mean operator.", continues=True)
_add("Studies", "fidelity", fidelity_, "How far from the input is the operator accurate?", continues=True)


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
    """Run the command line; an error of this library is one message and exit code 2."""
    try:
        app()
    except TensorLensError as error:
        if not tell_launcher(str(error)):
            typer.echo(f"tensorlens: {error}", err=True)
        sys.exit(WRONG_USE)


if __name__ == "__main__":
    main()
