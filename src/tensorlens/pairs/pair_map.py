"""`PairMap`: how much of the similarity of two inputs each pair of their tokens carries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import torch
from rich.console import RenderableType
from torch import Tensor

from tensorlens.errors import InputError, check_whole
from tensorlens.records import Index, Record, Writer, as_array
from tensorlens.views.figures import figure_writers
from tensorlens.views.labels import shorten, visible
from tensorlens.views.page import pairs_fragment, pairs_page
from tensorlens.views.printing import heading, table
from tensorlens.views.record import MapView, placed_pictures
from tensorlens.views.table import Table

Measure = Literal["cosine", "dot"]

BIAS = "bias"
"""The label of the last row and the last column: the part that no token carries."""

CANCELS = 100
"""If the pairs with a bias are this many times larger than the sum, the map has a warning."""

_PICTURES = ("a_pictures", "b_pictures", "against_pictures")


class Pair(NamedTuple):
    """One pair of tokens and its score."""

    row: int
    column: int
    a: str
    b: str
    score: float


class PairMap(Record, frozen=True, kw_only=True, tag="tensorlens.pair_map/1"):
    r"""A similarity as a sum over pairs: row i is a token of a, column j one of b, and all entries sum to `value`.

    $M_{ij} = ⟨y_{a,i}, y_{b,j}⟩ / (‖y_a‖ ‖y_b‖)$, where $y_{a,i}$ is what token i of a contributes to the vector of a,
    through the whole model and its pooling. The last row and the last column are the biases.

    With `against`, the columns are those of b, then those of c with the opposite sign, then one of both biases; all
    entries sum to the similarity of a and b minus that of a and c.

    Attributes:
        scores: (tokens of a + 1, tokens of b + 1), biases last.
        out_tokens: A label for each row, ``bias`` last.
        in_tokens: A label for each column, ``bias`` last.
        measure: ``"cosine"`` with the norms held, or ``"dot"``.
        value: The similarity that the model gives, or the difference of two.
        n_against: Number of columns that are tokens of c; they come before the bias.
        meta: `model`, `pooling`, `groups`, `rules` (with `other` and `other_rules` for a second lens), the texts as
            `a`, `b` and `against`, and for a picture, the picture and its patches as `a_pictures`, `b_pictures`
            or `against_pictures`; `seen` if a picture cannot be shown.
    """

    scores: Tensor
    out_tokens: tuple[str, ...]
    in_tokens: tuple[str, ...]
    measure: Measure
    value: float
    n_against: Index = 0
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    loadable: ClassVar[tuple[str, ...]] = (".json", ".safetensors")

    def __post_init__(self) -> None:
        """Check the labels against the scores."""
        super().__post_init__()
        expected = (len(self.out_tokens), len(self.in_tokens))
        if tuple(self.scores.shape) != expected or not self.scores.is_floating_point():
            raise InputError(
                f"Expected scores of shape {expected} to match the labels; got {tuple(self.scores.shape)} of "
                f"{self.scores.dtype}."
            )
        if min(expected) < 2 or self.out_tokens[-1] != BIAS or self.in_tokens[-1] != BIAS:
            raise InputError(f"Expected at least one token and then {BIAS!r} in rows and columns; got other labels.")
        if self.n_against > expected[1] - 1:
            raise InputError(f"Expected at most {expected[1] - 1} columns of the third text; got {self.n_against}.")

    def __repr__(self) -> str:
        """One line: the pairs and their sum."""
        rows, columns = self.scores.shape
        return f"PairMap({self._said_value}: {rows - 1} × {columns - 1} tokens and biases)"

    @property
    def headline(self) -> str:
        """The question that the map answers, with its number."""
        first, second, *third = self._sides
        if third:
            return f"Why is the {second} closer to the {first} than the {third[0]} is ({self._said_value})?"
        kinds = [side.split()[1] for side in (first, second)]
        what = f"are these two {kinds[0]}s" if kinds[0] == kinds[1] else "are text and picture"
        return f"Why {what} similar ({self._said_value})?"

    @property
    def _sides(self) -> tuple[str, ...]:
        """The names of the sides: the rows, the columns, and the columns of `against`."""
        some = tuple(zip(("first", "second", "third"), _PICTURES, strict=True))[: 3 if self.n_against else 2]
        return tuple(f"{place} {'picture' if self.meta.get(key) else 'text'}" for place, key in some)

    def _table(self) -> Table:
        return Table(as_array(self.scores), self.out_tokens, self.in_tokens)

    @property
    def _said_value(self) -> str:
        name = "cosine" if self.measure == "cosine" else "dot product"
        name = "MaxSim" if self.meta.get("pooling") == "late" else name
        return f"{name}{' difference' if self.n_against else ''} {self.value:.4g}"

    @property
    def bias(self) -> float:
        """The sum of the pairs with a bias: the last row and the last column."""
        return float(self.scores.double().sum() - self.scores[:-1, :-1].double().sum())

    def top(self, k: int = 10) -> list[Pair]:
        """The `k` pairs of tokens with the largest scores of either sign, without pairs with a bias; NaN comes last."""
        k = check_whole(k, "k", 1)
        scores = self.scores[:-1, :-1]
        strength = scores.abs().nan_to_num(nan=-1.0, posinf=torch.inf).flatten()
        places = [divmod(n, scores.shape[1]) for n in strength.argsort(descending=True, stable=True)[:k].tolist()]
        return [Pair(i, j, self.out_tokens[i], self.in_tokens[j], float(scores[i, j])) for i, j in places]

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(self.headline)
        rows = [(f"{one.score:+.4f}", shorten(one.a.strip(), 40), shorten(self._named(one), 40)) for one in self.top(k)]
        yield table(("score", *self._sides[:2]), rows, numbers=(0,))
        yield table(("", ""), self._caption())

    def _named(self, one: Pair) -> str:
        is_third = one.column >= self.scores.shape[1] - 1 - self.n_against and self.n_against
        return f"{one.b.strip()}{f' ({self._sides[2]})' if is_third else ''}"

    def _caption(self) -> list[tuple[str, str]]:
        tokens = float(self.scores[:-1, :-1].double().sum())
        total = f"{tokens:+.4f} by pairs of tokens, {self.bias:+z.4f} by pairs with a bias"
        known = (
            ("Model", "model"),
            ("Other model", "other"),
            ("Pooling", "pooling"),
            ("Groups", "groups"),
            ("Seen", "seen"),
        )
        said = [(name, str(self.meta[key])[:200]) for name, key in known if isinstance(self.meta.get(key), str)]
        if abs(self.bias) > CANCELS * abs(self.value):
            size = f"{abs(self.bias / self.value):,.0f} times the sum" if self.value else "larger than the sum"
            said.append(("Warning", f"the pairs with a bias are {size}. Rules with live attention may cancel less."))
        return [("Sum", f"{self.value:+.4f} = {total}"), *said]

    def _repr_html_(self) -> str:
        return pairs_fragment(self.payload(), self.headline)

    def _writers(self) -> Mapping[str, Writer]:
        def as_page(path: Path) -> None:
            path.write_text(pairs_page(self.payload(), self.headline), encoding="utf-8")

        return {".html": as_page, **figure_writers(self._view), **super()._writers()}

    def _view(self) -> MapView:
        """The pairs of tokens as a matrix; pairs with a bias are given in words, not drawn."""
        return MapView(
            scores=as_array(self.scores[:-1, :-1]),
            out_tokens=self.out_tokens[:-1],
            in_tokens=self.in_tokens[:-1],
            title=self.headline,
            bias_share=as_array(self.scores[:-1, -1]),
            caption=tuple(self._caption()),
            signed=True,
            axes=(self._sides[0], ", then ".join(self._sides[1:])),
        )

    def payload(self) -> dict[str, Any]:
        """The data of the page, as plain values; a number that is not finite is null."""
        cells = [[one if math.isfinite(one) else None for one in row] for row in self.scores.tolist()]
        return {
            "title": self.headline,
            "value": self.value if math.isfinite(self.value) else None,
            "rows": list(self.out_tokens),
            "columns": list(self.in_tokens),
            "nAgainst": self.n_against,
            "sides": [side.capitalize() for side in self._sides],
            "cells": cells,
            "top": [[one.row, one.column] for one in self.top(8)],
            "caption": [[name, visible(value)] for name, value in self._caption()],
            "pictures": [
                [asdict(one) for one in placed_pictures(self.meta.get(key), n)]
                for key, n in zip(_PICTURES, (self.scores.shape[0], *2 * self.scores.shape[1:]), strict=True)
            ],
        }
