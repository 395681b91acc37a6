"""`tensorlens maps`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensorlens.app import options
from tensorlens.app.options import Json, Model, ModelOptions, OtherTarget, TargetName, check_method_name
from tensorlens.app.printing import print_json
from tensorlens.errors import InputError, check_choice

if TYPE_CHECKING:
    from tensorlens.mapper import Mapper
    from tensorlens.studies.map_table import EncodedPart, MapTable

FIRST_ROWS = 32
"""Number of rows in the first part, which measures the time per row."""

SHOWN = 5
"""Largest number of left-out rows to print with their reason."""


@dataclass(frozen=True, kw_only=True)
class MapsChoices:
    """Options for reading, mapping and writing rows."""

    column: Annotated[str | None, typer.Option(help="Column or field with the text.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Rows per batch (default: as many as fit).", min=1)] = None
    limit: Annotated[int | None, typer.Option(help="Largest number of rows.", min=1)] = None
    on_error: Annotated[
        str, typer.Option(help="What to do with rows that are empty, too long or not text: raise or skip.")
    ] = "raise"
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long for the model.")] = False
    words: Annotated[bool, typer.Option("--words", help="One score per word instead of one per token.")] = False
    part_rows: Annotated[
        int, typer.Option(help="Largest number of rows per part (work lost if interrupted).", min=1)
    ] = 4096
    part_seconds: Annotated[float, typer.Option(help="Approximate time per part, in seconds.", min=1)] = 60.0


def maps(
    model: Model,
    data: Annotated[str, typer.Option(help="A .csv, .jsonl, .parquet or .txt file, or a `datasets` folder.")],
    out: Annotated[
        Path,
        typer.Option(help="Output: a .csv or .jsonl file, or a folder of parquet files. An existing run is resumed."),
    ],
    method: Annotated[str, typer.Option(help="A method (see `tensorlens methods`).")] = "tensor.in_class",
    target: TargetName = None,
    against: OtherTarget = None,
    asked: MapsChoices = MapsChoices(),  # noqa: B008  # a frozen record
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: auto, host:port, or local.")
    ] = None,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Map every row of a data set, and add tokens, scores, target, logit, bias_share and prediction to its columns.

    Example: tensorlens maps smollm2-135m --data reviews.csv --out maps.csv
    """
    reading.check(model)
    wanted = options.target_of(target, against)
    _check(method, asked.on_error, out)
    from tensorlens.mapper import Mapper
    from tensorlens.studies.datasets import RowFile
    from tensorlens.studies.map_table import MapTable
    from tensorlens.studies.runs import model_settings

    rows = RowFile(data, asked.column)
    same = {"batch_size": asked.batch_size, "on_error": asked.on_error, "truncate": asked.truncate}
    same |= {"groups": "words" if asked.words else None}
    mapper = Mapper(model, method, column=rows.column, target=wanted, **same, **reading.loading())
    about = {"method": method, "target": wanted, "data": rows.digest, "column": rows.column}
    about |= same | {"limit": asked.limit, "part_rows": asked.part_rows}
    table = MapTable(out, model_settings(mapper.lens()) | about)
    started = time.perf_counter()
    n_new = 0
    for first, n_rows, part in _made(table, mapper, islice(rows, asked.limit), asked, ray):
        table.write(first, part)
        n_new += n_rows
    table.finish()
    _report(table, n_new, time.perf_counter() - started, as_json=json)


def _check(method: str, on_error: str, out: Path) -> None:
    """Refuse wrong options before torch is imported."""
    check_method_name(method)
    check_choice(on_error, "--on-error", ("raise", "skip"))
    suffix = out.suffix.lower()
    is_folder = out.is_dir() or not out.is_file() and (suffix == ".parquet" or not suffix[1:].isalpha())
    if not is_folder and suffix not in (".csv", ".jsonl"):
        raise InputError(
            f"`--out` must be a .csv or .jsonl file, or a folder, where the maps are parquet files; got {str(out)!r}."
        )


def _made(
    table: MapTable, mapper: Mapper, rows: Iterator[Any], asked: MapsChoices, ray: str | None
) -> Iterator[tuple[int, int, EncodedPart]]:
    """Make the missing parts, here or on a cluster. Here, the rate of the last part sets the size of the next."""
    from tensorlens.studies.map_table import encoded, parts_on_ray

    if ray is not None:
        waiting = table.pending(rows, lambda: asked.part_rows)
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints what happens to its nodes
            yield from parts_on_ray(ray, mapper, ((first, some, first) for first, some in waiting))
        return
    sizes = [min(asked.part_rows, FIRST_ROWS)]
    for first, some in table.pending(rows, lambda: sizes[-1]):
        began = time.perf_counter()
        made = encoded(mapper, some, first, None)
        rate = len(some) / max(time.perf_counter() - began, 1e-6)
        sizes.append(min(asked.part_rows, int(rate * asked.part_seconds)))
        yield first, len(some), made


def _report(table: MapTable, n_new: int, seconds: float, *, as_json: bool) -> None:
    skipped, n_maps = table.skipped(), table.n_maps()
    if as_json:
        print_json({"maps": n_maps, "new_rows": n_new, "seconds": round(seconds, 3), "skipped": skipped})
        return
    for one in skipped[:SHOWN]:
        typer.echo(f"tensorlens: row {one['row']} left out: {one['reason']}", err=True)
    if len(skipped) > SHOWN:
        typer.echo(f"tensorlens: and {len(skipped) - SHOWN} more; see _skipped-*.jsonl in the folder.", err=True)
    rate = f", {n_new / seconds:.1f} rows per second" if n_new else ""
    typer.echo(f"{n_maps} maps, {len(skipped)} rows left out{rate}. Wrote {table.out}")
