"""`MapView`: everything a renderer may draw, as plain data; `AnswerText` and `PlacedPicture` are parts of it.

The page, the terminal and the figures take only this record, so they agree on which maps are signed, which inputs are
set aside and on the caption. `limit` is the end of the colour scale in terminal and figures; a page finds its own, for
the rows that are shown (`static/scores.js`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from tensorlens.errors import InputError


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
    """The data of a drawing: numbers, labels and caption lines; no tensor, no model.

    `scores` is (out, in), `bias_share` is (out,) and may be NaN; both hold floats.
    `caption` holds names and values for the whole map, `row_caption` names with one value for each output.
    `out_positions` holds the tokens of the text that the outputs are, if these are not simply all tokens.
    `image` is a base64 data URI of a PNG, JPEG, GIF or WebP, and needs a `grid`.
    `signed` says whether the method's scores may be below zero; None leaves it to the scores.
    `set_aside` holds the inputs outside the colour scale, `words` the label, first token and end of each
    word if there are fewer words than tokens, `sums` one sentence per output on the sum of its row.
    `answer` holds prompt and answer as text, for a map of an answer. `sink` is the contribution of a held attention
    sink to each output, beside the inputs. `axes` names rows and columns.
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
    def limit(self) -> float:
        """The end of the colour scale: the largest finite absolute score in it; 1.0 if none is above zero."""
        return limit_of(self.coloured)

    @property
    def aside(self) -> tuple[int, ...]:
        """The inputs outside the colour scale: those set aside, or tokens that are not patches (class, registers)."""
        if self.grid is None or self.set_aside:
            return self.set_aside
        patches = range(self.grid.first, self.grid.first + self.grid.n_patches)
        return tuple(j for j in range(len(self.in_tokens)) if j not in patches)

    @property
    def coloured(self) -> np.ndarray:
        """The scores, with NaN for the inputs outside the colour scale."""
        if not self.aside:
            return self.scores
        scores = self.scores.copy()
        scores[:, list(self.aside)] = np.nan
        return scores

    @property
    def heading(self) -> str:
        """Title, model and target in one line, for pictures that travel without their caption."""
        one_row = {name: values[0] for name, values in self.row_caption if len(values) == 1}
        known = dict(self.caption) | one_row
        names = ("Model",) if self.title.startswith("Why ") else ("Model", "Target")  # a question names its target
        return "  ·  ".join([self.title, *(known[name] for name in names if name in known)])

    def position(self, out_token: int) -> int:
        """The place of output `out_token` in the text."""
        return out_token if self.out_positions is None else self.out_positions[out_token]


def limit_of(scores: np.ndarray) -> float:
    """The largest finite absolute score, or 1.0 when there is none above zero."""
    finite = np.abs(scores[np.isfinite(scores)])
    return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def by_strength(row: np.ndarray) -> list[int]:
    """The inputs of one row, by descending size of their scores, NaN last."""
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


# Pictures -------------------------------------------------------------------------------------------------------------

_DATA_URI = r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*"
IMAGE = re.compile(_DATA_URI)
"""The image sources that a page may show: pictures inside the page, never an address."""

Part = Annotated[float, Meta(ge=0, le=1.0001)]
Place = tuple[Annotated[int, Meta(ge=0)], Part, Part, Part, Part]


