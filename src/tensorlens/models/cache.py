"""Converted checkpoints, kept so that a conversion happens once.

A finished copy is a folder under `cache_folder()`, named by its content. It appears by one rename, so that a reader
sees a whole copy or none. A list of its files lies in it, so that a copy damaged later is made again instead of read.
Nothing here knows what is being converted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from tensorlens.errors import LoadError
from tensorlens.models.foreign_files import is_no_room
from tensorlens.strict_json import from_json, to_json

FORMAT = 1
"""Raise this when converted copies of earlier versions must not be read any more."""

_WAIT_SECONDS = 1800.0
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_LIST = ".files.json"
_CHUNK = 1 << 24


def cache_folder() -> Path:
    """The folder of converted copies: `TENSORLENS_CACHE`, or the platform's place for caches."""
    if chosen := os.environ.get("TENSORLENS_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tensorlens"


def cache_key(name: str, files: Sequence[Path], *, pinned: bool = False) -> str:
    """A folder name for what `files` convert to.

    It changes with the content, with transformers, which writes the copy (its reading of a `.gguf` tokenizer changed
    between minor versions), and with `FORMAT`.

    Args:
        name: Begins the key, for people who look into the folder.
        files: The files that are converted, in order.
        pinned: The files come from a package of an exact version, so that some of their bytes tell them apart.
            Of other files all bytes count: two may share size, date and most of their content.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size}:0;".encode())
        digest.update(_samples(file, size) if pinned else _whole(file))
    slug = re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-.") or "model"
    release = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    return f"{slug[:60]}-{digest.hexdigest()[:16]}-tf{release}-v{FORMAT}"


def convert_once(key: str, make: Callable[[Path], None]) -> Path:
    """The finished copy `key`, made by `make` if it is not there yet, or no longer as it was written.

    Processes that want the same copy at the same time wait for the first. A failure leaves nothing behind.

    Args:
        key: Name of the copy, from `cache_key`.
        make: Writes the copy into the empty folder it is given.

    Raises:
        LoadError: The cache cannot be written, or another process holds the copy for too long.
    """
    done = cache_folder() / key
    if _is_whole(done):
        return done
    work = done.with_name(f".{key}.partial")
    try:
        done.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(done.with_name(f".{key}.lock"), timeout=_WAIT_SECONDS)
        lock.acquire()
    except Timeout:
        raise LoadError(
            f"Waited {_WAIT_SECONDS / 60:.0f} minutes for another process to convert {key}. If none is running, "
            f"remove {done.with_name(f'.{key}.lock')}, or choose another folder with TENSORLENS_CACHE."
        ) from None
    except OSError as error:
        raise _unwritable(done.parent, error) from error
    try:
        if not _is_whole(done):
            _make(work, done, make)
    finally:
        lock.release()
    return done


def _make(work: Path, done: Path, make: Callable[[Path], None]) -> None:
    # What a killed process left is ours to remove, since we hold the lock.
    try:
        _remove(work)
        work.mkdir()
        make(work)
        (work / _LIST).write_text(to_json({file.name: [_stamp(file), _checksum(file)] for file in _files(work)}))
        if done.is_dir():  # damaged; a file of this name is somebody else's
            _remove(done)
        work.rename(done)
    except Exception as error:
        if isinstance(error, LoadError) or not (isinstance(error, OSError) or is_no_room(error)):
            raise
        raise _unwritable(done.parent, error) from error
    finally:
        _remove(work)


def _is_whole(copy: Path) -> bool:
    """Whether the files of a copy are those it was finished with.

    One whose size and dates are as they were is not read again, which would take seconds for a large model. The date of
    the last change of its entry cannot be set back, as that of its content can.
    """
    try:
        listed = from_json((copy / _LIST).read_text("utf-8"))
        files = {file.name: file for file in _files(copy)}
        return set(files) == set(listed) and all(
            _stamp(file) == listed[name][0]
            or (file.stat().st_size == listed[name][0][0] and _checksum(file) == listed[name][1])
            for name, file in files.items()
        )
    except (OSError, ValueError, TypeError, LookupError, RecursionError):  # no list, no copy, or a damaged one
        return False


def _files(folder: Path) -> list[Path]:
    """What was converted; a desktop may leave hidden files of its own."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _stamp(file: Path) -> list[int]:
    entry = file.stat()
    return [entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns]


def _checksum(file: Path) -> int:
    """Tells damage, not malice: the folder is the user's own."""
    found = 0
    with file.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            found = zlib.crc32(piece, found)
    return found


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, never what a link leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _unwritable(folder: Path, error: BaseException) -> LoadError:
    return LoadError(
        f"Converted weights are kept in {folder}, which cannot be written ({error}). "
        "Make room there, or choose another folder with the environment variable TENSORLENS_CACHE."
    )


def _whole(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _samples(file: Path, size: int) -> bytes:
    """Some bytes from all over the file: two fine-tunings share size and head, but not everything between."""
    step = max(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for start in range(0, size, step):
            stream.seek(start)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()
