"""`tensorlens circuit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from tensorlens.app.options import Json, Model, ModelOptions, OtherTarget, TargetName, target_of
from tensorlens.app.printing import print_json, stage
from tensorlens.errors import InputError

SUFFIXES = (".html", ".json")


def circuit_(
    model: Model,
    clean: Annotated[str, typer.Option(help="The clean input, whose answer is explained.")],
    corrupted: Annotated[str, typer.Option(help="The corrupted input, with as many tokens.")],
    target: TargetName = None,
    against: OtherTarget = None,
    unit: Annotated[str, typer.Option(help="Unit of the circuit: edges or nodes.")] = "edges",
    share: Annotated[float, typer.Option(help="Fraction of the edges or nodes to show in the graph.")] = 0.01,
    scores: Annotated[
        str,
        typer.Option(
            help="How to score: rules (the rule set of --rules) or integrated (integrated gradients, EAP-IG)."
        ),
    ] = "rules",
    out: Annotated[
        Path | None,
        typer.Option(help="File to write: .html (a page), or .json (as circuit-tracer reads it).", show_default=False),
    ] = None,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Which edges carry the difference between two inputs? Scores them, then runs the model with all others corrupted.

    Example: tensorlens circuit smollm2-135m --clean "2+2=" --corrupted "2+3="
    """
    import tensorlens as tl

    reading.check(model)
    _check(unit, scores, out)
    lens = reading.lens(model)
    stage("Scoring")
    found = tl.circuit(
        lens, clean, corrupted, target_of(target, against), unit=cast(Any, unit), scores=cast(Any, scores)
    )
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


def _check(unit: str, scores: str, out: Path | None) -> None:
    if unit not in ("edges", "nodes") or scores not in ("rules", "integrated"):
        raise InputError(f"`--unit` is edges or nodes, `--scores` rules or integrated; got {unit!r} and {scores!r}.")
    if out is not None and out.suffix not in SUFFIXES:
        raise InputError(f"`--out` must end in one of {' '.join(SUFFIXES)}; got {out.name!r}.")
