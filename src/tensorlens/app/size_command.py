"""`tensorlens size`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tensorlens.app.options import Json, LoadOptions, Model
from tensorlens.app.printing import print_json, stage


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
