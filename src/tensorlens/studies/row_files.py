"""The rows of a file one after the other, without the whole of it in memory."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError, missing_extra
from tensorlens.studies.digests import digest_of

TEXT_COLUMNS = ("text", "review", "sentence", "content", "document", "input", "prompt")
SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".txt")


class RowFile:
    """A file or folder of rows.

    Args:
        path: A .csv, .tsv, .jsonl, .parquet or .txt file, or a folder that `datasets.Dataset.save_to_disk` wrote.
        column: The column with the text; found by its usual names if None.
    """

    def __init__(self, path: str | Path, column: str | None = None) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir() and not (self.path.is_file() and self.path.suffix.lower() in SUFFIXES):
            raise InputError(
                f"Expected data in a {', '.join(SUFFIXES)} file or a folder of `datasets`; got {str(path)!r}."
            )
        first = next(iter(self._rows()), None)
        if first is None:
            raise InputError(f"Expected at least one row in {str(path)!r}; got none.")
        self.column = text_column(column, list(first), str(path))

    @property
    def digest(self) -> str:
        """Of names, sizes, first and last bytes: enough to tell other data without reading all of them."""
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        return digest_of(f"{one.name} {_ends(one)}" for one in files if one.is_file())

    def parts(self, size: int, limit: int | None = None) -> Iterator[list[Any]]:
        """The values of the column, `size` at a time."""
        values = islice((row.get(self.column) for row in self._rows()), limit)
        while some := list(islice(values, size)):
            yield some

    def _rows(self) -> Iterable[dict[str, Any]]:
        if self.path.is_dir():
            return _folder_rows(self.path)
        readers = {".csv": csv_rows, ".tsv": csv_rows, ".jsonl": jsonl_rows, ".parquet": _parquet_rows}
        return readers.get(self.path.suffix.lower(), txt_rows)(self.path)


def text_column(asked: str | None, columns: Sequence[Any], source: str) -> str:
    """The column with the text: the one asked for, or one with a usual name.

    Raises:
        InputError: There is none.
    """
    chosen = asked or next((name for name in TEXT_COLUMNS if name in columns), None)
    if chosen is None or chosen not in columns:
        raise InputError(
            f"Expected a column {chosen or 'called ' + ' or '.join(TEXT_COLUMNS)} in {source!r}; got "
            f"{', '.join(map(str, columns))}. Name the column with the text."
        )
    return chosen


def _ends(path: Path) -> str:
    with path.open("rb") as file:
        size, first = path.stat().st_size, file.read(2**16)
        file.seek(max(size - 2**16, 0))
        return f"{size} {digest_of([first, file.read()])}"


def text_lines(path: Path, newline: str = "\n") -> Iterator[str]:
    """Lines that end at line feeds alone, since other separators may stand inside a text."""
    # The encoding passes over the mark that spreadsheets put before the first column's name.
    with path.open(encoding="utf-8-sig", newline=newline) as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise InputError(f"Expected text in UTF-8 in {str(path)!r}; got {error}. Convert the file.") from error


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Of a .csv or .tsv file."""
    csv.field_size_limit(2**27)
    try:
        yield from csv.DictReader(
            text_lines(path, newline=""), delimiter="\t" if path.suffix.lower() == ".tsv" else ","
        )
    except csv.Error as error:
        raise InputError(f"Expected rows with separators in {str(path)!r}; got: {error}.") from error


def jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    """One for each line; what is no object is a text."""
    for number, line in enumerate(text_lines(path), 1):
        if line.strip():
            row = parsed(line, f"{path}, line {number}")
            yield row if isinstance(row, dict) else {"text": row}


def parsed(text: str, place: str) -> Any:
    """The value of JSON that stands at a place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"Expected JSON in {place}, one object per line; got: {error}.") from error


def txt_rows(path: Path) -> Iterator[dict[str, Any]]:
    """One for each line."""
    return ({"text": line.rstrip("\r\n")} for line in text_lines(path))


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException  # pyright: ignore[reportMissingImports]
        from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise missing_extra("Reading a .parquet file", "pyarrow", "studies") from None
    try:
        for batch in ParquetFile(path).iter_batches(1024):
            yield from batch.to_pylist()
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"Expected a .parquet file in {str(path)!r}, which could not be read: {error}.") from error


def _folder_rows(path: Path) -> Iterable[dict[str, Any]]:
    try:
        from datasets import load_from_disk  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise missing_extra(f"The data set in {str(path)!r}", "datasets", "studies") from None
    try:
        found = load_from_disk(str(path))
    except Exception as error:  # noqa: BLE001  of many kinds: another folder, a damaged one
        raise InputError(f"Expected a folder that `datasets` wrote with `save_to_disk`; got {str(path)!r}.") from error
    if isinstance(found, dict):
        raise InputError(
            f"{str(path)!r} holds {', '.join(map(str, found))}; name the folder of one, such as {path}/test."
        )
    return found  # type: ignore[return-value]  # its rows are dictionaries
