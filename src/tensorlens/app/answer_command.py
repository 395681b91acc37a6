"""`tensorlens answer` and `tensorlens similar`: texts against texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensorlens.app import options
from tensorlens.app.options import Certify, FinalNorm, Json, MapFile, Model, ModelOptions, check_file
from tensorlens.app.printing import certified, map_content, print_json, save, show_map, stage, teller, while_waiting
from tensorlens.errors import InputError, check_choice
from tensorlens.recommendations import recommended

if TYPE_CHECKING:
    from tensorlens.answers.answer import Answer


GROUPS = ("tokens", "words", "sentences", "lines")
TARGETS = ("centred", "logit", "runner_up")

Given = Annotated[
    str | None,
    typer.Option(help="The answer to explain, as it continues the prompt (default: the model generates one)."),
]
Against = Annotated[str | None, typer.Option(help="Contrast answer: explain the answer minus this one.")]
Columns = Annotated[str, typer.Option(help=f"Columns of the map, parts of the prompt: {', '.join(GROUPS)}.")]
Rows = Annotated[
    str | None,
    typer.Option(
        help=f"Rows of the map, parts of the answer: {', '.join(GROUPS)}, or answer for all of it (the default, "
        "except in a page).",
    ),
]
Explained = Annotated[
    str | None,
    typer.Option(
        help="What to explain for each token: runner_up (logit minus the runner-up's, the default), centred (logit "
        "minus the mean logit, the default with --against), or logit.",
    ),
]
Through = Annotated[
    bool,
    typer.Option(
        "--through",
        help="Trace contributions through earlier answer tokens back to the prompt (heuristic; rows no longer sum to "
        "the target).",
    ),
]


def answer_(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="A text, or - for standard input.")],
    answer: Given = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="An image before the prompt, for a model that reads images; several if repeated."),
    ] = None,
    against: Against = None,
    groups: Columns = "sentences",
    rows: Rows = None,
    target: Explained = None,
    through: Through = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest generated answer, in tokens.", min=1)] = 64,
    certify: Certify = True,
    out: MapFile = None,
    json: Json = False,
    final_norm: FinalNorm = True,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Why did it say that? An answer, and the parts of the prompt that it is based on.

    A decoder's first token, an attention sink, gets its own column. It stays in the sum.

    Example: tensorlens answer smollm2-135m "Anna's car is red. The car is"
    """
    reading = replace(reading, rules=reading.rules or recommended("passage").rules.name)
    reading.check(model)
    check_file(out)
    is_page = out is not None and out.suffix.lower() == ".html" and against is None
    rows = rows or ("sentences" if is_page else "answer")
    _check(answer, against, groups, rows, target, through=through)
    text = options.read_input(prompt, images=False)
    lens = reading.lens(model, final_norm=final_norm)
    with while_waiting("Generating the answer" if answer is None else "Recording one pass of the model"):
        found = lens.answer(_with_images(text, image or []), answer, max_new_tokens=max_new_tokens)
    say = teller(as_json=json)
    say(f"The answer: {found.text.strip()}\n")
    with while_waiting("Tracing it back to the prompt"):
        made = found.map(groups, rows, target, against=against, through=through)  # type: ignore[arg-type]  # checked above
    if not json:
        show_map(made, say, is_saved=out is not None)
    made = certified(found.tensor, made, say) if certify else made
    save(made, out, say)
    if json:
        print_json(map_content(made) | _record(found))


def _with_images(text: str, images: list[Path]) -> Any:
    """A prompt as it is, or one chat message of images and a text."""
    if not images:
        return text
    parts = [{"type": "image", "image": path} for path in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _check(
    answer: str | None, against: str | None, groups: str, rows: str, target: str | None, *, through: bool
) -> None:
    """Refuse questions that no model could answer, before one is loaded."""
    check_choice(groups, "--groups", GROUPS)
    check_choice(rows, "--rows", ("answer", *GROUPS))
    check_choice(TARGETS[0] if target is None else target, "--target", TARGETS)
    for name, value in (("answer", answer), ("against", against)):
        if value is not None and not value.strip():
            raise InputError(f"`--{name}` must not be empty; got {value!r}.")
    if against is not None and (rows != "answer" or through or target == "runner_up"):
        raise InputError(
            "`--against` explains one whole answer minus another: leave --rows, --through and runner_up out."
        )


def _record(found: Answer) -> dict[str, Any]:
    return {
        "answer": {
            "text": found.text,
            "tokens": found.tokens,
            "ids": found.ids,
            "n_prompt_tokens": found.n_prompt_tokens,
            "log_probabilities": found.log_probabilities,
        }
    }


# Similar --------------------------------------------------------------------------------------------------------------

SUFFIXES = (".html", ".png", ".svg", ".pdf", ".json", ".safetensors")
POOLINGS = ("mean", "cls", "last", "max", "attention", "late")
MEASURES = ("cosine", "dot")


def similar(
    model: Model,
    first: Annotated[
        str, typer.Argument(metavar="TEXT", help="The first text, the path of an image, or - for standard input.")
    ],
    second: Annotated[str, typer.Argument(metavar="TEXT", help="The second text or image.")],
    against: Annotated[
        str | None, typer.Option(help="A third text or image: why is the second closer to the first than this one is?")
    ] = None,
    pooling: Annotated[str | None, typer.Option(help=f"{', '.join(POOLINGS)} (default: the model's own).")] = None,
    groups: Annotated[str, typer.Option(help=f"Rows and columns: {', '.join(GROUPS)}.")] = "words",
    measure: Annotated[str, typer.Option(help="cosine or dot.")] = "cosine",
    pairs: Annotated[int, typer.Option(help="Number of pairs to print.", min=1)] = 10,
    out: Annotated[Path | None, typer.Option(help=f"File to write, by suffix: {' '.join(SUFFIXES)}.")] = None,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Why are these two texts similar? The pairs of words behind the similarity.

    Example: tensorlens similar minilm "A man plays guitar." "She makes music."
    """
    reading.check(model)
    check_choice(groups, "--groups", GROUPS)
    check_choice(measure, "--measure", MEASURES)
    check_choice(POOLINGS[0] if pooling is None else pooling, "--pooling", POOLINGS)
    check_file(out, SUFFIXES)
    a, b = options.read_input(first), options.read_input(second)
    c = None if against is None else options.read_input(against)
    lens = reading.lens(model)
    stage("Recording one pass of the model for each input")
    from tensorlens.pairs.similarity import similarity

    found = similarity(lens, a, b, pooling=pooling, groups=groups, measure=measure, against=c)  # type: ignore[arg-type]  # checked above
    if json:
        print_json(found.as_dict() | {"top": [pair._asdict() for pair in found.top(pairs)]})
    else:
        found.show(k=pairs)
    save(found, out, teller(as_json=json))
