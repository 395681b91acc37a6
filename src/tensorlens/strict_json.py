"""JSON that every reader takes: a number that is not finite becomes null.

Python's own writer puts ``NaN`` and ``Infinity`` into the text, which JSON does not know and most readers refuse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorlens.files import write_whole


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


def write_text(path: Path, text: str) -> Path:
    """Write a text whole or not at all."""
    return write_whole(path, text)


def write_json(path: Path, value: Any) -> Path:
    """Write `value` as an indented file, whole or not at all."""
    return write_whole(path, to_json(value, indent=1) + "\n")


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
