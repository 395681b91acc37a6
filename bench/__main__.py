"""`python -m bench judge`, `passages`, `templates`, `keep`, `tables`, `families` and `strangers`; one is a module:

    python -m bench.speed                docs/performance.md

No command imports torch before it has said what it does.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.judges import JUDGES
from tensorlens.app.options import Json, Model, ModelOptions, RunFolder, check_data, listed, with_records
from tensorlens.app.printing import print_json, print_rows
from tensorlens.errors import InputError, TensorLensError

SECONDS_BETWEEN = 5.0
"""How often a command that is not in a terminal says how far it is, at most."""

QUICK_ITEMS = 5
QUICK_METHODS = (
    "tensor.in_class,tensor.in_class@half_gate,tensor.in_class@attn_lrp,tensor.in_class@jacobian,mean.attn,"
    "control.recency"
)

app = typer.Typer(name="bench", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


class Teller:
    """Says on standard error what is being done: the first lines at once, later ones every few seconds.

    Args:
        name: The command's.
    """

    def __init__(self, name: str) -> None:
        self.name, self.began, self.last = name, time.monotonic(), 0.0

    def __call__(self, said: str, *, at_once: bool = False) -> None:
        """Say it, at once or if nothing was said for some seconds."""
        now = time.monotonic()
        if at_once or now - self.last >= SECONDS_BETWEEN:
            self.last = now
            sys.stderr.write(f"bench {self.name}, {now - self.began:.0f} s: {said}\n")
            sys.stderr.flush()


def judge(
    model: Model,
    data: Annotated[str, typer.Option(help="Folder with the data of the benchmarks, or with sets of evidence.")],
    out: RunFolder,
    judges: Annotated[str, typer.Option(help=f"Benchmarks, separated by commas: {', '.join(JUDGES)}.")] = "evidence",
    methods: Annotated[
        str | None, typer.Option(help="Map methods (default: all); a rule set follows an @: tensor.in_class@attn_lrp.")
    ] = None,
    peers: Annotated[str | None, typer.Option(help="Other packages to compare with, such as lxt.attn_lrp,gim.")] = None,
    peer_python: Annotated[str | None, typer.Option(help="Python of the environment with these packages.")] = None,
    peer_limit: Annotated[int | None, typer.Option(help="Items per set for other packages, at most.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="Largest number of items per set.", min=1)] = None,
    quick: Annotated[bool, typer.Option(help="Quick trial: five items per set, four rule sets, two controls.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed for replaced tokens and the bootstrap.")] = 0,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Which method finds the parts that are known to matter? Benchmarks with known answers, the same items for all.

    Several processes share a run under torchrun or accelerate launch.
    """
    tell = Teller("judge")
    tell(f"{judges} of {data} on {model}, into {out}; loading the model", at_once=True)
    limit, methods = (limit or QUICK_ITEMS, methods or QUICK_METHODS) if quick else (limit, methods)
    reading.check(model)
    check_data(data)
    chosen = listed(judges)
    wrong = next((name for name in chosen if name not in JUDGES), None)
    if wrong is not None or not chosen:
        raise InputError(f"`--judges` must be among {', '.join(JUDGES)}; got {wrong or 'none'}. See also `passages`.")
    from bench.judges.run import BenchOptions
    from bench.judges.run import judge as run_judges
    from tensorlens.studies.processes import Processes

    options = BenchOptions(
        judges=tuple(chosen),
        methods=tuple(listed(methods)) or None,
        peers=tuple(listed(peers)),
        peer_python=peer_python,
        peer_limit=peer_limit,
        limit=limit,
        seed=seed,
    )
    lens = reading.lens(model, device=Processes.device())
    tell("reading the items", at_once=True)
    result = run_judges(lens, data, out, options=options, tell=tell)
    if Processes.from_environment().is_first:
        print_json(result.summary) if json else _print(result)


def _print(result: Any) -> None:
    """A table for each judge, what could not be used, and where the rest is."""
    from tensorlens.studies.judge_study import counts_line, judge_table

    for name, found in result.summary["judges"].items():
        typer.echo(f"{name}: {counts_line(found)}")
        for line in found["problems"][:5]:
            typer.echo(f"  {line}")
        if found["measures"]:
            print_rows(judge_table(found))
        typer.echo("")
    for name, about in result.summary["peers"].items():
        parts = [f"{name} {about.get('version', '')}: {about['n']} items"]
        parts += [f"its own example: {about['check']}"] if "check" in about else []
        typer.echo("; ".join([*parts, *([about["error"]] if "error" in about else [])]))
    typer.echo(f"Report: {result.report}")


