"""Records of the inside as files: written by suffix, whole or not at all, and read back or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tensorlens.errors import InputError
from tensorlens.maps.files import replace_file
from tensorlens.strict_json import from_json


def save_record(path: str | Path, contents: Mapping[str, Callable[[], str | bytes]]) -> Path:
    """Write a file, whole or not at all.

    Args:
        path: Its suffix chooses among the contents.
        contents: By suffix, what makes the file's content.
    """
    path = Path(path)
    if path.suffix not in contents:
        raise InputError(f"Expected a name ending in {' or '.join(contents)}; got {path.name!r}.")

    def write(temporary: Path) -> None:
        content = contents[path.suffix]()
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)

    replace_file(path, write)
    return path


def read_document(path: Path, form: str) -> dict[str, Any]:
    """The object in a .json file of one format, without that."""
    document = from_json(path.read_text("utf-8"))
    if document.pop("format") != form:
        raise ValueError("another format")
    return document


@contextmanager
def reading(record: type, form: str, path: Path) -> Iterator[None]:
    """Within the block, whatever a foreign or damaged file provokes becomes one `InputError`."""
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise InputError(
            f"Expected a file that {record.__name__}.save wrote ({form!r}) in {path.name!r}; got one that cannot be "
            f"read ({type(error).__name__}: {error})."
        ) from error
