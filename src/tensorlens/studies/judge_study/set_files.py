"""Files of a judge's sets, row by row: what is no row or no item is a problem with its place, the others are used."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError, TensorLensError
from tensorlens.strict_json import from_json
from tensorlens.studies.judge_study.items import Item


def items_of(
    files: Iterable[Path], make: Callable[[str, int, Mapping[str, Any]], Item], limit: int | None
) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """The items of some files, and the problems of rows that are none.

    Args:
        files: Each is one set.
        make: Gives the item of a set's name, the number of a row, and the row.
        limit: Items of each set, at most.
    """
    items: list[Item] = []
    problems: list[str] = []
    for path in files:
        n_before = len(items)
        for row, values in rows_of(path, problems):
            if limit is not None and len(items) - n_before >= limit:
                break
            try:
                items.append(make(path.stem, row, values))
            except TensorLensError as error:
                problems.append(f"{path.name}, row {row}: {error}")
    return tuple(items), tuple(problems)


def rows_of(path: Path, problems: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a file with their numbers, the first row of data being 1; what is no row is a problem."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path.name}: cannot be read as UTF-8 text ({error}).")
        return
    if path.suffix == ".csv":
        try:
            yield from enumerate(csv.DictReader(io.StringIO(text, newline="")), 1)
        except csv.Error as error:
            problems.append(f"{path.name}: no csv from some row on ({error}).")
        return
    for row, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = from_json(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{path.name}, row {row}: no JSON object ({error}).")
            continue
        if isinstance(values, dict):
            yield row, values
        else:
            problems.append(f"{path.name}, row {row}: no JSON object, but {type(values).__name__}.")


def cell_of(cells: Mapping[str, Any], column: str) -> str:
    """The text in a column of a row; anything else is refused."""
    value = cells.get(column)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"Expected text in `{column}`; got {'nothing' if value in (None, '') else repr(value)}.")
    return value.strip()
