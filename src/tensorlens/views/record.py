"""`MapView`: everything a renderer may draw, as plain data.

The page, the terminal and the figures take this record and nothing else, so that they agree on
what is signed, which limit the colours have, and what the caption says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tensorlens.errors import InputError

_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*")
_NOT_IN_CAPTION = {"grid", "image", "standard_error"}
_FIRST_IN_CAPTION = ("target", "model", "blocks", "heads", "certificate", "rules", "versions")


@dataclass(frozen=True, kw_only=True)
class PatchGrid:
    """Where the patches of an image are among the tokens: row by row, from token `first` on."""

    rows: int
    columns: int
    first: int

    @property
    def n_patches(self) -> int:
        """How many tokens are patches."""
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True, eq=False)
class MapView:
    """What is drawn: numbers, labels and caption lines; no tensor, no model.

    `scores` is (out, in), `bias_share` is (out,) and may be NaN; both are copied as float arrays.
    `image` is a base64 data URI of a PNG, JPEG, GIF or WebP, and needs a `grid`.
    """

    scores: np.ndarray
    out_tokens: tuple[str, ...]
    in_tokens: tuple[str, ...]
    title: str
    bias_share: np.ndarray
    caption: tuple[tuple[str, str], ...] = ()
    grid: PatchGrid | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        """Check that numbers, labels, grid and image fit together."""
        expected = (len(self.out_tokens), len(self.in_tokens))
        if self.scores.shape != expected or self.bias_share.shape != expected[:1]:
            raise InputError(
                f"Expected scores of shape {expected} and bias_share of shape {expected[:1]} to match the labels, "
                f"got {self.scores.shape} and {self.bias_share.shape}. Pass one label for each row and column."
            )
        if self.grid is not None:
            _check_grid(self.grid, expected[1])
        if self.image is not None:
            _check_image(self.image, self.grid)

    @property
    def is_signed(self) -> bool:
        """Whether any score is below zero, which calls for diverging colours."""
        return bool((self.scores < 0).any())

    @property
    def has_one_text(self) -> bool:
        """Whether outputs and inputs are the same tokens, so that one text shows both."""
        return self.out_tokens == self.in_tokens

    @property
    def limit(self) -> float:
        """The largest finite absolute score: where the colours end; 1.0 when there is none above zero."""
        finite = np.abs(self.scores[np.isfinite(self.scores)])
        return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def caption_lines(method: str, meta: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Names and values to print beside a map: the method first, then what is known of its origin."""
    known = [key for key in _FIRST_IN_CAPTION if key in meta]
    others = [key for key in meta if key not in _FIRST_IN_CAPTION and key not in _NOT_IN_CAPTION]
    lines = [("Method", method)]
    for key in known + others:
        text = _plain(meta[key])
        if text:
            lines.append((key.replace("_", " ").capitalize(), text))
    return tuple(lines)


@cache
def palette(name: str, shade: str) -> tuple[str, ...]:
    """The hex stops of the colours called `name` ("signed", "unsigned"), low to high, for a "light" or "dark" page."""
    stops = json.loads((Path(__file__).parent / "static" / "palettes.json").read_text("utf-8"))
    return tuple(stops[name][shade])


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(inner) for inner in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _check_grid(grid: PatchGrid, n_in: int) -> None:
    if min(grid.rows, grid.columns) < 1 or grid.first < 0 or grid.first + grid.n_patches > n_in:
        raise InputError(
            f"Expected a patch grid inside the {n_in} input tokens, got {grid.rows} × {grid.columns} patches "
            f"from token {grid.first}. Pass the rows, columns and first patch token of the image."
        )


def _check_image(image: str, grid: PatchGrid | None) -> None:
    if not _IMAGE.fullmatch(image):
        raise InputError(
            f"Expected an image as a base64 data URI (png, jpeg, gif or webp), got {image[:40]!r}. "
            "Encode the picture as data:image/png;base64,…; addresses are not fetched."
        )
    if grid is None:
        raise InputError("Expected a patch grid with the image, got none. Pass rows, columns and first as well.")
