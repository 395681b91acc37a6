"""`tensorlens families`: the compatibility table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tensorlens.app.options import Json
from tensorlens.app.printing import print_json


def families(
    only: Annotated[list[str] | None, typer.Option(help="Model types, such as llama; all if left out.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Tasks: causal, masked, seq2seq, vision, audio.")] = None,
    attention: Annotated[list[str] | None, typer.Option(help="eager, sdpa; both if left out.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file; the page is written beside it.")] = Path(
        "docs/compatibility.json"
    ),
    workers: Annotated[int, typer.Option(help="Processes at a time.", min=1)] = 2,
    limit_seconds: Annotated[float, typer.Option(help="Time for one model type.", min=1)] = 120.0,
    json: Json = False,
) -> None:
    """Certify a tiny random model of every type that transformers can build.

    With --only, --task or --attention, the other lines of an existing table are kept.

    Example: tensorlens families --only llama --only bert --out table.json
    """
    from rich.console import Console
    from rich.progress import Progress

    from tensorlens.errors import InputError
    from tensorlens.studies.family_study.run import ATTENTIONS, cases, sweep
    from tensorlens.studies.family_study.table import read_table, write_table
    from tensorlens.studies.family_study.tiny_models import TASKS

    unknown = set(task or ()) - set(TASKS) | set(attention or ()) - set(ATTENTIONS)
    if unknown:
        raise InputError(
            f"Expected tasks among {', '.join(TASKS)} and attentions among {', '.join(ATTENTIONS)}; "
            f"got {', '.join(sorted(unknown))}."
        )
    chosen = cases(task or tuple(TASKS), only or (), attention or ATTENTIONS)
    if not chosen:
        raise InputError(f"The installed transformers lists none of {', '.join(only or ())} for these tasks.")
    partly = bool(only or task or attention)
    records = {(r.task, r.model_type, r.attention): r for r in (read_table(out) if partly else [])}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("families", total=len(chosen))
        for record in sweep(chosen, workers=workers, limit_seconds=limit_seconds):
            records[record.task, record.model_type, record.attention] = record
            progress.advance(bar)
            if record.status != "certified":
                name = f"{record.task} {record.model_type} {record.attention}"
                progress.console.print(f"{name}: {record.status}, {record.reason[:120]}", markup=False)
            write_table(records.values(), out)
    certified = sum(record.status == "certified" for record in records.values())
    if json:
        print_json({"certified": certified, "n_cases": len(records), "table": str(out)})
        return
    typer.echo(f"{certified} of {len(records)} certified; table in {out} and {out.with_suffix('.md')}")
