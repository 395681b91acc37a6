"""`tensorlens fidelity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tensorlens.app import options
from tensorlens.app.options import AttentionBackend, Device, Dtype, FinalNorm, Gate, Json, Model, TrustRemoteCode
from tensorlens.strict_json import to_json
from tensorlens.studies.fidelity_study.report import error_table, norm_table, property_table
from tensorlens.studies.fidelity_study.run import FidelityOptions
from tensorlens.studies.fidelity_study.run import fidelity as run_fidelity


def fidelity(
    model: Model,
    input: Annotated[str, typer.Argument(help="A text, the path of an image, or - for standard input.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; started again it goes on.", show_default=False)],
    directions: Annotated[int, typer.Option(help="Random directions, and as many towards other tokens.")] = 4,
    stride: Annotated[int, typer.Option(help="Blocks between two measurements of properties; 0 leaves them out.")] = 1,
    out_token: Annotated[int | None, typer.Option(help="Output whose slice is looked at.")] = None,
    seed: Annotated[int, typer.Option(help="Of directions and probes.")] = 0,
    json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
    attention: AttentionBackend = None,
    gate: Gate = "freeze_gate",
    final_norm: FinalNorm = True,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Error against the size of a move, the bounds of Proposition 1, and the tensor's properties; write a run.

    Example: tensorlens fidelity minilm "A sentence of your own." --out run
    """
    chosen = FidelityOptions(n_random=directions, n_token=directions, stride=stride, out_token=out_token, seed=seed)
    lens = options.load_lens(
        model, device=device, dtype=dtype, attention=attention, gate=gate, final_norm=final_norm,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    result = run_fidelity(lens, options.read_input(input), out, options=chosen)
    summary = result.summary
    if json:
        typer.echo(to_json(summary))
        return
    typer.echo(norm_table(summary) + "\n\nmedian errors relative to F(X)\n" + error_table(summary))
    if summary["properties"]:
        typer.echo("\nproperties of the slice T[i]\n" + property_table(summary))
    typer.echo(f"\nReport: {result.report}")
