"""`tensorlens relations`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tensorlens.app.options import Json, Model, ModelOptions, NumberOfProcesses, RunFolder, check_data, numbers
from tensorlens.app.printing import print_json, print_rows
from tensorlens.studies.processes import Processes, hand_over

if TYPE_CHECKING:
    from tensorlens.studies.runs import StudyResult


@dataclass(frozen=True, kw_only=True)
class RelationChoices:
    """The options of the study as they are written on the command line; see `RelationOptions`."""

    limit: Annotated[int | None, typer.Option(help="Largest number of relations per category.", min=1)] = None
    splits: Annotated[int, typer.Option(help="Train-test splits per relation.", min=1)] = 6
    examples: Annotated[int, typer.Option(help="Training examples per split (m).", min=1)] = 3
    max_test: Annotated[int, typer.Option(help="Largest number of test facts per split.", min=1)] = 100
    starts: Annotated[str, typer.Option(help="Blocks to start from, such as 0,6,12.")] = "0"
    category: Annotated[list[str] | None, typer.Option(help="Only this category. Repeatable.")] = None
    lre: Annotated[bool, typer.Option(help="Whether to run LRE as well.")] = True
    seed: Annotated[int, typer.Option(help="Random seed of the first split.")] = 0


def relations_(
    model: Model,
    data: Annotated[
        Path, typer.Option(help="Folder of relation files, one subfolder per category.", show_default=False)
    ],
    out: RunFolder,
    asked: RelationChoices = RelationChoices(),  # noqa: B008  # a frozen record
    processes: NumberOfProcesses = 1,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Decode relations with the mean attention tensor, beside LRE and controls, and write a report.

    Example: tensorlens relations smollm2-135m --data facts --out run --limit 1
    """
    reading.check(model)
    check_data(data)
    starts = tuple(numbers(asked.starts, int, "starts", "blocks such as 0,6,12"))
    if hand_over(processes):
        return
    from tensorlens.studies.relation_study.run import RelationOptions
    from tensorlens.studies.relation_study.run import relations as run_relations

    chosen = RelationOptions(
        n_train=asked.examples,
        n_splits=asked.splits,
        seed=asked.seed,
        max_test=asked.max_test,
        starts=starts,
        with_lre=asked.lre,
        limit=asked.limit,
        categories=tuple(asked.category) if asked.category else None,
    )
    lens = reading.lens(model, final_norm=False, device=Processes.device())
    result = run_relations(lens, data, out, options=chosen)
    if Processes.from_environment().is_first:
        print_json(result.summary) if json else _print(result)


def _print(result: StudyResult) -> None:
    """What survives, what does not, and the table."""
    from tensorlens.studies.relation_study.report import category_table, survival

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
