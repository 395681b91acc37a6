"""`tensorlens judge`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tensorlens.app.options import Json, Model, ModelOptions, NumberOfProcesses, RunFolder, check_data, listed, numbers
from tensorlens.app.printing import print_json, print_rows
from tensorlens.errors import InputError
from tensorlens.studies.judge_study import JUDGES
from tensorlens.studies.processes import Processes, hand_over, one_voice

if TYPE_CHECKING:
    from tensorlens.studies.results import StudyResult


def judge(
    model: Model,
    data: Annotated[str, typer.Option(help="Folder with the judges' data, or with sets of evidence.")],
    out: RunFolder,
    judges: Annotated[str, typer.Option(help=f"Among {', '.join(JUDGES)}; separated by commas.")] = "evidence",
    methods: Annotated[
        str | None, typer.Option(help="Maps, with rules after an @: tensor.in_class@attn_lrp; all if not given.")
    ] = None,
    peers: Annotated[str | None, typer.Option(help="Other packages asked too, such as lxt.attn_lrp,gim.")] = None,
    peer_python: Annotated[str | None, typer.Option(help="Interpreter of the peers' environment.")] = None,
    peer_limit: Annotated[int | None, typer.Option(help="Items of a set that peers are asked about.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="Items of each set, at most.", min=1)] = None,
    lengths: Annotated[str, typer.Option(help="Needles: tokens of a prompt, separated by commas.")] = "512",
    seed: Annotated[int, typer.Option(help="Seed of replaced tokens and of the bootstrap.")] = 0,
    processes: NumberOfProcesses = 1,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Which method finds what is known to matter? Judges with answers, every method and peer on the same items.

    Example: tensorlens judge smollm2-135m --data judges --out run --limit 50
    """
    reading.check(model)
    check_data(data)
    chosen = listed(judges)
    wrong = next((name for name in chosen if name not in JUDGES), None)
    if wrong is not None or not chosen:
        raise InputError(f"`--judges` must be among {', '.join(JUDGES)}; got {wrong or 'none'}.")
    n_tokens = numbers(lengths, int, "lengths", "numbers such as 512,2048")
    if hand_over(processes):
        return
    from tensorlens.studies.judge_study.options import JudgeOptions
    from tensorlens.studies.judge_study.run import judge as run_judges

    with one_voice():
        options = JudgeOptions(
            judges=chosen,
            methods=listed(methods) or None,
            peers=listed(peers),
            peer_python=peer_python,
            peer_limit=peer_limit,
            limit=limit,
            lengths=n_tokens,
            seed=seed,
        )
        result = run_judges(reading.lens(model, device=Processes.device()), data, out, options=options)
    if Processes.from_environment().is_first:
        print_json(result.summary) if json else _print(result)


def _print(result: StudyResult) -> None:
    """A table for each judge, what could not be used, and where the rest is."""
    from tensorlens.studies.judge_study.report import area_table, counts_line, judge_table, peer_lines

    for name, found in result.summary["judges"].items():
        typer.echo(f"{name}: {counts_line(found)}")
        for line in found["problems"][:5]:
            typer.echo(f"  {line}")
        if found["measures"]:
            print_rows(judge_table(found))
        typer.echo("")
    if result.summary.get("perturbation"):
        print_rows(area_table(result.summary["perturbation"]))
    for line in peer_lines(result.summary):
        typer.echo(line)
    typer.echo(f"Report: {result.report}")
