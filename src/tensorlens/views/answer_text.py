"""`AnswerText`: prompt and answer as running text, cut where the inputs and outputs of a map begin and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from tensorlens.views.placed_pictures import PlacedPicture, checked, placed_pictures

Spans = Sequence[tuple[int, int] | None]

_LARGEST = 1e300
"""No target is larger; a number in a file may be, even larger than a float can be."""


@dataclass(frozen=True, kw_only=True)
class AnswerText:
    """What the page of an answer shows as text. Each piece has the number of its input and output, or None.

    Attributes:
        prompt: Pieces of the prompt: text and input.
        answer: Pieces of the answer: text, output and input.
        values: What each output's row explains, or None if rows have no exact sum.
        bias: The contribution of the biases to each, or None.
        against: The other answer of a contrast, or None.
        pictures: Those of the prompt, with the inputs that stand for them.
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
        meta: `text` is prompt and answer, `offsets` where each input stands in it, `answer` the answer, `answer_parts`
            where each output stands in that.
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
    """The text cut wherever a span begins or ends, each piece with the span of either kind that it lies in."""
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
