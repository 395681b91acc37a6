"""`write_whole`: results, reports, tensors and tables of maps are written whole or not at all.

Three things are written differently: a run appends its sample lines and puts its config in place by a link, which only
one of several processes can make (`studies/runs`); converted weights are a folder that is renamed (`models/cache`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from tensorlens.errors import InputError

Content = str | bytes | Callable[[Path], object]
"""A text (written as UTF-8), bytes, or what fills the file of a given path."""


def write_whole(path: Path, content: Content) -> Path:
    """Write a file under a temporary name beside its own, wait until it is on the disk, then put it in place.

    On failure nothing is left behind.

    Raises:
        InputError: its folder does not exist, or the name is that of a folder.
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
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
