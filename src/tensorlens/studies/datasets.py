"""Samples for a study: rows of csv, tsv, jsonl, txt and parquet files, pictures, or what the `datasets` library reads.

What comes out is a list in a fixed order with a fingerprint of its content, so that a run can tell whether it is
continued on the data it began with. Tokens and pixels are the business of the studies. `RowFile` gives the same rows
a part at a time, for data that does not fit into memory.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tensorlens.errors import InputError, missing_extra
from tensorlens.models.plain_text import IMAGE_SUFFIXES
from tensorlens.studies.identity import digest_of

TEXT_COLUMNS = ("text", "review", "sentence", "content", "document", "input", "prompt")
SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt", ".parquet")
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples in a fixed order.

    Attributes:
        kind: Whether `items` are texts or images.
        items: The texts, or the paths of the images.
        names: What each sample is called: a file name, or its place in the file.
        fingerprint: Digest of the content.
    """

    kind: Literal["text", "image"]
    items: tuple[Any, ...]
    names: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.items)


def read_dataset(source: Any, *, column: str | None = None, split: str = "test") -> Dataset:
    """Read samples.

    Args:
        source: A .csv, .tsv, .jsonl, .parquet or .txt file (one text per line), an image or a folder of images, a
            folder that `datasets` wrote, a list of texts or of image paths, rows (dictionaries, such as a
            `datasets.Dataset` gives), or the id of a data set of the `datasets` library (``id:configuration`` where it
            has several).
        column: The column or field with the text; found by its usual names if None.
        split: For a data set by id: which part.
    """
    if not isinstance(source, (str, Path)):
        return _from_list(source, column)
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "state.json").is_file():
        images = sorted(one for one in path.rglob("*") if one.suffix.lower() in IMAGE_SUFFIXES)
        if not images:
            raise InputError(
                f"Expected images ({' '.join(sorted(IMAGE_SUFFIXES))}) in the folder {str(path)!r}, found none. "
                "For texts pass the file itself."
            )
        return _images(images, path)
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return _images([path])
    rows = list(rows_of(source, split))
    if path.suffix.lower() == ".txt":
        rows = [row for row in rows if row["text"].strip()]
    return _from_rows(rows, column, str(source))


def _from_list(source: Any, column: str | None) -> Dataset:
    if not isinstance(source, Iterable):
        raise InputError(f"Expected a path, an id or a list of texts; got {type(source).__name__}. Pass a list.")
    items = list(source)
    if items and all(isinstance(item, Mapping) for item in items):
        return _from_rows(items, column, "the data")
    if items and all(isinstance(item, str) and Path(item).suffix.lower() not in IMAGE_SUFFIXES for item in items):
        return _texts(items)
    if items and all(isinstance(item, (str, Path)) for item in items):
        return _images([Path(item) for item in items])
    kinds = ", ".join(sorted({type(item).__name__ for item in items})) or "an empty list"
    raise InputError(f"Expected a list of texts or of image paths; got {kinds}. Pass at least one of one kind.")


def _from_rows(rows: Sequence[Row], column: str | None, source: str) -> Dataset:
    if not rows:
        raise InputError(f"Expected at least one sample in {source!r}; got none.")
    chosen = text_column(column, list(dict.fromkeys(name for row in rows for name in row)), source)
    return _texts([str(row.get(chosen) or "") for row in rows])


def _texts(texts: Sequence[str]) -> Dataset:
    names = tuple(str(place) for place in range(len(texts)))
    return Dataset(kind="text", items=tuple(texts), names=names, fingerprint=digest_of(texts))


def _images(paths: Sequence[Path], folder: Path | None = None) -> Dataset:
    names = tuple(str(path.relative_to(folder)) if folder else path.name for path in paths)
    return Dataset(kind="image", items=tuple(paths), names=names, fingerprint=digest_of([*names, *map(_ends, paths)]))


def _ends(path: Path) -> str:
    """Size, first and last bytes of a file: enough to tell other data without reading all of them."""
    try:
        with path.open("rb") as file:
            size, first = path.stat().st_size, file.read(2**16)
            file.seek(max(size - 2**16, 0))
            return f"{size} {(first + file.read()).hex()}"
    except OSError:
        return "absent"