def passages(
    model: Model,
    out: Annotated[Path, typer.Option(help="Output file, one JSON line per item. An existing file is resumed.")],
    judges: Annotated[
        str, typer.Option(help="Benchmarks: documents, needles, injections, titles, context.")
    ] = "documents",
    data: Annotated[
        Path | None, typer.Option(help="Folder with needles/ and wikitext-2/, for needles and titles.")
    ] = None,
    agentdojo: Annotated[Path | None, typer.Option(help="Folder of the package agentdojo, for injections.")] = None,
    members: Annotated[str, typer.Option(help="Rule sets, separated by commas.")] = "paper,half_gate,attn_lrp,gim",
    targets: Annotated[str, typer.Option(help="Targets to explain.")] = "centred,raised,runner_up",
    lengths: Annotated[str, typer.Option(help="Prompt lengths for needles.")] = "512,1024,2048",
    items: Annotated[int, typer.Option(help="Largest number of items per benchmark and length.", min=1)] = 50,
    seconds: Annotated[float, typer.Option(help="Start no item after this many seconds.")] = 1e9,
    peers: Annotated[str, typer.Option(help="Ask these packages instead, into a file of their own.")] = "",
    peer_python: Annotated[str | None, typer.Option(help="Python of the environment with these packages.")] = None,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Which passage is an answer based on? Every rule set with every target, beside BM25 and mean attention."""
    tell = Teller("passages")
    tell(f"{judges} on {model}, into {out}; loading the model", at_once=True)
    from bench.passages import items as made
    from bench.passages.run import ask_peers, run, write_lines
    from bench.passages.scores import RULES, TARGETS

    chosen, asked = checked(judges, ("documents", "needles", "injections", "titles", "context"), "judges"), []
    chosen_rules, chosen_targets = checked(members, RULES, "members"), checked(targets, list(TARGETS), "targets")
    lens = reading.lens(model)
    if "documents" in chosen:
        asked += made.documents(items)
    if "injections" in chosen:
        asked += made.injections(needed(agentdojo, "agentdojo"), items)
    if "needles" in chosen:
        folder, n_tokens = needed(data, "data"), [*map(int, listed(lengths))]
        count = lambda text: len(lens.prepare(text).arguments["input_ids"][0])  # noqa: E731
        asked += made.needles(folder / "needles", folder / "wikitext-2" / "valid.txt", n_tokens, items, count)
    tell(f"{len(asked)} items", at_once=True)
    if peers:
        from bench.judges.peers import PEERS

        names = checked(peers, PEERS, "peers")
        n = write_lines(out, ask_peers(lens, asked, names, out.with_suffix(""), peer_python, tell), tell)
        typer.echo(f"{n - 1} items in {out}")
        return
    n = run(lens, asked, out, rules=chosen_rules, targets=chosen_targets, seconds=seconds, tell=tell)
    if "titles" in chosen:
        from bench.passages.titles import lines as of_titles

        text = needed(data, "data") / "wikitext-2" / "valid.txt"
        n += write_lines(out, of_titles(lens, text, items, chosen_rules, chosen_targets), tell)
    if "context" in chosen:
        from bench.passages.context_use import lines

        n += write_lines(out, lines(lens, chosen_rules), tell)
    typer.echo(f"{n} items in {out}")


def templates(
    model: Model,
    judge: Annotated[
        str, typer.Option(help="reactions (of a classifier), edits (of a corrector), concepts (encoder).")
    ],
    out: Annotated[Path, typer.Option(help="Output file, one JSON line per item; written anew.")],
    n: Annotated[int, typer.Option(help="Items of each template or concept.", min=1)] = 10,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Texts made by template, of which it is known what matters: atoms that react, a word that decides, a concept."""
    tell, (name,) = Teller("templates"), checked(judge, ("reactions", "edits", "concepts"), "judge")
    tell(f"{name} on {model}, into {out}; loading the model", at_once=True)
    lines = importlib.import_module(f"bench.judges.{name}").lines
    from bench.passages.run import write_lines

    out.unlink(missing_ok=True)
    typer.echo(f"{write_lines(out, lines(reading.lens(model), n), tell)} items in {out}")


def checked(given: str, known: Sequence[str], name: str) -> tuple[str, ...]:
    """Names from a list with commas, all of them known."""
    chosen = tuple(listed(given))
    wrong = next((one for one in chosen if one not in known), None)
    if wrong is not None or not chosen:
        raise InputError(f"`--{name}` must be among {', '.join(known)}; got {wrong or 'none'}.")
    return chosen


def needed(folder: Path | None, name: str) -> Path:
    """A folder that must be given and be there."""
    if folder is None or not folder.is_dir():
        raise InputError(f"These items need a folder: pass --{name} FOLDER; got {str(folder)!r}.")
    return folder


def keep(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Output folders of `judge`, files that `passages` wrote, or records to add methods to."),
    ],
    model: Annotated[str, typer.Option(help="Short name of the model.")],
    about: Annotated[str, typer.Option(help="Device and precision, in words.")] = "CPU, float32",
) -> None:
    """Put the raw scores of runs into bench/records, one file per benchmark; records among them limit the items."""
    import json

    from bench.records import FOLDER
    from bench.records import keep as write

    files = [run / "samples.jsonl" if run.is_dir() else run for run in runs]
    files += [file for run in runs if (file := run / "peers" / "samples.jsonl").is_file()]
    found = [line for file in files for line in map(json.loads, _text(file).splitlines())]
    found += [json.loads(_text(file)) for run in runs if (file := run / "summary.json").is_file()]
    peers = {name: one for some in found for name, one in (some.get("peers") or {}).items()}
    lines = [line for line in found if "judge" in line]
    kept = {json.loads(line).get("item") for run in runs if run.suffix == ".gz" for line in _text(run).splitlines()}
    lines = [line for line in lines if not kept or line["item"] in kept]
    for judge_name in sorted({line["judge"] for line in lines}):
        target = FOLDER / f"{judge_name}-{model}.jsonl.gz"
        some = sorted((line for line in lines if line["judge"] == judge_name), key=lambda line: line["item"])
        asked = {
            name: one for name, one in peers.items() if any(name in line["scores"] for line in some) or "error" in one
        }
        n = write(some, {"model": model, "ran": about} | ({"peers": asked} if asked else {}), target)
        typer.echo(f"{target.name}: {n} items, {target.stat().st_size // 1024} KiB")


