"""`tensorlens map`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensorlens.app import options
from tensorlens.app.options import (
    Certify,
    FinalNorm,
    Input,
    Json,
    MapFile,
    Model,
    ModelOptions,
    OtherTarget,
    TargetName,
)
from tensorlens.app.printing import print_json

if TYPE_CHECKING:
    from tensorlens.maps.token_map import TokenMap
    from tensorlens.tensor import AttentionTensor


MethodName = Annotated[
    str | None,
    typer.Option(
        help="A method (see `tensorlens methods`). If left out: tensor.in_class for a model with a head, "
        "tensor.in_out for others.",
        show_default=False,
    ),
]
Position = Annotated[
    int | None,
    typer.Option(help="Position of the output to explain. If left out: the last; every one with --method."),
]
Heads = Annotated[
    list[str] | None, typer.Option(metavar="BLOCK:HEAD,…", help="Keep only these heads, such as 3:0,2. Repeatable.")
]
WithoutHeads = Annotated[
    list[str] | None, typer.Option(metavar="BLOCK:HEAD,…", help="Leave these heads out, such as 3:0,2. Repeatable.")
]


def map_(
    model: Model,
    input: Input,
    method: MethodName = None,
    target: TargetName = None,
    against: OtherTarget = None,
    out_token: Position = None,
    words: Annotated[bool, typer.Option("--words", help="One score per word instead of one per token.")] = False,
    aside: Annotated[bool, typer.Option(help="Set the first token aside where it drowns the others.")] = True,
    blocks: Annotated[str | None, typer.Option(help="A range of blocks, such as 3:9.")] = None,
    heads: Heads = None,
    without_heads: WithoutHeads = None,
    norm: Annotated[str, typer.Option(help="For tensor.norm: frobenius or spectral.")] = "frobenius",
    certify: Certify = True,
    out: MapFile = None,
    json: Json = False,
    final_norm: FinalNorm = True,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Which inputs made this output? A map in the terminal, or in a file.

    Example: tensorlens map smollm2-135m "The Eiffel Tower is in the city of"
    """
    from tensorlens.app import map_questions

    reading.check(model)
    part = map_questions.Part.read(blocks, heads, without_heads)
    wanted = options.target_of(target, against)
    map_questions.check_file(out)
    text = options.read_input(input)
    map_questions.check_method(method, wanted, norm)
    T = part.of(reading.lens(model, final_norm=final_norm)(text))
    question = map_questions.first_question(T, method, out_token, wanted)
    hint = map_questions.check_target(T, question)
    if hint:
        typer.echo(f"tensorlens: {hint}", err=True)
    if certify and question.method.startswith("tensor."):
        T.certificate()
    found = T.map(question.method, question.out_token, wanted, norm=norm)  # type: ignore[arg-type]  # checked above
    found = found if aside else found.set_aside()
    found = found.words() if words else found  # pyright: ignore[reportAttributeAccessIssue]
    _deliver(T, question, found, out, as_json=json)


def _deliver(T: AttentionTensor, question: Any, found: TokenMap, out: Path | None, *, as_json: bool) -> None:
    from tensorlens.app.map_questions import predictions, recommendation

    said = predictions(T, question)
    if out is not None:
        found.save(out)
    if as_json:
        print_json(content(found) | {"predictions": [one._asdict() for one in said]})
        return
    if said:
        first, *others = (f"{one.name!r} ({_percent(one.probability)})" for one in said)
        typer.echo(f"The model says {first}, then {' or '.join(others)}.\n" if others else f"The model says {first}.\n")
    if out is None:
        found.show()  # and what it sums to
    else:
        for line in found.view().sums:
            typer.echo(f"{line[:1].upper()}{line[1:]}.")
        typer.echo(f"Wrote {out}")
    advice = recommendation(T, found)
    if advice:
        typer.echo(("" if out is not None else "\n") + advice)


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.01 else "below 1 %"


def content(found: TokenMap) -> dict[str, Any]:
    """A map as plain values, without its picture."""
    return {
        "method": found.method,
        "out_tokens": found.out_tokens,
        "in_tokens": found.in_tokens,
        "scores": found.scores.tolist(),
        "bias_share": found.bias_share.tolist(),
        "meta": {name: value for name, value in found.meta.items() if name != "image"},
    }
