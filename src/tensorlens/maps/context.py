"""`Context`: what a map should say of where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorlens.maps.targets import Classes


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a map should say of where it came from, and how classes are called.

    Attributes:
        tokens: A label for each input token.
        classes: Names of the classes, or None for a model without a head.
        meta: Model, versions and picture, for the map's `meta`.
        out_tokens: A label for each output, if they are not those of the inputs.
    """

    tokens: tuple[str, ...]
    classes: Classes | None
    meta: dict[str, Any]
    out_tokens: tuple[str, ...] | None = None
