"""`tensorlens paper`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tensorlens.app.options import NumberOfProcesses, RunFolder
from tensorlens.app.printing import stage
from tensorlens.studies.processes import Processes, hand_over

TABLE = (
    "deit-base, deit-small, bert, roberta, modernbert, gemma3, pythia, pico, phi, relations, or all of them. "
    "With all, --data and --model are folders with one subfolder per table."
)
DATA = "File, folder or hub id of the data, or a folder with imagenet, imdb, wikitext-103 and relations."


def paper(
    table: Annotated[str, typer.Argument(metavar="TABLE", help=TABLE)],
    out: RunFolder,
    data: Annotated[str | None, typer.Option(help=DATA, show_default="from the hub, where available")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id of the model.", show_default="the paper's, from the hub")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Number of samples, or of relations per category.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed for samples, splits and bootstrap.")] = None,
    protocol: Annotated[
        Path | None, typer.Option(help="A .json or .toml file with settings that replace the paper's.")
    ] = None,
    processes: NumberOfProcesses = 1,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, mps, … (default: the accelerator).")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model, as Pico's does.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")] = None,
) -> None:
    """Reproduce one of the paper's tables with its protocol: its numbers beside ours, deviations listed.

    Example: tensorlens paper pythia --data wikitext-103 --out pythia --limit 100

    Writes table.tex, table.md, figures and samples.jsonl. ModernBERT and Gemma3 are fine-tuned for sentiment first.
    """
    from tensorlens.studies.paper.protocol import read_protocol

    settings = read_protocol(protocol)
    if hand_over(processes):
        return
    from tensorlens.studies.paper.run import PaperTable, every_table

    same = {
        "protocol": settings,
        "limit": limit,
        "seed": seed,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    if table == "all":
        from tensorlens.errors import InputError

        if data is None:
            raise InputError("`paper all` needs --data, a folder with imagenet, imdb, wikitext-103 and relations.")
        every = every_table(data, out, model, **same)
    else:
        every = [PaperTable(table, data, out, model=model, **same)]
    for one in every:
        stage(f"{one.table.title}: {one.model} on {one.data}, into {one.out}")
        one.run()
        if Processes.from_environment().is_first:
            typer.echo((one.out / "table.md").read_text("utf-8"))
            typer.echo(f"Report: {one.out / 'report.html'}")