# Rows -----------------------------------------------------------------------------------------------------------------


class RowFile:
    """A file or folder of rows, read a part at a time.

    Args:
        path: A file with a suffix in `SUFFIXES`, or a folder that `datasets.Dataset.save_to_disk` wrote.
        column: The column with the text; found by its usual names if None.
    """

    def __init__(self, path: str | Path, column: str | None = None) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise InputError(f"Expected data in a {', '.join(SUFFIXES)} file or a folder of `datasets`; got {path!r}.")
        first = next(iter(rows_of(self.path)), None)
        if first is None:
            raise InputError(f"Expected at least one row in {str(path)!r}; got none.")
        self.column = text_column(column, list(first), str(path))

    @property
    def digest(self) -> str:
        """Digest of names, sizes, first and last bytes."""
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        return digest_of(f"{one.name} {_ends(one)}" for one in files if one.is_file())

    def parts(self, size: int, limit: int | None = None) -> Iterator[list[Row]]:
        """The rows with all their columns, `size` at a time."""
        rows = islice(iter(rows_of(self.path)), limit)
        while some := list(islice(rows, size)):
            yield some


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


def rows_of(source: str | Path, split: str = "test") -> Iterable[Row]:
    """The rows of a file, of a folder that `datasets` wrote, or of a data set by its id, one after the other."""
    path = Path(source).expanduser()
    readers = {".csv": _csv_rows, ".tsv": _csv_rows, ".parquet": _parquet_rows, ".txt": _text_rows}
    if path.is_file():
        reader = readers.get(path.suffix.lower(), _json_rows if path.suffix.startswith(".json") else None)
        if reader is None:
            raise InputError(f"Expected data in a {', '.join(SUFFIXES)} file; got {str(source)!r}.")
        return reader(path)
    if not path.is_dir() and (path.suffix or str(source).count("/") > 1):
        raise InputError(
            f"Expected data in {str(source)!r}, which does not exist. Pass a {', '.join(SUFFIXES)} file, a folder of "
            "images, or the id of a data set."
        )
    return _library_rows(source, split)


def text_lines(path: Path, newline: str = "\n") -> Iterator[str]:
    """Lines that end at line feeds alone, since other separators may stand inside a text."""
    # The encoding passes over the mark that spreadsheets put before the first column's name.
    with path.open(encoding="utf-8-sig", newline=newline) as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise InputError(f"Expected text in UTF-8 in {str(path)!r}; got {error}. Convert the file.") from error


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**27)
    try:
        yield from csv.DictReader(text_lines(path, ""), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    except csv.Error as error:
        raise InputError(f"Expected rows with separators in {str(path)!r}; got: {error}.") from error


def _json_rows(path: Path) -> Iterator[Row]:
    """One row per line; what is not an object is a text."""
    for number, line in enumerate(text_lines(path), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"Expected JSON in {path}, line {number}, one object per line; got: {error}."
                ) from error
            yield row if isinstance(row, dict) else {"text": row}


def _text_rows(path: Path) -> Iterator[Row]:
    return ({"text": line.rstrip("\r\n")} for line in text_lines(path))


def _parquet_rows(path: Path) -> Iterator[Row]:
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


def _library_rows(source: str | Path, split: str) -> Iterable[Row]:
    try:
        from datasets import load_dataset, load_from_disk  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise missing_extra(f"The data set {str(source)!r}", "datasets", "studies") from None
    identifier, _, configuration = str(source).partition(":")
    is_folder = Path(source).expanduser().is_dir()
    try:
        found: Any = (
            load_from_disk(str(source)) if is_folder else load_dataset(identifier, configuration or None, split=split)
        )
    except Exception as error:  # noqa: BLE001  of many kinds: another folder, no such id, no network, no such split
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise InputError(
            f"Expected a file, a folder that `datasets` wrote with `save_to_disk`, or the id of a data set; "
            f"{str(source)!r} could not be loaded: {said}"
        ) from error
    if isinstance(found, dict):
        raise InputError(f"{str(source)!r} holds {', '.join(map(str, found))}; name the folder of one of them.")
    return found
