"""The maps of a data set as a folder of parquet files, which can be interrupted at any moment and resumed.

| file                        | holds                                                       |
|-----------------------------|-------------------------------------------------------------|
| `part-000004096.parquet`    | the maps of some rows, the first of them row 4096           |
| `_skipped-000004096.jsonl`  | rows of that part that could not be mapped, and why         |
| `_config.json`              | settings, digests of model and data, versions               |

Readers of parquet folders (pandas, pyarrow, `datasets`, DuckDB, Spark) pass over names that begin with `_`. A part is
there whole or not at all, and is computed from its own rows alone. For `maps.csv` and `maps.jsonl` the folder is
`maps.csv.parts`, and the file is made of it at the end.

On a Ray cluster there is one actor per GPU, or per CPU where there is none. An actor that is lost is started again
elsewhere and its part computed again. Parts come back to the machine that asked and are written there, so that no file
system need be shared.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypedDict

import msgspec
from tqdm import tqdm

from tensorlens.errors import InputError, missing_extra
from tensorlens.files import reading, to_json, write_whole
from tensorlens.mapper import Mapper
from tensorlens.studies.runs import RunFolder

FILES = (".csv", ".jsonl")
"""Formats of maps besides parquet, by suffix."""


class _SkippedRow(TypedDict):
    row: int
    reason: str


EncodedPart = tuple[bytes, str]
"""A parquet file, and a line of JSON for each row that was left out."""


class MapTable(RunFolder):
    """A folder of maps, opened to be written.

    Args:
        out: A folder, made if it is not there; or a .csv or .jsonl file, beside which the folder is made.
        settings: Everything the maps depend on, as plain data; different ones are refused when it is resumed.
    """

    config_name = "_config.json"

    def __init__(self, out: str | Path, settings: dict[str, Any]) -> None:
        self.out = Path(out)
        folder = self.out.with_name(f"{self.out.name}.parts") if self.out.suffix.lower() in FILES else self.out
        try:
            import pyarrow  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise missing_extra("Writing a .parquet file", "pyarrow", "studies") from None
        if folder.is_dir() and not (folder / self.config_name).exists() and any(folder.glob("[!.]*")):
            raise InputError(f"Expected an empty folder, or one of maps, at {str(folder)!r}; choose another.")
        super().__init__(folder, "maps", settings)

    def pending(self, rows: Iterator[Any], size: Callable[[], int]) -> Iterator[tuple[int, list[Any]]]:
        """The first row and the rows of each part that is not there yet."""
        starts = sorted(int(path.stem.removeprefix("part-")) for path in self.folder.glob("part-*.parquet"))
        first = 0
        while True:
            if first in starts:
                n_there = self._n_rows(first)
                next(islice(rows, n_there, n_there), None)  # passed over
                first += n_there
                continue
            before = next((start for start in starts if start > first), None)
            most = max(1, size())
            some = list(islice(rows, most if before is None else min(most, before - first)))
            if not some:
                return
            yield first, some
            first += len(some)

    def _n_rows(self, first: int) -> int:
        """Rows of the data that a part stands for."""
        skipped = self._skipped(first)
        return _n_maps(self._path(first)) + (len(_lines(skipped)) if skipped.exists() else 0)

    def write(self, first: int, part: EncodedPart) -> None:
        """Write one part, whole or not at all."""
        content, skipped = part
        if skipped:  # written first: the part's file marks completion
            write_whole(self._skipped(first), skipped)
        write_whole(self._path(first), content)

    def finish(self) -> None:
        """Make the one file of all parts, where one was asked for."""
        if self.folder == self.out:
            return
        from pyarrow.parquet import read_table  # pyright: ignore[reportMissingImports]

        parts = sorted(self.folder.glob("part-*.parquet"))
        write = {".csv": _write_csv, ".jsonl": _write_jsonl}[self.out.suffix.lower()]
        write_whole(self.out, lambda path: write(path, (read_table(part).to_pylist() for part in parts)))

    def skipped(self) -> list[Any]:
        """Rows that were left out, with the reason."""
        return [line for path in sorted(self.folder.glob("_skipped-*.jsonl")) for line in _lines(path)]

    def n_maps(self) -> int:
        """Maps on the disk."""
        return sum(map(_n_maps, self.folder.glob("part-*.parquet")))

    def _path(self, first: int) -> Path:
        return self.folder / f"part-{first:09}.parquet"

    def _skipped(self, first: int) -> Path:
        return self.folder / f"_skipped-{first:09}.jsonl"


def _n_maps(part: Path) -> int:
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    with reading(part, "`tensorlens maps`"):
        return parquet.read_metadata(part).num_rows


def _lines(skipped: Path) -> list[Any]:
    with reading(skipped, "`tensorlens maps`"):
        return msgspec.json.Decoder(_SkippedRow).decode_lines(skipped.read_bytes())


def _write_csv(path: Path, parts: Iterable[list[dict[str, Any]]]) -> None:
    """Lists as JSON."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer: Any = None
        for row in chain.from_iterable(parts):
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow({key: to_json(one) if isinstance(one, (list, dict)) else one for key, one in row.items()})


