"""`tensorlens relations`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tensorlens.app.options import Json, Model, ModelOptions, NumberOfProcesses, RunFolder, check_data, numbers
from tensorlens.app.printing import print_json, print_rows
from tensorlens.studies.processes import Processes, hand_over


def relations(
    model: Model,
    data: Annotated[Path, typer.Option(help="Folder of relation files, by category.", show_default=False)],
    out: RunFolder,
    limit: Annotated[int | None, typer.Option(help="Relations of each category, at most.", min=1)] = None,
    splits: Annotated[int, typer.Option(help="Train-test splits of each relation.", min=1)] = 6,
    examples: Annotated[int, typer.Option(help="m, training examples of each split.", min=1)] = 3,
    max_test: Annotated[int, typer.Option(help="Test facts of each split, at most.", min=1)] = 100,
    starts: Annotated[str, typer.Option(help="Blocks to start from, such as 0,6,12.")] = "0",
    category: Annotated[list[str] | None, typer.Option(help="Only this category. Repeatable.")] = None,
    lre: Annotated[bool, typer.Option(help="Whether to run LRE beside the tensor.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the first split.")] = 0,
    processes: NumberOfProcesses = 1,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Decode relations with the mean attention tensor, beside LRE and controls; write a run with a report.

    Example: tensorlens relations smollm2-135m --data facts --out run --limit 1
    """
    reading.check(model)
    check_data(data)
    first_blocks = tuple(numbers(starts, int, "starts", "blocks such as 0,6,12"))
    if hand_over(processes):
        return
    from tensorlens.studies.relation_study.report import category_table, survival
    from tensorlens.studies.relation_study.run import RelationOptions
    from tensorlens.studies.relation_study.run import relations as run_relations

    chosen = RelationOptions(
        n_train=examples,
        n_splits=splits,
        seed=seed,
        max_test=max_test,
        starts=first_blocks,
        with_lre=lre,
        limit=limit,
        categories=category or None,
    )
    lens = reading.lens(model, final_norm=False, device=Processes.device())
    result = run_relations(lens, data, out, options=chosen)
    summary = result.summary
    if not Processes.from_environment().is_first:
        return
    if json:
        print_json(summary)
        return
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
