"""The maps of a data set as a folder of parquet files, which can be stopped at any moment and started again.

| file                    | holds                                                       |
|-------------------------|-------------------------------------------------------------|
| `part-00000.parquet`    | the maps of the first rows; whole or not there              |
| `_skipped-00000.jsonl`  | rows of that part that could not be mapped, and why         |
| `_config.json`          | settings, digests of model and data, versions               |

Readers of parquet folders (pandas, pyarrow, `datasets`, DuckDB, Spark) pass over names that begin with `_`. A part is
computed from its own rows alone, so that it is the same whether or not the run was stopped before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError, missing_extra
from tensorlens.files import write_whole
from tensorlens.mapper import Mapper
from tensorlens.strict_json import from_json, to_json, write_json, write_text
from tensorlens.studies.runs import read_run_file, refuse_other_settings
from tensorlens.versions import package_versions

EncodedPart = tuple[bytes, str]
"""A parquet file, and a line of JSON for each row that was left out."""


class MapTable:
    """A folder of maps, opened to be written.

    Args:
        folder: Made if it is not there.
        settings: Everything the maps depend on, as plain data; others than those it was begun with are refused.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.settings = from_json(to_json(settings | {"versions": package_versions()}))
        try:
            import pyarrow  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise missing_extra("Writing a .parquet file", "pyarrow", "studies") from None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"Expected a folder for the maps that can be written in; got {error}.") from error
        for left in self.folder.glob(".*.tmp"):  # what a killed process had begun to write
            left.unlink()
        self._open_config()

    def pending(self, parts: Iterable[list[Any]]) -> Iterator[tuple[int, list[Any], int]]:
        """Number, rows and first row of each part that is not there yet."""
        first = 0
        for number, rows in enumerate(parts):
            if not self._path(number).is_file():
                yield number, rows, first
            first += len(rows)

    def write(self, number: int, part: EncodedPart) -> None:
        """Write one part, whole or not at all."""
        content, skipped = part
        if skipped:  # written first: the part's file marks completion
            write_text(self.folder / f"_skipped-{number:05}.jsonl", skipped)
        write_whole(self._path(number), content)

    def skipped(self) -> list[dict[str, Any]]:
        """Rows that were left out, with the reason."""
        files = sorted(self.folder.glob("_skipped-*.jsonl"))
        return [from_json(line) for path in files for line in path.read_text("utf-8").splitlines()]

    def n_maps(self) -> int:
        """Maps on the disk."""
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]

        return sum(parquet.read_metadata(path).num_rows for path in self.folder.glob("part-*.parquet"))

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05}.parquet"

    def _open_config(self) -> None:
        path = self.folder / "_config.json"
        if not path.exists():
            if any(self.folder.iterdir()):
                raise InputError(f"Expected an empty folder, or one of maps, at {str(self.folder)!r}; choose another.")
            write_json(path, self.settings)
        there = read_run_file(path, {}, "Choose another folder.")
        refuse_other_settings(path, {"settings": there}, {"settings": self.settings})


def encoded(mapper: Mapper, rows: list[Any], first_row: int, progress: bool | None = False) -> EncodedPart:
    """Map some rows, and make the content of their files; on a cluster this is done where the maps are made.

    Args:
        mapper: What to do with the rows.
        rows: The texts.
        first_row: Place of the first of them in the data.
        progress: Whether to show a progress bar; on a terminal if None.
    """
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    found, skipped = mapper.part(rows, first_row, progress=progress)
    bad = {row for row, _ in skipped}
    kept = [{"id": first_row + row} | columns for row, columns in enumerate(found) if row not in bad]
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(kept, schema=_schema()), sink, compression="zstd")
    lines = (to_json({"row": first_row + row, "reason": reason}) + "\n" for row, reason in skipped)
    return sink.getvalue().to_pybytes(), "".join(lines)


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
        }
    )
