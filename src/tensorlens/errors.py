"""Everything that can go wrong, by kind.

Each message has three parts: what was expected, what was given, what to do next. Raise the most
specific class; callers who do not care catch `TensorLensError`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any

from tensorlens.__about__ import __version__


class TensorLensError(Exception):
    """Base of every error this package raises on purpose."""


class LoadError(TensorLensError):
    """A model, tokenizer or processor could not be found or read."""


class MissingExtraError(LoadError, ImportError):
    """A feature needs a package that is not installed; the message contains the install line."""


class InputError(TensorLensError, ValueError):
    """An argument of a lens, an operator or a map does not fit."""


class AnatomyError(TensorLensError):
    """The blocks, the heads or the output head of a model could not be found."""


class NotLinearError(TensorLensError):
    """An operation is not linear and no rule replaces it, so no exact linear operator exists."""


class SizeError(TensorLensError, MemoryError):
    """A result would not fit into memory."""


class MethodError(TensorLensError, ValueError):
    """A method is unknown, or does not apply to this model."""


LARGE = 2**31 - 1


def check_whole(value: Any, name: str, least: int = 0, most: int = LARGE) -> int:
    """An integer (NumPy integers included, bools excluded) within bounds."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        bounds = f"of at least {least}" if most == LARGE else f"from {least} to {most}"
        raise InputError(f"`{name}` must be a whole number {bounds}; got {value!r:.60}.")
    return int(value)


def check_seed(value: Any) -> int:
    """A seed of torch's generators."""
    return check_whole(value, "seed", -(2**63), 2**63 - 1)


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of the allowed words."""
    if value not in choices:
        either = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
        raise InputError(f"`{name}` must be {either}; got {value!r:.60}.")


def check_iterable(value: Any, name: str, expected: str) -> list[Any]:
    """The items of a list or similar."""
    is_single = isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) == 0
    if is_single or not isinstance(value, Iterable):
        raise InputError(f"`{name}` must be a list of {expected}; got {value!r:.60}.")
    return list(value)


def check_path(value: Any) -> Path:
    """The path of a file."""
    if not isinstance(value, (str, PathLike)) or "\0" in str(value):
        raise InputError(f"Expected the path of a file or folder, as text or a `Path`; got {value!r:.60}.")
    return Path(value)


def check_lens(value: Any) -> None:
    """Refuse anything but a lens."""
    if not hasattr(value, "specimen"):
        raise InputError(f"Expected a lens; got {type(value).__name__}. Make one: `tensorlens.Lens(model, tokenizer)`.")


def words(text: str) -> frozenset[str]:
    """Names, from a text with spaces between them."""
    return frozenset(text.split())


def missing_extra(feature: str, package: str, extra: str) -> MissingExtraError:
    """The error for `feature` when `package`, part of the optional `extra`, is absent."""
    return MissingExtraError(
        f"{feature} needs the package `{package}`, which is not installed. Install it with: {install_line(extra)}"
    )


def install_line(extra: str) -> str:
    """The install command for an extra: by the package's name, which is not on PyPI yet, and one that works today."""
    name = f"attention_tensorlens-{__version__}-py3-none-any.whl[{extra}]"
    root = Path(__file__).parents[2]
    is_clone = (root / "constraints.txt").is_file()
    today = f'-c "{root / "constraints.txt"}" -e "{root}[{extra}]"' if is_clone else f'"{name}"'
    return (
        f'pip install "attention-tensorlens[{extra}]" (not published yet: install from the wheel or the clone, '
        f"here: {pip()} install {today})"
    )


def pip() -> str:
    """The pip of this environment as a command: in one that is not activated, plain ``pip`` is that of another."""
    found = shutil.which("pip")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    return "pip" if is_ours else f"{sys.executable} -m pip"