def _text(path: Path) -> str:
    import gzip

    return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()


def tables(
    write: Annotated[bool, typer.Option(help="Write the tables into the pages of docs/ instead.")] = False,
) -> None:
    """Print every published number of the benchmarks from the records in bench/records; no model is loaded."""
    Teller("tables")("every table from bench/records", at_once=True)
    from bench import claims, published

    if write:
        published.write()
        claims.write()
    else:
        typer.echo(f"{published.everything()}\n\n{claims.table()}")


def paper_reactions(path: Annotated[Path, typer.Argument(help="The .csv file.")]) -> None:
    """Write reactions made from templates, as data for `tensorlens paper bert --model rxnfp`."""
    from bench.claims import write_reactions

    typer.echo(f"Wrote {write_reactions(path)} reactions")


def paper_records(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run of `tensorlens paper` or `perturb`.")],
    name: Annotated[str, typer.Option(help="Model and data: mpnet-imdb, smollm2-wikitext, dinov2-images, …")],
    by_label: Annotated[bool, typer.Option("--by-label", help="Intervals draw labels, such as templates.")] = False,
) -> None:
    """Pack the samples of a run into bench/records/paper, for the table of claims."""
    from bench.claims import pack

    typer.echo(f"Wrote {pack(run, name, by_label=by_label)}")


def families(
    only: Annotated[list[str] | None, typer.Option(help="Model types, such as llama (default: all).")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Tasks: causal, masked, seq2seq, vision, audio.")] = None,
    attention: Annotated[list[str] | None, typer.Option(help="eager or sdpa (default: both).")] = None,
    out: Annotated[Path, typer.Option(help="JSON file; the page is written beside it.")] = Path(
        "docs/compatibility.json"
    ),
    workers: Annotated[int, typer.Option(help="Number of worker processes.", min=1)] = 2,
    limit_seconds: Annotated[float, typer.Option(help="Time limit per model type, in seconds.", min=1)] = 120.0,
) -> None:
    """Certify a tiny random model of every type that transformers can build.

    With --only, --task or --attention, all other rows of an existing table are kept.
    """
    tell = Teller("families")
    tell(f"certificates of {', '.join(only or ['every model type'])} into {out}; starting", at_once=True)
    from bench.families.run import ATTENTIONS, cases, sweep
    from bench.families.table import read_table, write_table
    from bench.families.tiny_models import TASKS

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
    for n_done, record in enumerate(sweep(chosen, workers=workers, limit_seconds=limit_seconds), 1):
        name = record.task, record.model_type, record.attention
        records[name] = record
        if record.status != "certified":
            tell(f"{' '.join(name)}: {record.status}, {record.reason[:120]}", at_once=True)
        tell(f"{n_done} of {len(chosen)}")
        write_table(records.values(), out)
    certified = sum(record.status == "certified" for record in records.values())
    typer.echo(f"{certified} of {len(records)} certified; table in {out} and {out.with_suffix('.md')}")


def strangers(
    names: Annotated[
        list[str] | None, typer.Argument(help="Parts of model names (default: models not in the table yet).")
    ] = None,
) -> None:
    """Write the table of models of other packages into docs/compatibility.md; see `make strangers`."""
    Teller("strangers")("models of other packages into docs/compatibility.md; importing them", at_once=True)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    importlib.import_module("strangers.table").main(*(names or ()))


app.command("strangers")(strangers)
app.command("judge")(with_records(judge))
app.command("passages")(with_records(passages))
app.command("templates")(with_records(templates))
app.command("keep")(keep)
app.command("tables")(tables)
app.command("paper-reactions")(paper_reactions)
app.command("paper-records")(paper_records)
app.command("families")(with_records(families))


def main() -> None:
    """Run a command; an error that we raise is one message and exit code 2."""
    try:
        app()
    except TensorLensError as error:
        typer.echo(f"bench: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
