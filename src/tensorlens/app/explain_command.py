"""`tensorlens explain`: the front door. The answer is printed first, and what certifies it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensorlens.app import options
from tensorlens.app.options import Certify, Json, LoadOptions, MapFile, Model, OtherTarget, TargetName, check_choice
from tensorlens.app.printing import print_json, save, teller, while_waiting
from tensorlens.errors import InputError
from tensorlens.recommendations import QUESTIONS

if TYPE_CHECKING:
    from tensorlens.explanation import Explanation

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT",
        help="A text in quotes, the path of an image, or - for standard input.",
    ),
]
For = Annotated[str, typer.Option("--for", help=f"What to find: {', '.join(QUESTIONS[:-1])}, or paper (its operator).")]
Tokens = Annotated[bool, typer.Option("--tokens", help="Use single tokens instead of whole words or sentences.")]


def explain_(
    model: Model,
    text: Words = None,
    question: For = QUESTIONS[0],
    target: TargetName = None,
    against: OtherTarget = None,
    tokens: Tokens = False,
    out: MapFile = None,
    certify: Certify = True,
    json: Json = False,
    reading: LoadOptions = LoadOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Why does the model say this? Headline, prediction, map, certificate.

    Example: tensorlens explain smollm2-135m "The Eiffel Tower is in the city of"
    """
    written = one_text(model, text or [])
    check_choice("for", question, QUESTIONS)
    reading.check(model)
    options.check_file(out, (".json", ".safetensors") if question == "component" else options.SUFFIXES)
    read = options.read_input(written)
    lens = reading.lens(model)
    with while_waiting("Recording one pass of the model"):
        e = lens.explain(read, question, options.number(target), options.number(against), tokens=tokens)
    say = teller(as_json=json)
    say("\n".join(e.lines()))
    with while_waiting("Computing the map"):
        e.map  # noqa: B018  # computed here
    if not json:
        e.show_map()
    if certify:
        with while_waiting("Measuring the certificate; --no-certify skips it"):
            line = e.badge()
        say(line)
    save(e, out, say)
    if json:
        print_json(_content(e))


def one_text(model: str, words: list[str]) -> str:
    """The text, if it is one argument; if quotes or the model are missing, an error with the command that works."""
    if len(words) == 1:
        return words[0]
    if words:
        raise InputError(f'Put the text in quotes: tensorlens explain {model} "{" ".join(words)}"')
    if " " in model.strip():
        raise InputError(f'Name a model before the text: tensorlens explain smollm2-135m "{model}"')
    raise InputError(
        f'Expected a text after the model: tensorlens explain {model} "The Eiffel Tower is in the city of"'
    )


def _content(e: Explanation) -> dict[str, Any]:
    """Everything as plain values, without the picture."""
    meta = {key: value for key, value in e.map.meta.items() if key != "image"}
    return {
        "headline": e.headline,
        "prediction": None if e.prediction is None else e.prediction._asdict(),
        "rules": e.rules.as_dict(),
        "because": e.because,
        "note": e.note,
        "map": e.map.as_dict() | {"meta": meta},
    }
