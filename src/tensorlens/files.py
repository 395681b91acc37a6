"""How files are written: whole or not at all (`write_whole`), and as JSON that every reader takes.

Three things are written differently: a run appends its sample lines and puts its config in place by a link, which only
one of several processes can make (`studies/runs`); converted weights (`models/conversions`) are a folder that is
renamed.

Python's own JSON writer writes ``NaN`` and ``Infinity``, which are not JSON and which most readers refuse;
here a number that is not finite becomes null.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError, TensorLensError

Content = str | bytes | Callable[[Path], object]
"""A text (written as UTF-8, half a character as its escape), bytes, or a function that fills the file at a path."""


def write_whole(path: Path, content: Content) -> Path:
    """Write a file under a temporary name beside its own, wait until it is on the disk, then put it in place.

    On failure nothing is left behind.

    Raises:
        InputError: it cannot be written there, its folder does not exist, or the name is that of a folder.
    """
    if not path.parent.is_dir():
        raise InputError(f"Expected an existing folder for {str(path)!r}, got none. Create {str(path.parent)!r} first.")
    if path.is_dir():
        raise InputError(f"Expected a file name, got the folder {str(path)!r}. Add a name such as 'map.html'.")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


@contextmanager
def reading(path: Path, by: str) -> Iterator[None]:
    """A context for reading a file of ours: whatever a missing or damaged one raises becomes one error.

    Args:
        path: The file.
        by: What writes such files.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    if not path.is_file():
        raise InputError(f"Expected a file that {by} wrote; {str(path)!r} does not exist.")
    try:
        yield
    except (TensorLensError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"Could not load {path.name!r}: expected a complete file that {by} wrote, got a damaged one "
            f"({type(error).__name__}: {str(error)[:300]}). Save it again."
        ) from error


def write_json(path: Path, value: Any) -> Path:
    """Write `value` as an indented file, whole or not at all."""
    return write_whole(path, to_json(value, indent=1) + "\n")


def to_json(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """The text of `value`, compact unless `indent` is given.

    >>> to_json({"mean": float("nan"), "n": 3})
    '{"mean":null,"n":3}'
    """
    separators = (",", ":") if indent is None else None
    return json.dumps(_finite(value), indent=indent, separators=separators, ensure_ascii=ascii_only, allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """The value of a text that is strict JSON.

    Raises:
        ValueError: it is not; ``NaN`` and ``Infinity`` are refused too.
    """
    return json.loads(text, parse_constant=_refuse)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
