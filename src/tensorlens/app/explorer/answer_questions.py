"""What may be asked about an answer: JSON from a stranger, made into a checked `AnswerAsk`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tensorlens.app.explorer.limits import Limits
from tensorlens.app.explorer.questions import check_text, read_subject
from tensorlens.errors import InputError

GROUPS = ("sentences", "words", "lines", "tokens", "turns")
ROWS = ("sentences", "words", "lines", "tokens", "answer")
MOST_NEW_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """A model, a prompt and what was said: what one model pass is kept for.

    Attributes:
        model: One of the names given at start.
        prompt: The text.
        is_chat: Whether the prompt is what a user says in a chat, to be put into the model's own template.
        answer: The answer to explain, or None for the model's own.
        max_new_tokens: How long that may become.
    """

    model: str
    prompt: str
    is_chat: bool
    answer: str | None
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class AnswerAsk:
    """What someone wants to know of an answer.

    Attributes:
        spoken: Model, prompt and answer.
        against: Another answer: why the one rather than the other?
        groups: Parts of the prompt.
        rows: Parts of the answer; all of it in a contrast.
    """

    spoken: Spoken
    against: str | None
    groups: Literal["sentences", "words", "lines", "tokens", "turns"]
    rows: Literal["sentences", "words", "lines", "tokens", "answer"]

    @property
    def key(self) -> str:
        """A name for the map: the same question has the same one."""
        text = json.dumps(["answer", asdict(self)], sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_answer_ask(document: Any, limits: Limits) -> AnswerAsk:
    """The question in a JSON document.

    Raises:
        InputError: a part is missing, of the wrong kind or too long.
    """
    prompt = document.get("prompt") if isinstance(document, Mapping) else None
    subject = read_subject({"model": document.get("model"), "text": prompt} if prompt is not None else document, limits)
    if subject.text is None:
        raise InputError("Expected a prompt, got none. Type one.")
    n = document.get("max_new_tokens", 64)
    if type(n) is not int or not 1 <= n <= MOST_NEW_TOKENS:
        raise InputError(f"Expected `max_new_tokens` from 1 to {MOST_NEW_TOKENS}, got {n!r:.40}. Send a number.")
    answer, against = (_text(document, name, limits) for name in ("answer", "against"))
    groups, rows = _one_of(document, "groups", GROUPS), _one_of(document, "rows", ROWS)
    return AnswerAsk(
        spoken=Spoken(
            model=subject.model,
            prompt=subject.text,
            is_chat=document.get("is_chat") is True,
            answer=answer,
            max_new_tokens=n,
        ),
        against=against,
        groups=groups,
        rows=rows if against is None else "answer",
    )


def _text(document: Mapping[str, Any], name: str, limits: Limits) -> str | None:
    value = document.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InputError(f"Expected `{name}` to be text, got {value!r:.40}. Send a string.")
    check_text(value, limits)
    return value


def _one_of(document: Mapping[str, Any], name: str, known: tuple[str, ...]) -> Any:
    value = document.get(name, known[0])
    if value not in known:
        raise InputError(f"Expected `{name}` to be one of {', '.join(known)}, got {value!r:.40}. Choose one.")
    return value
