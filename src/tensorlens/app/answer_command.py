"""`tensorlens answer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from tensorlens.app import options
from tensorlens.app.map_command import content
from tensorlens.app.options import Certify, FinalNorm, Json, MapFile, Model, PassageOptions, check_choice, check_file
from tensorlens.app.printing import print_json, while_waiting
from tensorlens.errors import InputError
from tensorlens.views.captions import badge

if TYPE_CHECKING:
    from tensorlens.answers.answer import Answer
    from tensorlens.maps.token_map import TokenMap

GROUPS = ("tokens", "words", "sentences", "lines")
TARGETS = ("centred", "logit", "runner_up")

Given = Annotated[
    str | None,
    typer.Option(
        help="The answer to explain, as it continues the prompt (default: the model generates one).", show_default=False
    ),
]
Against = Annotated[
    str | None, typer.Option(help="Contrast answer: explain the answer minus this one.", show_default=False)
]
Columns = Annotated[str, typer.Option(help=f"Columns of the map, parts of the prompt: {', '.join(GROUPS)}.")]
Rows = Annotated[
    str | None,
    typer.Option(
        help=f"Rows of the map, parts of the answer: {', '.join(GROUPS)}, or answer for all of it (the default, "
        "except in a page).",
        show_default=False,
    ),
]
Explained = Annotated[
    str | None,
    typer.Option(
        help="What to explain for each token: runner_up (logit minus the runner-up's, the default), centred (logit "
        "minus the mean logit, the default with --against), or logit.",
        show_default=False,
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
    max_new_tokens: Annotated[int, typer.Option(help="Longest generated answer, in tokens.")] = 64,
    certify: Certify = True,
    out: MapFile = None,
    json: Json = False,
    final_norm: FinalNorm = True,
    reading: PassageOptions = PassageOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Why did it say that? An answer, and the parts of the prompt that it rests on.

    The first token is an attention sink. It is shown in its own column, outside the colour scale but still in the sum.

    Example: tensorlens answer smollm2-135m "Anna's car is red. The car is"
    """
    reading.check(model)
    check_file(out)
    is_page = out is not None and out.suffix.lower() == ".html" and against is None
    rows = rows or ("sentences" if is_page else "answer")
    _check(answer, against, groups, rows, target, through=through, max_new_tokens=max_new_tokens)
    text = options.read_input(prompt, images=False)
    lens = reading.lens(model, final_norm=final_norm)
    with while_waiting("Generating the answer" if answer is None else "Recording one pass of the model"):
        found = lens.answer(_with_images(text, image or []), answer, max_new_tokens=max_new_tokens)
    if not json:
        typer.echo(f"The answer: {found.text.strip()}\n")
    with while_waiting("Tracing it back to the prompt"):
        made = found.map(groups, rows, target, against=against, through=through, set_aside=(0,))  # type: ignore[arg-type]  # checked above
    if not json:
        _show(made, is_saved=out is not None)
    if certify:
        with while_waiting("Measuring the certificate; --no-certify skips it"):
            certificate = found.tensor.certificate()
        made = replace(made, meta=made.meta | {"certificate": found.tensor.meta()["certificate"]})
        if not json:
            typer.echo(badge(certificate.passed, certificate.errors))
    if out is not None:
        made.save(out)
    if json:
        print_json(content(made) | _record(found))
    elif out is not None:
        typer.echo(f"Wrote {out}")


def _with_images(text: str, images: list[Path]) -> Any:
    """A prompt as it is, or one chat message of images and a text."""
    if not images:
        return text
    parts = [{"type": "image", "image": path} for path in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _check(
    answer: str | None,
    against: str | None,
    groups: str,
    rows: str,
    target: str | None,
    *,
    through: bool,
    max_new_tokens: int,
) -> None:
    """Refuse what no model could answer, before one is loaded."""
    check_choice("groups", groups, GROUPS)
    check_choice("rows", rows, ("answer", *GROUPS))
    if target is not None:
        check_choice("target", target, TARGETS)
    for name, value in (("answer", answer), ("against", against)):
        if value is not None and not value.strip():
            raise InputError(f"`--{name}` must not be empty; got {value!r}.")
    if against is not None and (rows != "answer" or through or target == "runner_up"):
        raise InputError(
            "`--against` explains one whole answer minus another: leave --rows, --through and runner_up out."
        )
    if max_new_tokens < 1:
        raise InputError(f"`--max-new-tokens` must be at least 1; got {max_new_tokens}.")


def _show(made: TokenMap, *, is_saved: bool) -> None:
    """The map before its certificate; where it goes into a file, what its rows sum to."""
    if not is_saved:
        replace(made, meta={key: value for key, value in made.meta.items() if key != "certificate"}).show()
        typer.echo("")
    shown = () if not is_saved and made.shape[0] == 1 else made.view().sums  # a single row says so itself
    for label, line in zip(made.out_tokens, shown, strict=False):
        typer.echo(f"{f'{label.strip()}: ' if made.shape[0] > 1 else ''}{line}.")


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
