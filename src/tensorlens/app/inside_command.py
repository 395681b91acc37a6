"""`tensorlens inside`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tensorlens.app import options
from tensorlens.app.options import Input, Json, Model, ModelOptions, OtherTarget, TargetName, target_of
from tensorlens.app.printing import print_json, while_waiting
from tensorlens.errors import InputError

SUFFIXES = (".html", ".json")


def inside(
    model: Model,
    input_: Input,
    out_token: Annotated[int, typer.Option(help="Output position to explain; negative: from the end.")] = -1,
    target: TargetName = None,
    against: OtherTarget = None,
    share: Annotated[float, typer.Option(help="Fraction of the total flow the graph should cover.")] = 0.8,
    max_nodes: Annotated[int, typer.Option(help="Largest number of nodes in the graph.")] = 120,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BLOCK:HEAD,…",
            help="Heads to ablate in the model, such as 3:0,2. Repeatable.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write: .html (a page) or .json.", show_default=False)
    ] = None,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Where in the model? Heads, feed-forwards, the flow over depth, and the graph, for one target.

    Example: tensorlens inside smollm2-135m "The Eiffel Tower is in the city of"
    """
    reading.check(model)
    if out is not None and out.suffix not in SUFFIXES:
        raise InputError(f"`--out` must end in one of {' '.join(SUFFIXES)}; got {out.name!r}.")
    chosen, heads = target_of(target, against), options.head_choice(without)
    text = options.read_input(input_)
    lens = reading.lens(model)
    with while_waiting("Recording one pass of the model"):
        T = lens(text)
    if not json:
        with while_waiting("Heads and feed-forwards"):
            components = T.components(out_token, chosen)
        components.show()
        typer.echo("")
    with while_waiting("Building the graph, and why heads attended where they did"):
        found = T.inside(out_token, chosen, share, max_nodes=max_nodes)
    pairs = [(block, head) for block, some in heads.items() for head in some]
    removed = T.ablate(pairs, out_token, chosen) if pairs else None
    if out is not None:
        found.save(out)
    if json:
        print_json(found.as_dict() | ({} if removed is None else {"without": removed.as_dict()}))
        return
    found.graph.show()
    if removed is not None:
        typer.echo("")
        removed.show()
    if out is not None:
        typer.echo(f"Wrote {out}")
