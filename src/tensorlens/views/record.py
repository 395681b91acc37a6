"""`MapView`: everything a renderer may draw, as plain data.

The page, the terminal and the figures take this record and nothing else, so that they agree on
what is signed, which limit the colours have, and what the caption says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tensorlens.errors import InputError
from tensorlens.views.answer_text import AnswerText
from tensorlens.views.labels import shorten

_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*")
_NOT_IN_CAPTION = {
    "grid",
    "image",
    "standard_error",
    "out_positions",
    "offsets",
    "causal",
    "set_aside",
    "sums_to",
    "answer_parts",
}
_MOST_LISTED = 12
_MOST_CHARACTERS = 300
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

    `scores` is (out, in), `bias_share` is (out,) and may be NaN; both hold floats.
    `caption` holds names and values for the whole map, `row_caption` names with one value for each output.
    `out_positions` says which tokens of the text the outputs are, where they are not simply all of them.
    `image` is a base64 data URI of a PNG, JPEG, GIF or WebP, and needs a `grid`.
    `signed` says whether the method's scores may be below zero; None leaves it to the scores.
    `set_aside` holds the inputs that take no part in the colours, `words` the label, first token and end of each
    word where they are fewer than the tokens, `sums` one sentence for each output on what its row sums to.
    `answer` holds prompt and answer as text, for a map of an answer.
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
    def coloured(self) -> np.ndarray:
        """The scores with NaN for the inputs that are set aside."""
        if not self.set_aside:
            return self.scores
        scores = self.scores.copy()
        scores[:, list(self.set_aside)] = np.nan
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


BY_OUTPUT = ("target", "logit", "standard_error", "out_positions")
"""Keys of `meta` that may hold a list with one entry for each output."""


def is_by_output(key: str, value: Any, n_out: int) -> bool:
    """Whether `value` is a list of one entry for each output."""
    return key in BY_OUTPUT and isinstance(value, (list, tuple)) and len(value) == n_out


def row_caption_lines(meta: Mapping[str, Any], n_out: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names with one printed value for each output."""
    keys = [key for key in meta if is_by_output(key, meta[key], n_out) and key not in _NOT_IN_CAPTION]
    return tuple((_title(key), tuple(_plain(value) for value in meta[key])) for key in keys)


NOT_DERIVED = "not derived from T"
"""What stands in the place of a certificate beside a baseline or a control."""


def is_of_tensor(method: str) -> bool:
    """Whether a method's maps are of T itself, so that a certificate of T speaks for them."""
    return method.startswith("tensor.")


def sum_lines(sums: np.ndarray, bias_share: np.ndarray, meta: Mapping[str, Any]) -> tuple[str, ...]:
    """For each row that explains a logit, what it sums to: inputs + bias = logit."""
    logits: Any = meta.get("logit")
    if not is_by_output("logit", logits, len(sums)) or not all(isinstance(logit, (int, float)) for logit in logits):
        return ()
    explained = "the logit difference" if " − " in str(meta.get("target")) else "the logit"
    lines, what = [], meta["sums_to"] if isinstance(meta.get("sums_to"), str) else explained
    for total, share, logit in zip(sums, bias_share, logits, strict=True):
        bias = share * logit
        line = f"inputs sum to {_fixed(total)}; the bias gives {_fixed(bias)}; {what} is {_fixed(logit)}"
        is_whole = abs(total + bias - logit) <= 0.005 + 0.001 * abs(logit)
        lines.append(line if is_whole else f"{line} with all heads, {_fixed(total + bias)} with those kept")
    return tuple(lines)


def _fixed(value: float) -> str:
    """Two decimals, no minus before a zero."""
    return f"{round(float(value), 2) + 0:.2f}".replace("-", "−") if np.isfinite(value) else "unknown"


def caption_lines(method: str, meta: Mapping[str, Any], n_out: int) -> tuple[tuple[str, str], ...]:
    """Names and values to print beside a map: the method first, then what is known of its origin."""
    meta = {key: value for key, value in meta.items() if not is_by_output(key, value, n_out)}
    known = [key for key in _FIRST_IN_CAPTION if key in meta]
    others = [key for key in meta if key not in _FIRST_IN_CAPTION and key not in _NOT_IN_CAPTION]
    lines = [("Method", method)]
    for key in known + others:
        text = _PRINTED.get(key, _plain)(meta[key])
        if key == "certificate" and not is_of_tensor(method):
            text = NOT_DERIVED
        if text:
            lines.append((_title(key), text))
    return tuple(lines)


@cache
def palette(name: str, shade: str) -> tuple[str, ...]:
    """The hex stops of the colours called `name` ("signed", "unsigned"), low to high, for a "light" or "dark" page."""
    stops = json.loads((Path(__file__).parent / "static" / "palettes.json").read_text("utf-8"))
    return tuple(stops[name][shade])


def _title(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _verdict(certificate: Any) -> str:
    if certificate is None:
        return "not checked"
    if not isinstance(certificate, Mapping) or "passed" not in certificate:
        return _plain(certificate)
    numbers = _plain(certificate.get("errors"))
    return ("passed" if certificate["passed"] else "FAILED") + (f" ({numbers})" if numbers else "")


def _range(blocks: Any) -> str:
    """A range of blocks as Python writes it, so that it can be given back to `--blocks`."""
    is_pair = isinstance(blocks, (list, tuple)) and len(blocks) == 2 and all(type(k) is int for k in blocks)
    return f"{blocks[0]}:{blocks[1]}" if is_pair else _plain(blocks)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        has_lists = any(isinstance(inner, (list, tuple)) for inner in value.values())
        between, after = ("; ", ":") if has_lists else (", ", "")
        return between.join(f"{key}{after} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        if len(value) > 2 and all(type(k) is int for k in value) and value == [*range(value[0], value[0] + len(value))]:
            return f"{value[0]} to {value[-1]}"
        more = f", … ({len(value)} in all)" if len(value) > _MOST_LISTED else ""
        return ", ".join(_plain(inner) for inner in value[:_MOST_LISTED]) + more
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"“{text}”" if text != text.strip() else text


def _beginning(text: Any) -> str:
    """A long text is not said again in full: its tokens are the map."""
    return shorten(_plain(text), _MOST_CHARACTERS)


_PRINTED: dict[str, Callable[[Any], str]] = {"certificate": _verdict, "blocks": _range, "text": _beginning}
"""How to print what is not printed as it is."""


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
