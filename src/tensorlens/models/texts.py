"""Texts and their tokens: checks of texts, the one call of a tokenizer, and labels for people. Needs no torch.

A tokenizer is one of transformers, or anything with `encode` and `decode` (tiktoken, character level, sentencepiece):
`PlainTokenizer` adds the few other methods that are called here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tensorlens.errors import InputError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def names_image(text: str) -> bool:
    """Whether a text ends like the file name of a picture."""
    return Path(text).suffix.lower() in IMAGE_SUFFIXES


def check_unicode(text: str) -> None:
    """Refuse halves of surrogate pairs: they may come from JSON or the command line, and no tokenizer accepts them.

    Raises:
        InputError: The text has one.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError("Expected text in Unicode, got half of a surrogate pair. Write or paste it as UTF-8.")


# Tokenizers -----------------------------------------------------------------------------------------------------------

Offsets = tuple[tuple[int, int] | None, ...]
"""The place of each token in a text, [start, stop); None for a token that is not part of it."""


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer in a tokenizer or in a processor that has one."""
    if processor is None:
        return None
    inner = getattr(processor, "tokenizer", None)
    return inner if inner is not None else processor if hasattr(processor, "convert_ids_to_tokens") else None


def tokenised(
    tokenizer: Any, texts: Sequence[str], *, as_targets: bool = False, **options: Any
) -> list[tuple[list[int], Offsets | None]]:
    """The ids of each text, and the place of each token in it; None if the tokenizer does not report it.

    Args:
        tokenizer: It is called once.
        texts: The texts.
        as_targets: Whether they are output of the model, which some tokenizers cut differently from input.
        options: Options of the tokenizer.
    """
    if getattr(tokenizer, "is_fast", False):
        options["return_offsets_mapping"] = True
    made = tokenizer(**{"text_target" if as_targets else "text": list(texts)}, **options)
    found = made["offset_mapping"] if "return_offsets_mapping" in options else [None] * len(texts)
    places = [pairs and tuple([(a, b) if b > a else None for a, b in pairs]) for pairs in found]
    return list(zip(made["input_ids"], places, strict=True))


INCOMPLETE = "\ufffd"
"""The replacement for a character with missing bytes."""

WINDOW, OVERLAP = 64, 16
"""Tokens that are decoded together to see where one ends, and how many of them the next window begins with."""


def decoded_places(decode: Callable[[list[int]], str], ids: list[int]) -> tuple[str, Offsets]:
    """The text of some ids, and where each token is in it; pieces of one character share a place."""
    text, offsets, start = decode(ids), list[tuple[int, int] | None](), 0
    # Decoding every prefix whole would take time with the square of the length, so only a window is decoded. What
    # decoding changes at its beginning (a space, a character cut in two) is the same for every end, hence `shift`.
    first = shift = 0
    for k in range(len(ids)):
        if k - first == WINDOW:
            whole = shift + len(decode(ids[first:k]))
            first = k - OVERLAP
            shift = whole - len(decode(ids[first:k]))
        stop = max(start, shift + len(decode(ids[first : k + 1]).rstrip(INCOMPLETE)))
        last = min(max(stop, start + 1), len(text))
        offsets.append((start, last) if last > start else None)
        start = stop
    return text, tuple(offsets)


class PlainTokenizer:
    """The methods that the library needs from a tokenizer, built on `encode` and `decode`.

    Args:
        encode: From a text to its ids; None if there are only labels.
        decode: From ids to their text.
    """

    is_fast = True  # it reports offsets
    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()
    unk_token = unk_token_id = mask_token = mask_token_id = pad_token_id = eos_token_id = chat_template = None

    def __init__(self, encode: Callable[[str], Any] | None, decode: Callable[[list[int]], str]) -> None:
        self._encode, self._decode = encode, decode

    @property
    def has_labels_only(self) -> bool:
        """Whether it only has labels and cannot read a text."""
        return self._encode is None

    def __call__(self, text: Any = None, *, text_target: Any = None, **_: Any) -> dict[str, Any]:
        """Ids of a text, or of each of several, and the place of each token."""
        text = text_target if text is None else text
        if isinstance(text, (list, tuple)):
            each = [self(one) for one in text]
            return {name: [one[name] for one in each] for name in ("input_ids", "offset_mapping")}
        text = str(text)
        ids = self._ids(text)
        return {"input_ids": ids, "offset_mapping": self._places(text, ids)}

    def _ids(self, text: str) -> list[int]:
        if self._encode is None:
            raise InputError("Got a text, but this lens has labels and no tokenizer. Pass token ids.")
        try:
            found = self._encode(text)
        except (KeyError, ValueError, IndexError) as error:
            raise InputError(f"The tokenizer cannot encode {text!r:.60}: {type(error).__name__}: {error}.") from error
        found = getattr(found, "ids", found)  # of `tokenizers`
        return [int(i) for i in (found.tolist() if hasattr(found, "tolist") else found)]

    def _places(self, text: str, ids: list[int]) -> list[tuple[int, int]]:
        """The place of each token; pieces of one character share a place."""
        again, places = decoded_places(self.decode, ids)
        return [place if place and len(again) == len(text) else (0, 0) for place in places]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of some ids."""
        return str(self._decode([int(i) for i in ids]))

    def batch_decode(self, several: Sequence[Sequence[int]], **_: Any) -> list[str]:
        """The text of each of several lists of ids."""
        return [self.decode(ids) for ids in several]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The text of each id."""
        return [self.decode([i]) for i in ids]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Tokens are their text already."""
        return "".join(tokens)

    def convert_tokens_to_ids(self, token: str) -> None:
        """Tokens have no names besides their text."""


def known_processor(processor: Any, labels: Callable[[int], str] | None) -> Any:
    """A processor as the library takes it: itself, or with `encode` and `decode` alone, a `PlainTokenizer`."""
    if labels is not None:
        if processor is not None or not callable(labels):
            raise InputError(
                "`labels` must be a function from a token id to its label, and cannot be combined with a tokenizer."
            )
        return PlainTokenizer(None, lambda ids: "".join(str(labels(i)) for i in ids))
    if processor is None or any(hasattr(processor, name) for name in ("convert_ids_to_tokens", "tokenizer")):
        return processor
    encode: Any = getattr(processor, "encode", None)
    decode: Any = getattr(processor, "decode", None)
    has_both = callable(encode) and callable(decode)
    return PlainTokenizer(encode, decode) if has_both else processor  # pyright: ignore[reportArgumentType]


# Labels ---------------------------------------------------------------------------------------------------------------


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
"""Labels by tokenizer and id, cached because a data set needs the same ones again and again."""


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
    """Labels for an image: first the special tokens, then the patches by row and column."""
    n_special = n_tokens - rows * columns
    names = [*special[:n_special], *(f"[REG{k + 1}]" for k in range(n_special - len(special[:n_special])))]
    return (*names, *(f"patch {row},{column}" for row in range(rows) for column in range(columns)))


def with_patches(labels: Sequence[str], positions: Sequence[int]) -> tuple[str, ...]:
    """Labels of text and image in one sequence: the tokens of the image are named by row and column.

    Patches that do not form a square are numbered.
    """
    side = math.isqrt(len(positions))
    named = list(labels)
    for k, position in enumerate(positions):
        named[position] = f"patch {k // side},{k % side}" if side * side == len(positions) else f"patch {k}"
    return tuple(named)
