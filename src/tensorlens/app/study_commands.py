"""`tensorlens perturb`, `paper`, `relations` and `fidelity`: runs over data sets that can be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensorlens.app.options import (
    FinalNorm,
    Input,
    Json,
    Model,
    ModelOptions,
    NumberOfProcesses,
    RunFolder,
    check_data,
    listed,
    read_input,
)
from tensorlens.app.printing import print_json, print_rows, stage
from tensorlens.errors import InputError
from tensorlens.studies.options import FidelityOptions, PerturbationOptions, RelationOptions
from tensorlens.studies.processes import Processes, hand_over

if TYPE_CHECKING:
    from tensorlens.studies.runs import StudyResult

# Perturbation ---------------------------------------------------------------------------------------------------------

PERTURB = {"presets": "--preset", "replacements": "--replacement", "n_tokens": "--tokens"}
"""Options with names of their own."""


def perturb(
    model: Model,
    data: Annotated[
        str, typer.Option(help="A .csv, .jsonl, .parquet or .txt file, a folder of images, or a data set's id.")
    ],
    out: RunFolder,
    asked: Annotated[PerturbationOptions, PERTURB],
    processes: NumberOfProcesses = 1,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Which method finds the tokens that matter? Replaces the highest-ranked tokens and measures how the output moves.

    Example: tensorlens perturb minilm --data reviews.csv --out run --limit 50

    To share a run between processes, use --processes on one machine, accelerate launch or torchrun on several.
    """
    reading.check(model)
    check_data(data, suffixes=(".csv", ".tsv", ".jsonl", ".txt", ".parquet"))
    if hand_over(processes):
        return
    from tensorlens.studies.perturbation_study import perturbation as run_perturbation
    from tensorlens.studies.runs import check_run_folder

    check_run_folder(out, "perturbation")
    result = run_perturbation(reading.lens(model, device=Processes.device()), data, out, options=asked)
    result.areas()  # explains it if nothing could be measured
    if Processes.from_environment().is_first:
        print_json(result.summary) if json else typer.echo(_areas(result))


def _areas(result: StudyResult) -> str:
    """The areas of the first condition, best first, and the path of the rest."""
    from tensorlens.studies.perturbation_report import FEW
    from tensorlens.studies.report import with_interval

    condition, found = next(iter(result.summary["conditions"].items()))
    n_measured, n_skipped = (result.summary[f"n_{what}"] for what in ("measured", "skipped"))
    few = "; with so few samples, the intervals mean little" if n_measured < FEW else ""
    lines = [f"{n_measured} samples measured, {n_skipped} skipped{few}; {condition}"]
    for name, area in result.areas().items():
        one = found["most"]["hs_mse"]["methods"][name]
        lines.append(f"{name:28} {with_interval(area, one['interval'], one['n_units'])}")
    lines += [f"{name:28} missing: {gap['reason']}" for name, gap in found["missing"].items()]
    lines += [f"skipped {one['name']}: {one['reason']}" for one in result.summary["skipped"][:3]]
    return "\n".join([*lines, f"Report: {result.report}"])


# The paper's tables ---------------------------------------------------------------------------------------------------

TABLE = (
    "deit-base, deit-small, bert, roberta, modernbert, gemma3, pythia, pico, phi, relations; or all: then "
    "--data and --model are folders with one subfolder per table."
)
DATA = "File, folder or hub id of the data, or a folder with imagenet, imdb, wikitext-103 and relations."


@dataclass(frozen=True, kw_only=True)
class PaperChoices:
    """Options that the protocol leaves open; see `PaperTable`."""

    limit: Annotated[int | None, typer.Option(help="Number of samples, or of relations per category.", min=1)] = None
    seed: Annotated[int | None, typer.Option(help="Random seed for samples, splits and bootstrap.")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, mps, … (default: the accelerator).")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model, as Pico's does.")
    ] = False
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")] = None


def paper(
    table: Annotated[str, typer.Argument(metavar="TABLE", help=TABLE)],
    out: RunFolder,
    data: Annotated[str | None, typer.Option(help=DATA, show_default="from the hub, where available")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id of the model.", show_default="the paper's, from the hub")
    ] = None,
    protocol: Annotated[
        Path | None, typer.Option(help="A .json or .toml file with settings that replace the paper's.")
    ] = None,
    processes: NumberOfProcesses = 1,
    asked: PaperChoices = PaperChoices(),  # noqa: B008  # a frozen record
) -> None:
    """Reproduce one of the paper's tables with its protocol: its numbers beside ours, and every deviation.

    Example: tensorlens paper pythia --data wikitext-103 --out pythia --limit 100

    Writes table.tex, table.md, figures and samples.jsonl. ModernBERT and Gemma3 are fine-tuned for sentiment first.
    """
    from tensorlens.studies.paper.protocol import read_protocol

    same: dict[str, Any] = {**vars(asked), "protocol": read_protocol(protocol)}
    if hand_over(processes):
        return
    from tensorlens.studies.paper.run import PaperTable, every_table

    if table == "all" and data is None:
        raise InputError("`paper all` needs --data, a folder with imagenet, imdb, wikitext-103 and relations.")
    every = (
        every_table(str(data), out, model, **same)
        if table == "all"
        else [PaperTable(table, data, out, model=model, **same)]
    )
    for one in every:
        stage(f"{one.table.title}: {one.model} on {one.data}, into {one.out}")
        one.run()
        if Processes.from_environment().is_first:
            typer.echo((one.out / "table.md").read_text("utf-8"))
            typer.echo(f"Report: {one.out / 'report.html'}")


