"""Texts as items see them: tokens, the words or sentences that are ranked, and the tokens that may come next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.maps.groups import find_groups
from tensorlens.models.inputs import tokenizer_of
from tensorlens.models.plain_text import check_unicode

Span = tuple[int, int]


class Prompt:
    """A text that a language model is to continue.

    Args:
        lens: The model and its tokenizer.
        text: The text.

    Raises:
        InputError: There is no tokenizer, it does not say where tokens stand, or it ends every text with a token of
            its own, so that nothing can come next.
    """

    def __init__(self, lens: Lens, text: str) -> None:
        self.tokenizer: Any = tokenizer_of(lens.processor)
        if self.tokenizer is None:
            raise InputError("Judges of texts need a lens with a tokenizer. Use `tensorlens.Lens(model, tokenizer)`.")
        self.text, self.made = text, lens.prepare(text)
        self.ids: tuple[int, ...] = tuple(self.made.arguments["input_ids"][0].tolist())
        offsets = self.made.offsets
        if offsets is None:
            raise InputError("This tokenizer does not say where its tokens stand in the text, so words are not known.")
        self.offsets = [None if pair is None or pair[0] == pair[1] else pair for pair in offsets]
        if self.offsets[-1] is None:
            raise InputError("Judges of the next word need a language model that reads from left to right.")
        self.labels = self.made.labels(len(self.ids), lens.model, lens.processor)

    def groups(self, kind: str) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """The tokens of each word or sentence with its label; tokens that are no text belong to none."""
        meta = {"text": self.text, "offsets": [pair and list(pair) for pair in self.offsets]}
        found = [
            (tuple(k for k in group.tokens if self.offsets[k] is not None), group.label)
            for group in find_groups(kind, self.labels, meta)
        ]
        kept = [(tokens, label) for tokens, label in found if tokens]
        return tuple(tokens for tokens, _ in kept), tuple(label for _, label in kept)

    def tokens_at(self, spans: Sequence[Span]) -> set[int]:
        """The tokens that overlap some characters."""
        pairs = [(k, *pair) for k, pair in enumerate(self.offsets) if pair is not None]
        return {k for k, start, stop in pairs if any(start < b and a < stop for a, b in spans)}

    def next_token(self, continuation: str, *, apart: bool = True) -> int:
        """The first token of what follows the text, tokenised with it; a word is set apart by a space."""
        check_unicode(continuation)
        is_apart = apart and not self.text[-1:].isspace() and continuation[:1].isalnum()
        whole = self.tokenizer(self.text + " " * is_apart + continuation)["input_ids"]
        if tuple(whole[: len(self.ids)]) != self.ids or len(whole) <= len(self.ids):
            raise InputError(f"The prefix has other tokens in front of {continuation!r} than alone.")
        return int(whole[len(self.ids)])


def whole_words(text: str, words: str) -> list[Span]:
    """Where some words stand in a text, not as parts of longer ones."""
    pattern = rf"(?<!\w){re.escape(words)}(?!\w)"
    return [found.span() for found in re.finditer(pattern, text)]
