"""`tensorlens inside` and `tensorlens circuit`: where in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, cast

import typer

from tensorlens.app import options
from tensorlens.app.options import (
    Input,
    Json,
    LeftOut,
    Model,
    ModelOptions,
    OtherTarget,
    PageFile,
    TargetName,
    check_choice,
    check_file,
    target_of,
)
from tensorlens.app.printing import print_json, save, stage, teller, while_waiting
from tensorlens.recommendations import recommended

SUFFIXES = (".html", ".json")
UNITS, SCORES = ("edges", "nodes"), ("rules", "integrated")


def inside(
    model: Model,
    input_: Input,
    out_token: Annotated[int, typer.Option(help="Output position to explain; negative: from the end.")] = -1,
    target: TargetName = None,
    against: OtherTarget = None,
    share: Annotated[float, typer.Option(help="Fraction of the total flow the graph should cover.")] = 0.8,
    max_nodes: Annotated[int, typer.Option(help="Largest number of nodes in the graph.")] = 120,
    without: LeftOut = None,
    out: PageFile = None,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Where in the model? Heads, feed-forwards, the flow over depth, and the graph, for one target.

    Example: tensorlens inside smollm2-135m "The Eiffel Tower is in the city of"
    """
    reading.check(model)
    check_file(out, SUFFIXES)
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
    if json:
        print_json(found.as_dict() | ({} if removed is None else {"without": removed.as_dict()}))
    else:
        found.graph.show()
        if removed is not None:
            typer.echo("")
            removed.show()
    save(found, out, teller(as_json=json))


def circuit_(
    model: Model,
    clean: Annotated[str, typer.Option(help="The clean input, whose answer is explained.")],
    corrupted: Annotated[str, typer.Option(help="The corrupted input, with as many tokens.")],
    target: TargetName = None,
    against: OtherTarget = None,
    unit: Annotated[str, typer.Option(help="Unit of the circuit: edges or nodes.")] = UNITS[0],
    share: Annotated[float, typer.Option(help="Fraction of the edges or nodes to show in the graph.")] = 0.01,
    scores: Annotated[
        str, typer.Option(help="How to score: rules (those of --rules) or integrated (integrated gradients, EAP-IG).")
    ] = SCORES[0],
    out: PageFile = None,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Which edges carry the difference between two inputs? Scores them, then runs the model with all others corrupted.

    Example: tensorlens circuit smollm2-135m --clean "2+2=" --corrupted "2+3="

    A .json file holds the graph in circuit-tracer's format.
    """
    reading.check(model)
    check_choice("unit", unit, UNITS)
    check_choice("scores", scores, SCORES)
    check_file(out, SUFFIXES)
    lens = replace(reading, rules=reading.rules or recommended("component").rules.name).lens(model)
    import tensorlens as tl

    stage("Scoring")
    contrast, how = target_of(target, against), {"unit": cast(Any, unit), "scores": cast(Any, scores)}
    found = tl.circuit(lens, clean, corrupted, contrast, **how)
    stage("Running the model with everything else corrupted")
    chosen = found.select(share=share)
    f = chosen.faithfulness()
    if out is not None:
        chosen.save_page(out, f) if out.suffix == ".html" else chosen.save(out, format="circuit-tracer")
    if json:
        print_json({"faithfulness": f.as_dict(), "graph": chosen.graph().as_dict()})
        return
    found.show()
    f.show()
    if out is not None:
        typer.echo(f"Wrote {out}")
