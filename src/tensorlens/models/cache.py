"""Converted checkpoints, kept so that a conversion happens once.

A finished copy is a folder under `cache_folder()`, named by its content. It appears by one rename, so a reader sees
a whole copy or none. This file does not know what is converted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs
from filelock import FileLock

from tensorlens.errors import LoadError
from tensorlens.models.foreign_files import is_no_room

FORMAT = 1
"""Increase this when converted copies of earlier versions must no longer be read."""


def cache_folder() -> Path:
    """The folder of converted copies: `TENSORLENS_CACHE`, or the platform's place for caches."""
    if chosen := os.environ.get("TENSORLENS_CACHE"):
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("tensorlens", appauthor=False)


def cache_key(name: str, files: Sequence[Path], *, version: str | None = None) -> str:
    """A folder name for what `files` convert to.

    It changes with the content, with transformers, which writes the copy (its reading of a `.gguf` tokenizer changed
    between minor versions), and with `FORMAT`.

    Args:
        name: Begins the key, for people who look into the folder.
        files: The files that are converted, in order.
        version: Version of the package that contains the files; it then stands for their content, which is not read.
    """
    content = version
    if content is None:
        digest = hashlib.sha256()
        for file in files:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        content = digest.hexdigest()[:16]
    slug = re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-.") or "model"
    release = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    return f"{slug[:60]}-{content}-tf{release}-v{FORMAT}"


def convert_once(key: str, make: Callable[[Path], None]) -> Path:
    """The finished copy `key`, made by `make` if it is not there yet.

    Processes that want the same copy at the same time wait for the first. A failure leaves nothing behind.

    Args:
        key: Name of the copy, from `cache_key`.
        make: Writes the copy into the empty folder it is given.

    Raises:
        LoadError: The cache cannot be written.
    """
    done = cache_folder() / key
    if done.is_dir():
        return done
    try:
        done.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(done.with_name(f".{key}.lock")):
            if not done.is_dir():
                work = done.with_name(f".{key}.partial")
                shutil.rmtree(work, ignore_errors=True)  # left by a killed process; we hold the lock
                work.mkdir()
                try:
                    make(work)
                    work.rename(done)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except Exception as error:
        if isinstance(error, LoadError) or not (isinstance(error, OSError) or is_no_room(error)):
            raise
        raise LoadError(
            f"Converted weights are kept in {done.parent}, which is not writable ({error}). "
            "Make room there, or choose another folder with the environment variable TENSORLENS_CACHE."
        ) from error
    return done
