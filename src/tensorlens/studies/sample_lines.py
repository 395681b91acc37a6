"""The lines of `samples.jsonl`: one record per sample, appended so that a kill costs no line but the last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorlens.strict_json import from_json, to_json

Record = dict[str, Any]
"""What was measured on one sample, with its `index`."""


class Appender:
    """A file of lines, on the disk before the next are measured: after a kill at most the last one is cut short.

    Args:
        path: The file; a line that was cut short is dropped from its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None

    def __enter__(self) -> Callable[[Sequence[Record]], None]:
        _drop_cut_line(self.path)
        # Without a buffer: what a full disk refused would be tried once more on closing.
        self.file = self.path.open("ab", buffering=0)
        return self.write

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def write(self, records: Sequence[Record]) -> None:
        """Append records, and wait until they are on the disk."""
        left = "".join(map(as_line, records)).encode()
        try:
            while left:  # without a buffer a write may take a part only
                left = left[self.file.write(left) :]
            os.fsync(self.file.fileno())
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise


def as_line(record: Record) -> str:
    """A record as it stands in the file."""
    return to_json(record, ascii_only=True) + "\n"


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers; one without its end was cut short and never counted."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:  # another process has joined it into samples.jsonl meanwhile
        return
    yield from enumerate(text.split(b"\n")[:-1], 1)


def read_record(line: bytes, n_samples: int | None) -> Record:
    """The record of a line.

    Raises:
        ValueError: it is no record, or of another run.
    """
    try:
        record = from_json(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got {_beginning(line)} ({error})") from None
    index = record.get("index") if isinstance(record, dict) else None
    if type(index) is not int:
        raise ValueError(f"expected an object with a whole number as `index`, got {_beginning(line)}")
    if index < 0 or n_samples is not None and index >= n_samples:
        raise ValueError(f"the index {index} is none of the run's {n_samples} samples")
    return record


def _beginning(line: bytes) -> str:
    text = repr(line[:40].decode("utf-8", "replace"))
    return text if len(line) <= 40 else f"{text}…"


def _drop_cut_line(path: Path) -> None:
    if path.is_file():
        text = path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(path, whole)
