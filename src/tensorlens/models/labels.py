"""Labels that a person can read for tokens and patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary


def token_labels(ids: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    """The text of each token: byte-level markers decoded, word-piece marks (``##``) left visible.

    A word-initial token keeps its space, so the label is what one would pass as a target. A piece of a character
    that is not text on its own is shown as its bytes, ``⟨E2⟩⟨82⟩``.
    """
    known = _known_labels.setdefault(tokenizer, {})
    new = [i for i in dict.fromkeys(ids) if i not in known]
    if new:
        special = set(tokenizer.all_special_tokens)
        pieces = tokenizer.convert_ids_to_tokens(new)
        known |= {i: _readable(piece, tokenizer, special) for i, piece in zip(new, pieces, strict=True)}
    return tuple([known[i] for i in ids])


_known_labels: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
"""Labels by tokenizer and id: a data set needs the same ones again and again."""


def _readable(piece: Any, tokenizer: Any, special: set[str]) -> str:
    piece = piece.decode("utf-8", "replace") if isinstance(piece, bytes) else str(piece)
    if piece in special or piece.startswith("##"):
        return piece
    if piece.startswith("▁"):
        return " " + piece[1:].replace("▁", " ")
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return _bytes(bytes([int(piece[3:5], 16)]))
    text = tokenizer.convert_tokens_to_string([piece])
    if "�" not in text:
        return text or piece
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {character: value for value, character in bytes_to_unicode().items()}
    if all(character in alphabet for character in piece):
        return _bytes(bytes(alphabet[character] for character in piece))
    return piece


def _bytes(values: bytes) -> str:
    return values.decode("ascii") if values.isascii() else "".join(f"⟨{value:02X}⟩" for value in values)


def patch_labels(n_tokens: int, rows: int, columns: int, special: Sequence[str] = ("[CLS]",)) -> tuple[str, ...]:
    """Labels for an image: the special tokens in front, then the patches by row and column."""
    n_special = n_tokens - rows * columns
    names = [*special[:n_special], *(f"[REG{k + 1}]" for k in range(n_special - len(special[:n_special])))]
    return (*names, *(f"patch {row},{column}" for row in range(rows) for column in range(columns)))


def with_patches(labels: Sequence[str], positions: Sequence[int]) -> tuple[str, ...]:
    """Labels of text and image in one sequence: the tokens that stand for the image are named by row and column.

    Patches that make no square are numbered.
    """
    side = math.isqrt(len(positions))
    named = list(labels)
    for k, position in enumerate(positions):
        named[position] = f"patch {k // side},{k % side}" if side * side == len(positions) else f"patch {k}"
    return tuple(named)
