"""`PlainTokenizer`: anything with `encode` and `decode` (tiktoken, character level, sentencepiece), or labels alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Any

from tensorlens.errors import InputError


class PlainTokenizer:
    """What the library needs from a tokenizer, by `encode` and `decode` alone.

    Args:
        encode: From a text to its ids; None where there are labels only.
        decode: From ids to their text.
    """

    is_fast = True  # it says where tokens stand
    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()
    unk_token = unk_token_id = mask_token = mask_token_id = pad_token_id = eos_token_id = chat_template = None

    def __init__(self, encode: Callable[[str], Any] | None, decode: Callable[[list[int]], str]) -> None:
        self._encode, self._decode = encode, decode

    @property
    def has_labels_only(self) -> bool:
        """Whether it cannot read a text."""
        return self._encode is None

    def __call__(self, text: Any = None, *, text_target: Any = None, **_: Any) -> dict[str, Any]:
        """Ids of a text, or of each of several, and where each token stands."""
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
        """Where each token stands; pieces of one character stand at the same place."""
        pieces, places, at = [self.decode([i]) for i in ids], list[tuple[int, int]](), 0
        is_plain = "".join(pieces) == text
        for k, piece in enumerate(pieces):
            stop = at + len(piece) if is_plain else len(commonprefix([self.decode(ids[: k + 1]), text]))
            if stop > at:  # those that waited for the rest of the character too
                places += [(at, stop)] * (k + 1 - len(places))
                at = stop
        return places + [(at, at)] * (len(ids) - len(places))

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
