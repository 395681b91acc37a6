"""`Prompt`: a text, chat messages or token ids, as the ids that the model reads and where they stand in the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import nn

from tensorlens.errors import InputError
from tensorlens.maps.groups import Span
from tensorlens.models.forward_signature import token_ids
from tensorlens.models.inputs import ModelInput, tokenizer_of
from tensorlens.models.plain_text import check_unicode

Offsets = tuple[tuple[int, int] | None, ...]
"""Where each token stands in a text; None for one that is no part of it."""


@runtime_checkable
class Speaker(Protocol):
    """What an answer asks of the lens that it came from."""

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        ...

    @property
    def processor(self) -> Any:
        """Its tokenizer or processor."""
        ...

    @property
    def pad_id(self) -> int:
        """The token that fills up shorter texts."""
        ...

    def prepare(self, value: Any) -> ModelInput:
        """What the model takes, of anything that a call takes."""
        ...

    def __call__(self, value: Any) -> Any:
        """The attention tensor of an input."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the model was asked.

    Attributes:
        ids: Its tokens.
        text: The text that they were made of, rendered by the tokenizer's template for chat messages; None for ids.
        offsets: Where each token stands in it; None if the tokenizer does not tell.
        turns: For chat messages, the characters of each, labelled by its role.
        has_special_tokens: Whether the tokenizer adds its own special tokens to such a text.
        n_encoder: How many of the tokens an encoder reads; the others begin its decoder's input, before the answer.
    """

    ids: tuple[int, ...]
    text: str | None = None
    offsets: Offsets | None = None
    turns: tuple[Span, ...] = ()
    has_special_tokens: bool = True
    n_encoder: int = 0

    @property
    def decoder_ids(self) -> tuple[int, ...]:
        """What stands before the answer in the part of the model that says it."""
        return self.ids[self.n_encoder :]


def read_prompt(lens: Speaker, prompt: Any) -> Prompt:
    """A prompt in any form that `Lens.answer` takes.

    Raises:
        InputError: It is none, or longer than the model takes.
    """
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
        return _with_start(lens, _chat(lens, prompt))
    if isinstance(prompt, str):  # always a text, also one that ends like the name of a picture
        return _with_start(lens, _text(lens, prompt))
    if isinstance(prompt, (list, tuple)) and any(isinstance(one, str) for one in prompt):
        raise InputError(f"Expected one prompt; got a {type(prompt).__name__} with texts. Ask for one answer each.")
    made = lens.prepare(prompt)
    ids = token_ids(made.arguments)
    if made.kind != "ids" or ids is None:
        raise InputError(
            f"An answer needs a text, chat messages or token ids as its prompt; got {type(prompt).__name__}."
        )
    return _with_start(lens, Prompt(ids=tuple(ids[0].tolist())))


def _text(lens: Speaker, text: str) -> Prompt:
    ids, offsets = tokenised(lens, text, special=True)
    if not text.strip() or not ids:
        raise InputError(f"Expected some text as a prompt; got {text!r}, which holds no words.")
    lens.prepare(list(ids))  # refuses what is too long
    return Prompt(ids=ids, text=text, offsets=offsets)


def _with_start(lens: Speaker, prompt: Prompt) -> Prompt:
    """For a model with an encoder, the tokens that its decoder begins with: they are not chosen by the model."""
    config = getattr(lens.model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return prompt
    made = lens.prepare(list(prompt.ids)).arguments.get("decoder_input_ids")
    if made is None:
        raise InputError(
            f"`{type(lens.model).__name__}` has a decoder that takes no tokens, so that it gives no answer."
        )
    forced = getattr(getattr(lens.model, "generation_config", None), "forced_bos_token_id", None)
    start = (*made[0].tolist(), *(() if forced is None else (forced,)))
    offsets = None if prompt.offsets is None else (*prompt.offsets, *(None for _ in start))
    return replace(prompt, ids=(*prompt.ids, *start), offsets=offsets, n_encoder=len(prompt.ids))


def tokenised(
    lens: Speaker, text: str, *, special: bool, as_target: bool = False
) -> tuple[tuple[int, ...], Offsets | None]:
    """The ids of a text, and where each stands in it if the tokenizer tells.

    Args:
        lens: With the tokenizer.
        text: The text.
        special: Whether the tokenizer adds its own special tokens.
        as_target: Whether it is what the model says, which some tokenizers cut differently from what it reads.
    """
    tokenizer = tokenizer_of(lens.processor)
    if tokenizer is None:
        raise InputError("Got a text, but this lens has no tokenizer. Pass one, or pass token ids.")
    check_unicode(text)
    is_fast = getattr(tokenizer, "is_fast", False)
    options = {"add_special_tokens": special} | ({"return_offsets_mapping": True} if is_fast else {})
    made = tokenizer(text_target=text, **options) if as_target else tokenizer(text, **options)
    if not is_fast:
        return tuple(made["input_ids"]), None
    return tuple(made["input_ids"]), tuple([(a, b) if b > a else None for a, b in made["offset_mapping"]])


def _chat(lens: Speaker, messages: Sequence[Any]) -> Prompt:
    tokenizer = tokenizer_of(lens.processor)
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError("Got chat messages, but this lens has no tokenizer with a chat template. Pass a text instead.")
    for one in messages:
        if not isinstance(one, Mapping) or not all(isinstance(one.get(key), str) for key in ("role", "content")):
            raise InputError(f'A chat message is {{"role": "user", "content": "…"}}; got {one!r:.80}.')
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids, offsets = tokenised(lens, text, special=False)
    lens.prepare(list(ids))  # refuses what is too long
    turns = _turns(tokenizer, messages, text)
    return Prompt(ids=ids, text=text, offsets=offsets, turns=turns, has_special_tokens=False)


def _turns(tokenizer: Any, messages: Sequence[Mapping[str, str]], text: str) -> tuple[Span, ...]:
    """The characters of each message with its marks, or of its content alone where a template renders no beginnings."""
    counts: Counter[str] = Counter()
    spans, end = [], 0
    for k, message in enumerate(messages):
        role = message["role"]
        counts[role] += 1
        label = role if counts[role] == 1 else f"{role} {counts[role]}"
        start, stop = end, _rendered(tokenizer, messages[: k + 1], text)
        if stop is None or stop <= end:
            content = message["content"].strip()
            start = text.find(content, end)
            stop = start + len(content)
        if 0 <= start < stop:
            spans.append(Span(label, start, stop))
            end = stop
    return tuple(spans)


def _rendered(tokenizer: Any, messages: Sequence[Any], text: str) -> int | None:
    """How much of the text the template makes of the first messages; None if it is no beginning of it."""
    try:
        beginning = tokenizer.apply_chat_template(list(messages), tokenize=False)
    except Exception:  # noqa: BLE001  templates raise what they like for a chat that does not end with its user
        return None
    return len(beginning) if text.startswith(beginning) else None
