"""Files of a judge's sets, row by row: what is no row is a problem with its place, and the others are used."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError
from tensorlens.strict_json import from_json


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
