"""Samples for a study: texts from csv, jsonl or txt files, images from a folder, or the `datasets` library.

What comes out is a list in a fixed order with a fingerprint of its content, so that a run can tell whether it is
continued on the data it began with. Tokens and pixels are the business of the studies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tensorlens.errors import InputError, missing_extra
from tensorlens.models.plain_text import IMAGE_SUFFIXES
from tensorlens.studies.digests import digest_of
from tensorlens.studies.row_files import csv_rows, jsonl_rows, parsed, text_column, text_lines, txt_rows

LABEL_COLUMNS = ("label", "sentiment", "class", "target")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples in a fixed order.

    Attributes:
        kind: Whether `items` are texts or images.
        items: The texts, or the paths of the images.
        names: What each sample is called: a file name, or its place in the file.
        labels: The label of each sample, where the data has them.
        fingerprint: Digest of the content.
    """

    kind: Literal["text", "image"]
    items: tuple[Any, ...]
    names: tuple[str, ...]
    fingerprint: str
    labels: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.items)


def read_dataset(source: Any, *, column: str | None = None, split: str = "test") -> Dataset:
    """Read samples.

    Args:
        source: A .csv, .jsonl or .txt file (one text per line), a folder of images, a list of texts or of image paths,
            rows (dictionaries, such as a `datasets.Dataset` gives), or the id of a data set of the `datasets` library
            (``id:configuration`` where it has several).
        column: The column or field with the text; found by its usual names if None.
        split: For a data set by id: which part.
    """
    if not isinstance(source, (str, Path)):
        if not isinstance(source, Iterable):
            raise InputError(f"Expected a path, an id or a list of texts; got {type(source).__name__}. Pass a list.")
        items = list(source)
        is_table = bool(items) and all(isinstance(item, Mapping) for item in items)
        return _from_rows([dict(row) for row in items], column, "the data") if is_table else _from_list(items)
    path = Path(source)
    if path.is_dir():
        return _from_folder(path)
    readers = {".csv": csv_rows, ".tsv": csv_rows, ".jsonl": _json_rows, ".json": _json_rows}
    if path.is_file() and path.suffix.lower() in readers:
        return _from_rows(list(readers[path.suffix.lower()](path)), column, str(path))
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return _images([path])
    if path.is_file():
        return _texts([row["text"] for row in txt_rows(path) if row["text"].strip()], None)
    if path.suffix or str(source).count("/") > 1:
        raise InputError(
            f"Expected data in {str(source)!r}, which does not exist. Pass a .csv, .jsonl or .txt file, a folder of "
            "images, or the id of a data set."
        )
    return _from_library(str(source), split, column)


def _from_list(items: Sequence[Any]) -> Dataset:
    if items and all(isinstance(item, str) and Path(item).suffix.lower() not in IMAGE_SUFFIXES for item in items):
        return _texts(items, None)
    if items and all(isinstance(item, (str, Path)) for item in items):
        return _images([Path(item) for item in items])
    kinds = ", ".join(sorted({type(item).__name__ for item in items})) or "an empty list"
    raise InputError(f"Expected a list of texts or of image paths; got {kinds}. Pass at least one of one kind.")


def _from_folder(folder: Path) -> Dataset:
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not images:
        raise InputError(
            f"Expected images ({' '.join(sorted(IMAGE_SUFFIXES))}) in the folder {str(folder)!r}, found none. "
            "For texts pass the file itself."
        )
    return _images(images, folder)


def _images(paths: Sequence[Path], folder: Path | None = None) -> Dataset:
    names = tuple(str(path.relative_to(folder)) if folder else path.name for path in paths)
    return Dataset(kind="image", items=tuple(paths), names=names, fingerprint=digest_of([*names, *map(_ends, paths)]))


def _ends(path: Path) -> str:
    """Size, first and last bytes of a file: enough to tell another picture."""
    try:
        with path.open("rb") as file:
            size, first = path.stat().st_size, file.read(2**16)
            file.seek(max(size - 2**16, 0))
            return f"{size} {(first + file.read()).hex()}"
    except OSError:
        return "absent"


def _texts(texts: Sequence[str], labels: Sequence[str] | None) -> Dataset:
    return Dataset(
        kind="text",
        items=tuple(texts),
        names=tuple(str(place) for place in range(len(texts))),
        fingerprint=digest_of(texts),
        labels=None if labels is None else tuple(labels),
    )


def _json_rows(path: Path) -> Iterable[dict[str, Any]]:
    """Of one list, or of one value per line."""
    lines = text_lines(path)
    if not next((line for line in lines if line.strip()), "").lstrip().startswith("["):
        return jsonl_rows(path)
    rows = parsed("".join(text_lines(path)), str(path))
    return [row if isinstance(row, dict) else {"text": row} for row in rows]


def _from_rows(rows: list[dict[str, Any]], column: str | None, source: str) -> Dataset:
    if not rows:
        raise InputError(f"Expected at least one sample in {source!r}; got none.")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    chosen = text_column(column, columns, source)
    label = next((name for name in LABEL_COLUMNS if name in columns and name != chosen), None)
    return _texts([str(row.get(chosen) or "") for row in rows], label and [str(row.get(label)) for row in rows])


def _from_library(name: str, split: str, column: str | None) -> Dataset:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise missing_extra(f"The data set {name!r} by its id", "datasets", "studies") from None
    identifier, _, configuration = name.partition(":")
    try:
        rows = load_dataset(identifier, configuration or None, split=split)
    except Exception as error:  # noqa: BLE001  of many kinds: no such id, no network, no such split
        raise InputError(
            f"Expected a file, a folder or the id of a data set; {name!r} is no file or folder here, and as an id it "
            f"could not be loaded: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return _from_rows([dict(row) for row in rows], column, name)
