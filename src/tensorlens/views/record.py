"""`MapView`: everything a renderer may draw, as plain data.

The page, the terminal and the figures take this record and nothing else, so that they agree on what is signed, what is
set aside and what the caption says. `limit` is where colours end in terminal and figures; a page finds its own, for
the rows that are shown (`static/scores.js`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tensorlens.errors import InputError
from tensorlens.views.answer_text import AnswerText
from tensorlens.views.placed_pictures import IMAGE


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

    `scores` is (out, in), `bias_share` is (out,) and may be NaN; both hold floats.
    `caption` holds names and values for the whole map, `row_caption` names with one value for each output.
    `out_positions` says which tokens of the text the outputs are, where they are not simply all of them.
    `image` is a base64 data URI of a PNG, JPEG, GIF or WebP, and needs a `grid`.
    `signed` says whether the method's scores may be below zero; None leaves it to the scores.
    `set_aside` holds the inputs that take no part in the colours, `words` the label, first token and end of each
    word where they are fewer than the tokens, `sums` one sentence for each output on what its row sums to.
    `answer` holds prompt and answer as text, for a map of an answer. `sink` is the contribution of a held attention
    sink to each output, beside the inputs. `axes` names what rows and columns are.
    """

    scores: np.ndarray
    out_tokens: tuple[str, ...]
    in_tokens: tuple[str, ...]
    title: str
    bias_share: np.ndarray
    caption: tuple[tuple[str, str], ...] = ()
    row_caption: tuple[tuple[str, tuple[str, ...]], ...] = ()
    grid: PatchGrid | None = None
    image: str | None = None
    out_positions: tuple[int, ...] | None = None
    signed: bool | None = None
    set_aside: tuple[int, ...] = ()
    words: tuple[tuple[str, int, int], ...] = ()
    sums: tuple[str, ...] = ()
    answer: AnswerText | None = None
    sink: tuple[float, ...] = ()
    axes: tuple[str, str] = ("output", "input")

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
        """Whether scores may be below zero, which calls for diverging colours."""
        return bool((self.scores < 0).any()) if self.signed is None else self.signed

    @property
    def has_one_text(self) -> bool:
        """Whether outputs and inputs are the same tokens, so that one text shows both."""
        return self.out_tokens == self.in_tokens

    @property
    def limit(self) -> float:
        """The largest finite absolute score in the colours: where they end; 1.0 when there is none above zero."""
        return limit_of(self.coloured)

    @property
    def aside(self) -> tuple[int, ...]:
        """The inputs outside the colours: those set aside, or what is not a patch of a picture (class, registers)."""
        if self.grid is None or self.set_aside:
            return self.set_aside
        patches = range(self.grid.first, self.grid.first + self.grid.n_patches)
        return tuple(j for j in range(len(self.in_tokens)) if j not in patches)

    @property
    def coloured(self) -> np.ndarray:
        """The scores with NaN for the inputs outside the colours."""
        if not self.aside:
            return self.scores
        scores = self.scores.copy()
        scores[:, list(self.aside)] = np.nan
        return scores

    @property
    def heading(self) -> str:
        """Method, model and target in one line, for pictures that travel without their caption."""
        one_row = {name: values[0] for name, values in self.row_caption if len(values) == 1}
        known = dict(self.caption) | one_row
        return "  ·  ".join([self.title, *(known[name] for name in ("Model", "Target") if name in known)])

    def position(self, out_token: int) -> int:
        """Where output `out_token` stands in the text."""
        return out_token if self.out_positions is None else self.out_positions[out_token]


def limit_of(scores: np.ndarray) -> float:
    """The largest finite absolute score, or 1.0 when there is none above zero."""
    finite = np.abs(scores[np.isfinite(scores)])
    return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def by_strength(row: np.ndarray) -> list[int]:
    """The inputs of one row, the largest scores by size first and NaN last."""
    return np.argsort(-np.nan_to_num(np.abs(row), nan=-1.0), kind="stable").tolist()


@cache
def palette(name: str, shade: str) -> tuple[str, ...]:
    """The hex stops of the colours called `name` ("signed", "unsigned"), low to high, for a "light" or "dark" page."""
    stops = json.loads((Path(__file__).parent / "static" / "palettes.json").read_text("utf-8"))
    return tuple(stops[name][shade])


def _check_grid(grid: PatchGrid, n_in: int) -> None:
    if min(grid.rows, grid.columns) < 1 or grid.first < 0 or grid.first + grid.n_patches > n_in:
        raise InputError(
            f"Expected a patch grid inside the {n_in} input tokens, got {grid.rows} × {grid.columns} patches "
            f"from token {grid.first}. Pass the rows, columns and first patch token of the image."
        )


def _check_image(image: str, grid: PatchGrid | None) -> None:
    if not IMAGE.fullmatch(image):
        raise InputError(
            f"Expected an image as a base64 data URI (png, jpeg, gif or webp), got {image[:40]!r}. "
            "Encode the picture as data:image/png;base64,…; addresses are not fetched."
        )
    if grid is None:
        raise InputError("Expected a patch grid with the image, got none. Pass rows, columns and first as well.")
