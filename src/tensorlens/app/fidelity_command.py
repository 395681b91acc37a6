"""`tensorlens fidelity`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from tensorlens.app import options
from tensorlens.app.options import FinalNorm, Input, Json, Model, ModelOptions, RunFolder, listed
from tensorlens.app.printing import print_json, print_rows
from tensorlens.errors import InputError

if TYPE_CHECKING:
    from tensorlens.studies.runs import StudyResult


def fidelity_(
    model: Model,
    input: Input,
    out: RunFolder,
    directions: Annotated[
        int, typer.Option(help="Number of random directions; as many towards other tokens are added.", min=1)
    ] = 4,
    stride: Annotated[int, typer.Option(help="Measure properties every this many blocks; 0 skips them.", min=0)] = 1,
    out_token: Annotated[int | None, typer.Option(help="Output position whose slice is measured.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed for directions and probes.")] = 0,
    revisions: Annotated[
        str | None, typer.Option(help="Checkpoints to compare, separated by commas; each gets a folder.")
    ] = None,
    json: Json = False,
    final_norm: FinalNorm = True,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """How far from the input does T hold? Errors by step size, the bounds of Proposition 1, properties of the tensor.

    Example: tensorlens fidelity minilm "A sentence of your own." --out run
    """
    states = {name: replace(reading, revision=name) for name in listed(revisions)}
    if revisions is not None and not states:
        raise InputError("`--revisions` must name at least one checkpoint, such as step1000,step143000.")
    for one in states.values() or [reading]:
        one.check(model)
    text = options.read_input(input)
    from tensorlens.studies.fidelity_study.run import FidelityOptions
    from tensorlens.studies.fidelity_study.run import fidelity as run_fidelity

    chosen = FidelityOptions(n_random=directions, n_token=directions, stride=stride, out_token=out_token, seed=seed)
    made = {
        name: run_fidelity(of.lens(model, final_norm=final_norm), text, folder, options=chosen)
        for name, of, folder in [(n, s, out / n.replace("/", "-")) for n, s in states.items()] or [("", reading, out)]
    }
    if json:
        print_json({name: one.summary for name, one in made.items()} if states else made[""].summary)
    elif states:
        _compare(made)
    else:
        _print(made[""])


def _compare(made: Mapping[str, StudyResult]) -> None:
    """One line for each checkpoint."""
    from tensorlens.studies.fidelity_study.report import dynamics

    print_rows([{"revision": name} | dynamics(one.summary) for name, one in made.items()])


def _print(result: StudyResult) -> None:
    """Norms and bounds, errors, properties, and where the rest is."""
    from tensorlens.studies.fidelity_study import report

    summary = result.summary
    print_rows(report.norm_table(summary))
    print_rows(report.alternative_table(summary))
    typer.echo("\nmedian errors relative to F(X)")
    print_rows(report.error_table(summary))
    if summary["properties"]:
        typer.echo("\nproperties of the slice T[i]")
        print_rows(report.property_table(summary))
    typer.echo(f"\nReport: {result.report}")
