"""Samples for a study: rows of csv, tsv, jsonl, txt and parquet files, pictures, or data of the `datasets` library.

The result is a list in a fixed order with a fingerprint of its content, so a run can tell whether the data changed.
Tokens and pixels are left to the studies. `RowFile` gives the same rows one after the other, for data that does not
fit into memory.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tensorlens.errors import InputError, missing_extra
from tensorlens.models.texts import IMAGE_SUFFIXES
from tensorlens.studies.runs import digest_of

TEXT_COLUMNS = ("text", "review", "sentence", "content", "document", "input", "prompt")
LABEL_COLUMNS = ("label", "sentiment", "labels", "class", "category")
IMAGE_COLUMNS = ("image", "img", "picture")
SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt", ".raw", ".tokens", ".parquet")
SPLITS = {"test": ("test", "val", "validation"), "train": ("train",)}
"""Names of the folder of each part."""
NO_CLASS = ("unsup",)
"""Folders of reviews without a label, in IMDB's archive."""
SYNSET = re.compile(r"n\d{8}(?=_)")
"""The beginning of the names of ImageNet's training pictures."""
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples in a fixed order.

    Attributes:
        kind: Whether `items` are texts or images.
        items: The texts, or the images: paths, or what a row holds.
        names: The name of each sample: a file name, or its place in the file.
        labels: The label of each sample, if known.
        columns: The other columns of each sample's row, as plain values.
        fingerprint: Digest of the content.
    """

    kind: Literal["text", "image"]
    items: tuple[Any, ...]
    names: tuple[str, ...]
    fingerprint: str
    labels: tuple[Any, ...] | None = None
    columns: tuple[Row, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def select(self, places: Sequence[int]) -> Dataset:
        """Some of the samples."""
        fields = {name: getattr(self, name) for name in ("items", "names", "labels", "columns")}
        parts: dict[str, Any] = {name: tuple(one[k] for k in places) for name, one in fields.items() if one}
        return replace(self, fingerprint=f"{self.fingerprint} {len(places)} {places[:3]}", **parts)


def read_dataset(source: Any, *, column: str | None = None, label: str | None = None, split: str = "test") -> Dataset:
    """Read samples.

    Args:
        source: A .csv, .tsv, .jsonl, .parquet or .txt file (one text per line), an image, a folder of images or of
            texts, by class or not, a folder that `datasets` wrote, a folder of one of these for each part (train,
            test), a list of texts or of image paths, rows (dictionaries, such as a `datasets.Dataset` gives), or the
            id of a data set of the `datasets` library (``id:configuration`` where it has several).
        column: The column or field with the text or image; found by its usual names if None.
        label: The column or field with the label; found by its usual names if None.
        split: Which part of data that have several.
    """
    if not isinstance(source, (str, Path)):
        return _from_list(source, column, label)
    path = Path(source).expanduser()
    if path.is_dir() and not _is_saved(path):
        return _from_folder(_part(path, split), column, label, split)
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return _from_files("image", [path])
    found = rows_of(source, split)
    if set(IMAGE_COLUMNS) & set(getattr(found, "column_names", ())):
        return _from_library(found, column, label)
    is_text = path.suffix.lower() in (".txt", ".raw", ".tokens")
    return _from_rows([row for row in found if not is_text or row["text"].strip()], column, label, str(source))


def _from_list(source: Any, column: str | None, label: str | None) -> Dataset:
    if not isinstance(source, Iterable):
        raise InputError(f"Expected a path, an id or a list of texts; got {type(source).__name__}. Pass a list.")
    items = list(source)
    if items and all(isinstance(item, Mapping) for item in items):
        return _from_rows(items, column, label, "the data")
    if items and all(isinstance(item, str) and Path(item).suffix.lower() not in IMAGE_SUFFIXES for item in items):
        return _from_rows([{"text": item} for item in items], None, None, "the data")
    if items and all(isinstance(item, (str, Path)) for item in items):
        return _from_files("image", [Path(item) for item in items])
    kinds = ", ".join(sorted({type(item).__name__ for item in items})) or "an empty list"
    raise InputError(f"Expected a list of texts or of image paths; got {kinds}. Pass at least one of one kind.")


def _from_rows(rows: Sequence[Row], column: str | None, label: str | None, source: str) -> Dataset:
    if not rows:
        raise InputError(f"Expected at least one sample in {source!r}; got none.")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    picture = _first(IMAGE_COLUMNS, columns) if column is None and not _first(TEXT_COLUMNS, columns) else None
    chosen = picture or text_column(column, columns, source)
    if label is not None and label not in columns:
        raise InputError(f"Expected a column {label} in {source!r}; got {', '.join(columns)}. Name the label's column.")
    labelled = label or _first(LABEL_COLUMNS, columns)
    items = [_picture(row.get(chosen)) if picture else str(row.get(chosen) or "") for row in rows]
    plain = (str, int, float, bool)
    return Dataset(
        kind="image" if picture else "text",
        items=tuple(items),
        names=tuple(map(str, range(len(rows)))),
        labels=None if labelled is None else tuple(_number(row.get(labelled)) for row in rows),
        columns=tuple(
            {name: value for name, value in row.items() if name not in (chosen, labelled) and isinstance(value, plain)}
            for row in rows
        ),
        fingerprint=digest_of(map(_image_digest, items) if picture else items),
    )


def _first(names: Iterable[str], columns: Iterable[Any]) -> str | None:
    return next((name for name in names if name in columns), None)


def _number(label: Any) -> Any:
    """A label that is a number, which csv files hold as text."""
    return int(label) if isinstance(label, str) and label.strip().isdecimal() else label


def _picture(value: Any) -> Any:
    """An image as a row holds it: decoded, or as bytes or a path in a dictionary."""
    if not isinstance(value, Mapping):
        return value
    if value.get("bytes") is None:
        return Path(str(value.get("path")))
    from PIL import Image

    return Image.open(io.BytesIO(value["bytes"]))


def _image_digest(image: Any) -> str:
    return _ends(image) if isinstance(image, Path) else digest_of([image.convert("RGB").resize((32, 32)).tobytes()])


@dataclass(frozen=True)
class LazyImage:
    """An image in a data set of the `datasets` library, decoded when it is asked for."""

    rows: Any
    index: int
    column: str

    def load(self) -> Any:
        """The image itself."""
        return self.rows[self.index][self.column]


def _from_library(rows: Any, column: str | None, label: str | None) -> Dataset:
    """Images of a data set of the library, none of them decoded."""
    chosen = column or _first(IMAGE_COLUMNS, rows.column_names) or ""
    labelled = label or _first(LABEL_COLUMNS, rows.column_names)
    return Dataset(
        kind="image",
        items=tuple(LazyImage(rows, index, chosen) for index in range(len(rows))),
        names=tuple(map(str, range(len(rows)))),
        labels=None if labelled is None else tuple(rows[labelled]),
        fingerprint=digest_of([str(rows._fingerprint), str(len(rows))]),
    )


# Folders --------------------------------------------------------------------------------------------------------------


def _is_saved(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _part(path: Path, split: str) -> Path:
    """The folder of one part, or the folder itself if it has no parts."""
    return next((path / name for name in SPLITS.get(split, (split,)) if (path / name).is_dir()), path)


def _from_folder(path: Path, column: str | None, label: str | None, split: str) -> Dataset:
    if _is_saved(path):
        return read_dataset(path, column=column, label=label, split=split)
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    classes = [one for one in sorted(path.iterdir()) if one.is_dir() and one.name not in NO_CLASS]
    kind, chosen = "image", [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    if not chosen:
        kind, chosen = "text", [file for file in files if file.suffix == ".txt" and file.parent in classes]
    if chosen:
        empty = next((one.name for one in classes if not any(one in file.parents for file in chosen)), None)
        if empty is not None:
            raise InputError(
                f"The class folder {empty!r} in {str(path)!r} contains no {kind}. Fill it, or remove it to use the "
                f"other classes."
            )
        return _from_files(kind, chosen, path)
    tables = [file for file in files if file.suffix.lower() in SUFFIXES]
    tables = [file for file in tables if re.search(rf"(^|[._-]){split}([._-]|$)", file.name)] or tables
    if not tables or len(tables) > 1 and {file.suffix for file in tables} != {".parquet"}:
        raise InputError(
            f"Expected images ({' '.join(sorted(IMAGE_SUFFIXES))}), folders of texts by class, or one file of rows in "
            f"the folder {str(path)!r}, found {'several files' if tables else 'none'}. For texts pass the file itself."
        )
    return _from_rows([row for file in tables for row in rows_of(file)], column, label, str(path))


def _from_files(kind: Literal["text", "image"], paths: Sequence[Path], folder: Path | None = None) -> Dataset:
    """A file for each sample; its label is the folder that it is in, or a picture's own name of its class."""
    names = [str(path.relative_to(folder)) if folder else path.name for path in paths]
    labels: list[Any] = [path.parent.name if folder and path.parent != folder else None for path in paths]
    if not any(labels) and kind == "image":
        labels = [found and found.group() for found in map(SYNSET.match, (path.name for path in paths))]
    items: list[Any] = list(paths) if kind == "image" else ["".join(text_lines(path)) for path in paths]
    return Dataset(
        kind=kind,
        items=tuple(items),
        names=tuple(names),
        labels=tuple(labels) if all(labels) else None,
        fingerprint=digest_of([*names, *map(_ends, paths)] if kind == "image" else items),
    )


