"""Which samples a study sees: texts cut to one length, in the order of the file or drawn at random.

A random draw takes one sample from each label, class or article in turn, so a small one is not all of one kind: the
test part of IMDB is sorted by label, ImageNet's folders by class, and windows of WikiText lie side by side.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tensorlens.errors import InputError
from tensorlens.models.plain_text import check_unicode
from tensorlens.studies.datasets import Dataset, Row
from tensorlens.studies.perturbation_study.options import PerturbationOptions

TITLE = re.compile(r"\s*= (?!=).*(?<!=) =\s*")
"""The title of an article of WikiText; headings within it have several signs on each side."""


@dataclass(frozen=True, kw_only=True)
class SamplePiece:
    """A sample before the model sees it.

    Attributes:
        name: Where it came from.
        content: Token ids without special tokens, or an image.
        label: What it is labelled with; of a window the token that follows it.
        unit: What is drawn as a whole when means are resampled, such as an article; None for the sample itself.
        columns: What else its row holds.
    """

    name: str
    content: Any
    label: Any = None
    unit: str | None = None
    columns: Row | None = None


def drawn_order(strata: Sequence[Hashable] | None, n: int, seed: int) -> list[int]:
    """Places of all n samples in random order, in turn from each stratum."""
    shuffled = np.random.default_rng(seed).permutation(n).tolist()
    if strata is None:
        return shuffled
    groups: dict[str, list[int]] = {}
    for place in shuffled:
        groups.setdefault(str(strata[place]), []).append(place)
    return list(in_turn([groups[name] for name in sorted(groups)]))


def in_turn(groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """One of each group, then the next of each, until all are empty."""
    waiting = [iter(group) for group in groups]
    while waiting:
        still = []
        for group in waiting:
            for found in islice(group, 1):
                yield found
                still.append(group)
        waiting = still


def image_pieces(data: Dataset, options: PerturbationOptions) -> list[SamplePiece]:
    """The images that a study sees, in order."""
    return [_piece(data, place, data.items[place]) for place in islice(_order(data, options), options.limit)]


def text_pieces(
    tokenizer: Any, data: Dataset, options: PerturbationOptions, n_tokens: int
) -> tuple[list[SamplePiece], int]:
    """The texts or windows that a study sees, in order, and how many were looked at; needs a tokenizer and no model."""
    n_special = sum(map(len, wrapping(tokenizer)))
    if (room := n_tokens - n_special) <= 0:
        raise InputError(f"Expected `n_tokens` above the {n_special} special tokens of every text; got {n_tokens}.")
    each = (_piece(data, place, _encode(tokenizer, data.items[place])[:room]) for place in _order(data, options))
    pieces = _windows(tokenizer, data, room, options) if options.cut == "windows" else each
    found: list[SamplePiece] = []
    n_seen = 0
    while options.limit is None or len(found) < options.limit:
        piece = next(pieces, None)
        if piece is None:
            break
        n_seen += 1
        found += [piece] if len(piece.content) + n_special >= options.min_tokens else []
    if not n_seen:
        raise InputError("Expected texts; got none. Is the file empty?")
    if not found:
        least = options.min_tokens
        raise InputError(
            f"Expected texts of at least {least} tokens; none of {n_seen} is that long. Lower `min_tokens`."
        )
    return found, n_seen


def wrapping(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _order(data: Dataset, options: PerturbationOptions) -> Sequence[int]:
    return drawn_order(data.labels, len(data), options.seed) if options.draw == "random" else range(len(data))


def _piece(data: Dataset, place: int, content: Any) -> SamplePiece:
    return SamplePiece(
        name=data.names[place],
        content=content,
        label=None if data.labels is None else data.labels[place],
        columns=data.columns[place] if data.columns else None,
    )


def _windows(tokenizer: Any, data: Dataset, room: int, options: PerturbationOptions) -> Iterator[SamplePiece]:
    """Windows side by side over all texts; drawn ones lie in one article each, one of each article in turn."""
    if options.draw == "file":
        lines = (text.strip() + "\n" for text in data.items if not _is_heading(text))
        yield from _cut(tokenizer, lines, room, "window", None)
        return
    articles = _articles(data.items)
    chance = np.random.default_rng(options.seed)
    order = chance.permutation(len(articles)).tolist()
    seeds = chance.integers(2**31, size=len(articles)).tolist()

    def of_article(place: int) -> Iterator[SamplePiece]:
        title, lines = articles[place]
        found = list(_cut(tokenizer, lines, room, f"{title}, window", title))
        yield from (found[k] for k in np.random.default_rng(seeds[place]).permutation(len(found)))

    yield from in_turn(map(of_article, order))


def _cut(tokenizer: Any, lines: Iterable[str], room: int, name: str, unit: str | None) -> Iterator[SamplePiece]:
    """Windows of `room` tokens; the label of each is the token that follows it."""
    ids: list[int] = []
    n_windows = 0
    for line in lines:
        ids += _encode(tokenizer, line)
        while len(ids) > room:
            yield SamplePiece(name=f"{name} {n_windows}", content=ids[:room], label=ids[room], unit=unit)
            ids, n_windows = ids[room:], n_windows + 1
    if len(ids) == room:
        yield SamplePiece(name=f"{name} {n_windows}", content=ids, unit=unit)


def _articles(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Title and lines of each article of WikiText; without titles each text is one."""
    if not any(map(TITLE.fullmatch, texts)):
        return [(f"text {place}", [text.strip() + "\n"]) for place, text in enumerate(texts)]
    found: list[tuple[str, list[str]]] = []
    for text in texts:
        if TITLE.fullmatch(text):
            found.append((f"{text.strip(' =') or 'article'} ({len(found)})", []))
        elif found and not _is_heading(text):
            found[-1][1].append(text.strip() + "\n")
    return found


def _is_heading(text: str) -> bool:
    return text.strip().startswith("=") and text.strip().endswith("=")


def _encode(tokenizer: Any, text: str) -> list[int]:
    check_unicode(text)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