def _write_jsonl(path: Path, parts: Iterable[list[dict[str, Any]]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{to_json(row, ascii_only=True)}\n" for row in chain.from_iterable(parts))


def encoded(mapper: Mapper, rows: list[Any], first_row: int, progress: bool | None = False) -> EncodedPart:
    """Map some rows, and make the content of their files; on a cluster this is done where the maps are made."""
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    own = [row if isinstance(row, Mapping) else {} for row in rows]
    texts = [row.get(mapper.column) if isinstance(row, Mapping) else row for row in rows]
    found, skipped = mapper.part(texts, first_row, progress=progress)
    bad = {row for row, _ in skipped}
    kept = [k for k in range(len(rows)) if k not in bad]
    schema = _schema()
    ours = pa.Table.from_pylist([{"id": first_row + k} | found[k] for k in kept], schema=schema)
    names = dict.fromkeys(name for row in own for name in row)
    if "id" in names:
        ours = ours.rename_columns({"id": "row"})
    for name in names:
        column = [own[k].get(name) for k in kept]
        ours = ours.append_column(name if name == "id" or name not in schema.names else f"data_{name}", _column(column))
    sink = pa.BufferOutputStream()
    parquet.write_table(ours, sink, compression="zstd")
    lines = (to_json({"row": first_row + row, "reason": reason}) + "\n" for row, reason in skipped)
    return sink.getvalue().to_pybytes(), "".join(lines)


def _column(values: list[Any]) -> Any:
    """A column of the data as it is; as text where its values are of several kinds."""
    import pyarrow as pa  # pyright: ignore[reportMissingImports]

    try:
        made = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        texts = [one if one is None or isinstance(one, str) else to_json(one) for one in values]
        return pa.array(texts, type=pa.string())
    return made.cast(pa.string()) if pa.types.is_null(made.type) else made


def _schema() -> Any:
    import pyarrow as pa  # pyright: ignore[reportMissingImports]

    return pa.schema(
        {
            "id": pa.int64(),
            "tokens": pa.list_(pa.string()),
            "scores": pa.list_(pa.float32()),
            "target": pa.string(),
            "logit": pa.float64(),
            "bias_share": pa.float64(),
            "prediction": pa.string(),
            "sink": pa.float64(),
        }
    )


# On a cluster --------------------------------------------------------------------------------------------------------


AHEAD = 2
"""Parts that wait for each actor, so that none is idle while a finished one is written."""


QUIET_SECONDS = 60.0
"""After this time without a finished part, a warning says how much of the cluster is free."""


class PartActor:
    """Maps parts; lives in a process of the cluster."""

    def __init__(self, mapper: Mapper) -> None:
        self.mapper = mapper

    def part(self, number: int, rows: list[Any], first_row: int) -> tuple[int, int, EncodedPart]:
        """Number, number of rows and content of a part."""
        return number, len(rows), encoded(self.mapper, rows, first_row)


def parts_on_ray(
    address: str, mapper: Mapper, waiting: Iterable[tuple[int, list[Any], int]], n_actors: int | None = None
) -> Iterator[tuple[int, int, EncodedPart]]:
    """Parts as the cluster finishes them.

    Args:
        address: The cluster's: ``auto``, ``host:port`` or ``ray://host:port``; ``local`` starts one on this machine.
        mapper: What to do with the rows.
        waiting: Number, rows and first row of each part.
        n_actors: Processes; one per GPU if None, or one less than there are CPUs, so that other tasks find one.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise missing_extra("`--ray`", "ray", "ray") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"Expected a Ray cluster at {address!r}: {error} Start one: ray start --head") from error
    resources = ray.cluster_resources()
    n_gpus, n_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    count = n_actors or n_gpus or max(1, n_cpus - 1)
    kind = ray.remote(num_cpus=1, num_gpus=1 if n_gpus else 0, max_restarts=-1, max_task_retries=-1)(PartActor)
    actors = [kind.remote(mapper) for _ in range(count)]
    source, running = iter(waiting), {}
    for actor in actors * AHEAD:
        _give(source, actor, running)
    try:
        while running:
            finished, _ = ray.wait(list(running), num_returns=1, timeout=QUIET_SECONDS)
            if not finished:
                _tell_of_quiet(count, n_gpus, ray.available_resources())
                continue
            _give(source, running.pop(finished[0]), running)
            yield ray.get(finished[0])
    finally:
        for actor in actors:  # their CPUs and GPUs are free for whoever comes next, even after an error
            ray.kill(actor)


def _tell_of_quiet(n_actors: int, n_gpus: int, free: dict[str, float]) -> None:
    """Warn about processes that find no place: they wait for ever, and so do their parts."""
    kind = "GPU" if n_gpus else "CPU"
    tqdm.write(
        f"tensorlens: no part has come back for {QUIET_SECONDS:.0f} s. Expected room for {n_actors} processes, one "
        f"{kind} each; the cluster has {free.get(kind, 0.0):g} free besides those that found theirs. If parts are "
        f"merely long, wait; otherwise add machines, or give it more (`ray start --num-{kind.lower()}s`).",
        file=sys.stderr,
    )


def _give(source: Iterator[tuple[int, list[Any], int]], actor: Any, running: dict[Any, Any]) -> None:
    """The next part to an actor, if there is one."""
    part = next(source, None)
    if part is not None:
        running[actor.part.remote(*part)] = actor