def _ends(path: Path) -> str:
    """Size, first and last bytes of a file: enough to detect different data without reading all of it."""
    try:
        with path.open("rb") as file:
            size, first = path.stat().st_size, file.read(2**16)
            file.seek(max(size - 2**16, 0))
            return f"{size} {(first + file.read()).hex()}"
    except OSError:
        return "absent"


# Rows -----------------------------------------------------------------------------------------------------------------


class RowFile:
    """The rows of a file or folder, with all their columns, read one after the other.

    Args:
        path: A file with a suffix in `SUFFIXES`, or a folder that `datasets.Dataset.save_to_disk` wrote.
        column: The column with the text; found by its usual names if None.
    """

    def __init__(self, path: str | Path, column: str | None = None) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise InputError(
                f"The file {str(path)!r} does not exist. Pass a {', '.join(SUFFIXES)} file, or a folder of `datasets`."
            )
        first = next(iter(self), None)
        if first is None:
            raise InputError(f"Expected at least one row in {str(path)!r}; got none.")
        self.column = text_column(column, list(first), str(path))

    def __iter__(self) -> Iterator[Row]:
        return iter(rows_of(self.path))

    @property
    def digest(self) -> str:
        """Digest of names, sizes, first and last bytes."""
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        return digest_of(f"{one.name} {_ends(one)}" for one in files if one.is_file())