# Relations ------------------------------------------------------------------------------------------------------------


RELATIONS = {
    "n_splits": "--splits",
    "n_train": "--examples",
    "categories": "--category",
    "with_lre": "--lre/--no-lre",
}


def relations_(
    model: Model,
    data: Annotated[Path, typer.Option(help="Folder of relation files, one subfolder per category.")],
    out: RunFolder,
    asked: Annotated[RelationOptions, RELATIONS],
    processes: NumberOfProcesses = 1,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Decode relations with the mean operator, beside LRE and controls, and write a report.

    Example: tensorlens relations smollm2-135m --data facts --out run --limit 1
    """
    reading.check(model)
    check_data(data)
    if hand_over(processes):
        return
    from tensorlens.studies.relation_study import relations as run_relations
    from tensorlens.studies.runs import check_run_folder

    check_run_folder(out, "relations")
    lens = reading.lens(model, final_norm=False, device=Processes.device())
    result = run_relations(lens, data, out, options=asked)
    if Processes.from_environment().is_first:
        print_json(result.summary) if json else _print_relations(result)


def _print_relations(result: StudyResult) -> None:
    """The relations that survive, those that do not, and the table."""
    from tensorlens.studies.relation_report import category_table, survival

    summary = result.summary
    typer.echo(survival(summary))
    for key, reason in summary["left_out"].items():
        typer.echo(f"left out: {key}: {reason}")
    for problem in summary["problems"]:
        if problem["is_fatal"]:
            typer.echo(f"left out: {problem['path']}: {problem['place']}: {problem['message']}", err=True)
    if summary["relations"]:
        typer.echo("\nagreement with the model, mean over relations [95% interval]")
        print_rows(category_table(summary))
    typer.echo(f"\nReport: {result.report}")


# Fidelity -------------------------------------------------------------------------------------------------------------


def fidelity_(
    model: Model,
    input: Input,
    out: RunFolder,
    asked: Annotated[FidelityOptions, {"n_random": "--directions"}],
    revisions: Annotated[
        str | None, typer.Option(help="Checkpoints to compare, separated by commas; each gets a folder.")
    ] = None,
    json: Json = False,
    final_norm: FinalNorm = True,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """How far from the input is the operator accurate? Errors by step size, bounds, and properties by block.

    Example: tensorlens fidelity minilm "A sentence of your own." --out run
    """
    states = {name: replace(reading, revision=name) for name in listed(revisions)}
    if revisions is not None and not states:
        raise InputError("`--revisions` must name at least one checkpoint, such as step1000,step143000.")
    for one in states.values() or [reading]:
        one.check(model)
    text = read_input(input)
    from tensorlens.studies.fidelity_study import fidelity as run_fidelity
    from tensorlens.studies.runs import check_run_folder

    runs = [(n, s, out / n.replace("/", "-")) for n, s in states.items()] or [("", reading, out)]
    for _, _, folder in runs:
        check_run_folder(folder, "fidelity")
    made = {
        name: run_fidelity(of.lens(model, final_norm=final_norm), text, folder, options=asked)
        for name, of, folder in runs
    }
    if json:
        print_json({name: one.summary for name, one in made.items()} if states else made[""].summary)
    else:
        _print_fidelity(made)


def _print_fidelity(made: Mapping[str, StudyResult]) -> None:
    """One line per checkpoint; for a single one, norms and bounds, errors, properties, and the path of the rest."""
    from tensorlens.studies import fidelity_report as report

    if "" not in made:
        print_rows([{"revision": name} | report.dynamics(one.summary) for name, one in made.items()])
        return
    summary = made[""].summary
    print_rows(report.norm_table(summary))
    print_rows(report.alternative_table(summary))
    typer.echo("\nmedian errors relative to F(X)")
    print_rows(report.error_table(summary))
    if summary["properties"]:
        typer.echo("\nproperties of the slice T[i]")
        print_rows(report.property_table(summary))
    typer.echo(f"\nReport: {made[''].report}")
