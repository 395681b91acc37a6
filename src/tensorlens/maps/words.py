"""Tokens put together into words: where each word begins and ends among the tokens, and what it is called.

A word ends at white space, between letters and punctuation, and, in scripts that write no spaces, at each token.
Pieces of one character always stay together.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_BYTES = re.compile(r"(?:⟨[0-9A-F]{2}⟩)+")
_INSIDE = "'’_"
_JOINER = "\u200d"
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")


class Word(NamedTuple):
    """Tokens `start` … `stop` - 1 as one."""

    label: str
    start: int
    stop: int


def words(labels: Sequence[str], meta: Mapping[str, Any]) -> tuple[Word, ...]:
    """The words of some tokens, in order; every token is in exactly one.

    Args:
        labels: One for each token, as `token_labels` writes them.
        meta: Of a map. `offsets` (for each token its [start, stop) in the text, or None for one that is no text) and
            `text` say exactly where a token stands; without them the labels are read.
    """
    offsets, text = meta.get("offsets"), meta.get("text")
    if isinstance(text, str) and fits(offsets, len(labels), len(text)):
        return _by_offsets(labels, offsets, text)  # pyright: ignore[reportArgumentType] -- `fits` has seen it
    return _by_labels(labels)


def fits(offsets: Any, n_tokens: int, n_characters: int) -> bool:
    """Whether these are offsets of this text: files come from strangers."""
    if not isinstance(offsets, list) or len(offsets) != n_tokens:
        return False
    pairs = [pair for pair in offsets if pair is not None]
    return all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(end) is int for end in pair)
        and 0 <= pair[0] <= pair[1] <= n_characters
        for pair in pairs
    )


def _by_offsets(labels: Sequence[str], offsets: Sequence[Sequence[int] | None], text: str) -> tuple[Word, ...]:
    found: list[Word] = []
    begin = end = -1  # of the last word in the text; -1 after a token that is no text
    for k, pair in enumerate(offsets):
        if pair is None or pair[0] == pair[1]:
            found.append(Word(labels[k], k, k + 1))
            begin = end = -1
            continue
        start, stop = pair
        if end >= 0 and (start < end or start == end and _is_one_word(text[end - 1], text[start])):
            end = max(end, stop)
            found[-1] = Word(text[begin:end], found[-1].start, k + 1)
        else:
            begin, end = (start - 1 if start and labels[k].startswith(" ") and text[start] != " " else start), stop
            found.append(Word(text[begin:end], k, k + 1))
    alone = (word.stop == word.start + 1 and not _BYTES.search(labels[word.start]) for word in found)
    return tuple(
        word._replace(label=labels[word.start]) if is_alone else word
        for word, is_alone in zip(found, alone, strict=True)
    )


def _by_labels(labels: Sequence[str]) -> tuple[Word, ...]:
    found: list[Word] = []
    pieces = b""  # of a character that is not complete yet
    for k, label in enumerate(labels):
        raw = _raw(label)
        if raw is not None and found and pieces:
            pieces += raw
            found[-1] = Word(_decoded(pieces, found[-1].label), found[-1].start, k + 1)
        elif raw is None and found and _continues(labels, k):
            found[-1] = Word(found[-1].label + label.removeprefix("##"), found[-1].start, k + 1)
        else:
            found.append(Word(label if raw is None else _decoded(raw, label), k, k + 1))
            pieces = raw or b""
        if raw is None or _is_complete(pieces):
            pieces = b""
    return tuple(found)


def _continues(labels: Sequence[str], k: int) -> bool:
    if labels[k].startswith("##"):
        return True
    is_spaced = any(label.startswith(" ") for label in labels)  # word pieces carry no spaces: each begins a word
    return is_spaced and not _raw(labels[k - 1]) and _is_one_word(labels[k - 1], labels[k])


def _is_one_word(before: str, after: str) -> bool:
    """Whether text that ends in `before` goes on with `after` without the end of a word."""
    if not before or not after or before[-1].isspace() or after[0].isspace():
        return False
    if _JOINER in (before[-1], after[0]) or unicodedata.category(after[0]) in ("Mn", "Me", "Sk"):
        return True
    return all(_is_of_word(character) for character in (before[-1], after[0]))


def _is_of_word(character: str) -> bool:
    is_letter = character.isalnum() or character in _INSIDE or unicodedata.category(character).startswith("M")
    return is_letter and not unicodedata.name(character, "").startswith(_UNSPACED)


def _raw(label: str) -> bytes | None:
    """The bytes behind a label such as ⟨E4⟩⟨BD⟩, or None."""
    return bytes.fromhex(re.sub("[⟨⟩]", "", label)) if _BYTES.fullmatch(label) else None


def _is_complete(pieces: bytes) -> bool:
    try:
        pieces.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decoded(pieces: bytes, otherwise: str) -> str:
    return pieces.decode("utf-8") if _is_complete(pieces) else otherwise