def text_column(asked: str | None, columns: Sequence[Any], source: str) -> str:
    """The column with the text: the one asked for, or one with a usual name."""
    chosen = asked or _first(TEXT_COLUMNS, columns)
    if chosen is None or chosen not in columns:
        raise InputError(
            f"Expected a column {chosen or 'called ' + ' or '.join(TEXT_COLUMNS)} in {source!r}; got "
            f"{', '.join(map(str, columns))}. Name the column with the text: column=… (--column)."
        )
    return chosen


def rows_of(source: str | Path, split: str = "test") -> Iterable[Row]:
    """The rows of a file, of a folder that `datasets` wrote, or of a data set by its id, one after the other."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES and not path.suffix.startswith(".json"):
            raise InputError(f"Expected data in a {', '.join(SUFFIXES)} file; got {str(source)!r}.")
        return _file_rows(path, path.suffix.lower())
    if not path.is_dir() and (path.suffix or str(source).count("/") > 1):
        raise InputError(
            f"Expected data in {str(source)!r}, which does not exist. Pass a {', '.join(SUFFIXES)} file, a folder of "
            "images, or the id of a data set."
        )
    return _library_rows(source, split)


def _file_rows(path: Path, suffix: str) -> Iterator[Row]:
    if suffix == ".parquet":
        yield from _parquet_rows(path)
    elif suffix in (".csv", ".tsv"):
        csv.field_size_limit(2**27)
        try:
            yield from csv.DictReader(text_lines(path, ""), delimiter="\t" if suffix == ".tsv" else ",")
        except csv.Error as error:
            raise InputError(f"Expected rows with separators in {str(path)!r}; got: {error}.") from error
    elif suffix.startswith(".json"):
        yield from _json_rows(path)
    else:
        yield from ({"text": line.rstrip("\r\n")} for line in text_lines(path))


def text_lines(path: Path, newline: str = "\n") -> Iterator[str]:
    """Lines that end at line feeds alone, since other separators may stand inside a text."""
    # The encoding passes over the mark that spreadsheets put before the first column's name.
    with path.open(encoding="utf-8-sig", newline=newline) as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise InputError(f"Expected text in UTF-8 in {str(path)!r}; got {error}. Convert the file.") from error


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
            if isinstance(row, list):
                raise InputError(
                    f"Expected one object per line in {path}; got a list. Write a line for each of its items."
                )
            yield row if isinstance(row, dict) else {"text": row}


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
        raise InputError(
            f"Expected a .parquet file in {str(path)!r}, which could not be read: {str(error).rstrip('.')}."
        ) from error


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
        part = next((found[name] for name in SPLITS.get(split, (split,)) if name in found), None)
        if part is None:
            raise InputError(f"{str(source)!r} has {', '.join(map(str, found))}; expected a split called {split}.")
        return part
    return found
