"""`tensorlens similar`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tensorlens.app import options
from tensorlens.app.options import Json, Model, ModelOptions, check_choice, check_file
from tensorlens.app.printing import print_json, save, stage, teller

SUFFIXES = (".html", ".png", ".svg", ".pdf", ".json", ".safetensors")
GROUPS = ("tokens", "words", "sentences", "lines")
POOLINGS = ("mean", "cls", "last", "max", "attention", "late")
MEASURES = ("cosine", "dot")


def similar(
    model: Model,
    first: Annotated[str, typer.Argument(metavar="TEXT", help="The first text, or - for standard input.")],
    second: Annotated[str, typer.Argument(metavar="TEXT", help="The second text.")],
    against: Annotated[
        str | None, typer.Option(help="A third text: why is the second closer to the first than this one is?")
    ] = None,
    pooling: Annotated[str | None, typer.Option(help=f"{', '.join(POOLINGS)} (default: the model's own).")] = None,
    groups: Annotated[str, typer.Option(help=f"Rows and columns: {', '.join(GROUPS)}.")] = "words",
    measure: Annotated[str, typer.Option(help="cosine or dot.")] = "cosine",
    pairs: Annotated[int, typer.Option(help="Number of pairs to print.", min=1)] = 10,
    out: Annotated[Path | None, typer.Option(help=f"File to write, by suffix: {' '.join(SUFFIXES)}.")] = None,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Why are these two texts similar? The pairs of words that the similarity rests on.

    Example: tensorlens similar minilm "A man plays guitar." "She makes music."
    """
    reading.check(model)
    check_choice("groups", groups, GROUPS)
    check_choice("measure", measure, MEASURES)
    check_choice("pooling", pooling, POOLINGS)
    check_file(out, SUFFIXES)
    a, b = options.read_input(first), options.read_input(second)
    c = None if against is None else options.read_input(against)
    lens = reading.lens(model)
    stage("Recording one pass of the model for each text")
    from tensorlens.pairs.similarity import similarity

    found = similarity(lens, a, b, pooling=pooling, groups=groups, measure=measure, against=c)  # type: ignore[arg-type]  # checked above
    if json:
        print_json(found.as_dict() | {"top": [pair._asdict() for pair in found.top(pairs)]})
    else:
        found.show(k=pairs)
    save(found, out, teller(as_json=json))