def checked(value: Any, kind: Any) -> Any:
    """The value if it is of this kind; None otherwise, since files may come from anywhere."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError):
        return None


@dataclass(frozen=True, kw_only=True)
class PlacedPicture:
    """A picture that a map is laid over.

    Attributes:
        image: A data URI, or None.
        places: For each part the number of its input, then left, top, right and bottom as parts of width and height.
    """

    image: Annotated[str, Meta(pattern=f"^{_DATA_URI}$")] | None
    places: tuple[Place, ...]


def placed_pictures(value: Any, n_inputs: int) -> tuple[PlacedPicture, ...]:
    """Pictures from the `meta` of a map; none if any part is damaged."""
    found = checked(value, tuple[PlacedPicture, ...]) or ()
    return found if all(place[0] < n_inputs for one in found for place in one.places) else ()


# Prompt and answer as running text, cut where the inputs and outputs of a map begin and end ---------------------------

Spans = Sequence[tuple[int, int] | None]

_LARGEST = 1e300
"""Larger than any target; a number in a file may be larger still, even larger than a float can be."""


@dataclass(frozen=True, kw_only=True)
class AnswerText:
    """The text on the page of an answer. Each piece has the index of its input and output, or None.

    Attributes:
        prompt: Pieces of the prompt: text and input.
        answer: Pieces of the answer: text, output and input.
        values: The value of each row's target, or None if rows have no exact sum.
        bias: The contribution of the biases to each, or None.
        against: The other answer of a contrast, or None.
        pictures: The pictures of the prompt, with their inputs.
    """

    prompt: tuple[tuple[str, int | None], ...]
    answer: tuple[tuple[str, int | None, int | None], ...]
    values: tuple[float, ...] | None
    bias: tuple[float, ...] | None
    against: str | None
    pictures: tuple[PlacedPicture, ...] = ()


def answer_text(meta: Mapping[str, Any], n_out: int, n_in: int, bias_share: np.ndarray) -> AnswerText | None:
    """The text of an answer, from the `meta` of its map; None if the map is not of an answer, or the text is damaged.

    Args:
        meta: `text` is prompt and answer, `offsets` the place of each input in it, `answer` the answer, `answer_parts`
            the place of each output in the answer.
        n_out: How many outputs.
        n_in: How many inputs.
        bias_share: Bias share of each output.
    """
    text, answer, against = (meta.get(name) for name in ("text", "answer", "against"))
    if not isinstance(text, str) or not isinstance(answer, str) or not answer or not text.endswith(answer):
        return None
    border = len(text) - len(answer)
    inputs, outputs = _spans(meta.get("offsets"), n_in, len(text)), _spans(meta.get("answer_parts"), n_out, len(answer))
    if inputs is None or outputs is None:
        return None
    within = [pair if pair is None or pair[1] <= border else None for pair in inputs]
    own = [(pair[0] - border, pair[1] - border) if pair and pair[0] >= border else None for pair in inputs]
    values = _numbers(meta.get("logit"), n_out)
    is_known = values is not None and bool(np.isfinite(bias_share).all())
    return AnswerText(
        prompt=tuple((piece, j) for piece, j, _ in _pieces(text[:border], within, ())),
        answer=tuple((piece, i, j) for piece, i, j in _pieces(answer, outputs, own)),
        values=values,
        bias=tuple(float(b * v) for b, v in zip(bias_share, values, strict=True)) if values and is_known else None,
        against=against if isinstance(against, str) else None,
        pictures=placed_pictures(meta.get("pictures"), n_in),
    )


def _pieces(text: str, first: Spans, second: Spans) -> list[tuple[str, int | None, int | None]]:
    """The text cut wherever a span begins or ends, each piece with the span of each kind that contains it."""
    bounds = sorted({0, len(text), *(bound for pair in (*first, *second) if pair for bound in pair)})
    return [(text[a:b], _holder(first, a, b), _holder(second, a, b)) for a, b in pairwise(bounds)]


def _holder(spans: Spans, start: int, stop: int) -> int | None:
    return next((k for k, pair in enumerate(spans) if pair and pair[0] <= start and stop <= pair[1]), None)


def _spans(value: Any, n: int, length: int) -> list[tuple[int, int] | None] | None:
    """Bounds within a text, one pair or None for each; None for anything else, since files may come from anywhere."""
    spans = checked(value, list[tuple[int, int] | None])
    is_right = spans is not None and len(spans) == n and all(0 <= a < b <= length for a, b in filter(None, spans))
    return spans if is_right else None


def _numbers(value: Any, n: int) -> tuple[float, ...] | None:
    numbers = checked(value, tuple[Annotated[float, Meta(gt=-_LARGEST, lt=_LARGEST)], ...])
    return numbers if numbers is not None and len(numbers) == n else None
