"""Third-party files, read by other libraries: whatever those raise becomes one error, and sizes are bounded."""

from __future__ import annotations

import errno
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorlens.errors import LoadError, TensorLensError

MOST_JSON_BYTES = 1 << 26
MOST_BLOCKS = 5_000
MOST_LABELS = 1_000_000
MOST_PARAMETERS_A_BYTE = 8
"""One bit per weight, the smallest size in use."""
FEW_PARAMETERS = 1 << 24
"""A checkpoint may lack some weights, such as a head; up to this many are always accepted."""
MOST_UNPACKED = 4
"""How much larger than its file a zipped checkpoint may be; weights hardly compress."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_COUNT = re.compile(r"(^|_)(layers?|blocks?|depths?|experts)$")
_SAID = 400


@contextmanager
def foreign_reader(say: Callable[[str], str]) -> Iterator[None]:
    """A context in which whatever a reader raises on a damaged file, including panics of Rust, becomes a `LoadError`.

    Args:
        say: Makes the message from the reader's error.
    """
    try:
        yield
    except (TensorLensError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if is_no_room(error):  # not the file's fault; `cache` explains it
            raise
        # The error of a refused pickle advises running the code in it: the last thing to do with an untrusted file.
        unsafe = isinstance(error, pickle.UnpicklingError)
        said = "damaged, or with code besides weights" if unsafe else " ".join(str(error).split())
        said = said or type(error).__name__
        short = said if len(said) <= _SAID else f"{said[:_SAID]} …"
        raise LoadError(
            say(short if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {short}")
        ) from error


def is_no_room(error: BaseException) -> bool:
    """Whether a disk is full or read-only; safetensors says so only in its message."""
    return (isinstance(error, OSError) and error.errno in NO_ROOM) or "No space left" in str(error)


def check_config_file(name: str | Path, file: Path) -> dict[str, Any]:
    """The content of a configuration; one that would take forever to build is refused before anything is built.

    Raises:
        LoadError: It is too large, no JSON object, or counts more blocks or labels than any model has.
    """
    if file.stat().st_size > MOST_JSON_BYTES:
        raise LoadError(f"{name}: a {file.name} of at most {MOST_JSON_BYTES >> 20} MB was expected; it is larger.")
    with foreign_reader(lambda said: f"{name}: {file.name} could not be read: {said}"):
        content = json.loads(file.read_text("utf-8"))
    if not isinstance(content, dict):
        raise LoadError(f"{name}: {file.name} could not be read: an object was expected, got {type(content).__name__}.")
    _check_counts(name, file.name, content)
    return content


def _check_counts(name: str | Path, where: str, content: dict[str, Any]) -> None:
    for key, value in content.items():
        if isinstance(value, dict):
            _check_counts(name, where, value)
        most = MOST_BLOCKS if _COUNT.search(key) else MOST_LABELS if key == "num_labels" else None
        counts = value if isinstance(value, list) else [value]
        if most is not None and any(isinstance(count, (int, float)) and count > most for count in counts):
            raise LoadError(f"{name}: {where} asks for {key} = {value}; at most {most} are read. Correct the file.")


def check_proportion(name: str | Path, config: Any, model_class: Any, files: list[Path]) -> None:
    """Refuse a configuration that describes a model far larger than the weights beside it.

    Missing weights are filled in before they can be found missing; for a wrong size this may take all memory.

    Raises:
        LoadError: The model cannot be built, or is far too large.
    """
    import torch

    n_bytes = sum(file.stat().st_size for file in files)
    with foreign_reader(lambda said: f"{name}: no model can be built from its configuration: {said}"):
        with torch.device("meta"):
            model = model_class(config) if not hasattr(model_class, "from_config") else model_class.from_config(config)
        n_parameters = sum(one.numel() for one in (*model.parameters(), *model.buffers()))
    if n_parameters > MOST_PARAMETERS_A_BYTE * n_bytes + FEW_PARAMETERS:
        raise LoadError(
            f"{name}: the configuration describes {n_parameters:.2g} parameters, but the weights have {n_bytes:.2g} "
            "bytes. One of the two belongs to another model, or is damaged."
        )


def check_zip(name: str | Path, file: Path) -> None:
    """Refuse a pickled checkpoint that unpacks to far more than its own size.

    Raises:
        LoadError: It does.
    """
    if not zipfile.is_zipfile(file):
        return
    with (
        foreign_reader(lambda said: f"{name}: {file.name} could not be read: {said}"),
        zipfile.ZipFile(file) as archive,
    ):
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > MOST_UNPACKED * file.stat().st_size + FEW_PARAMETERS:
        raise LoadError(
            f"{name}: {file.name} unpacks to {unpacked:.2g} bytes, far more than weights do, so it is not read."
        )


def check_complete(name: str | Path, model: Any, wrong: Iterable[str]) -> None:
    """Refuse a checkpoint that lacks weights of its model or has unknown ones: missing weights would be random.

    Raises:
        LoadError: Some are named.
    """
    if wrong := sorted(wrong):
        raise LoadError(
            f"{name}: every weight of a {type(model).__name__} was expected, but the checkpoint lacks "
            f"{', '.join(wrong[:4])}{' …' if len(wrong) > 4 else ''} ({len(wrong)} in all) or names them differently; "
            "they would be random. Complete the checkpoint, or pass `tensorlens.Lens` a model that you loaded yourself."
        )
