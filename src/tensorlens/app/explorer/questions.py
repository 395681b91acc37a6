"""What may be asked: JSON from a stranger, made into a checked `Ask`. Nothing here is or becomes a path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from tensorlens.app.explorer.limits import Limits
from tensorlens.app.options import RULES
from tensorlens.errors import InputError
from tensorlens.maps.methods import METHODS
from tensorlens.models.plain_text import check_unicode

Pick = str | int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and its input: what one model pass is kept for.

    Attributes:
        model: One of the names given at start.
        text: The text, or None.
        image: The id of an uploaded picture, or None.
        rules: The member of the family, a name in `RULES`; None for the one that the explorer was started with.
    """

    model: str
    text: str | None
    image: str | None
    rules: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A map that someone wants.

    Attributes:
        subject: Model and input.
        method: A name in `METHODS`, or None for the one that answers the first question a model raises.
        out_token: The output, or None for every one.
        is_one: Whether None means the one that a reader looks at first instead.
        target: What to explain, or None for the model's own prediction.
        against: The other one of a contrast, or None.
        blocks: First block and the one after the last, or None for all.
        heads: Blocks and their heads, counted from the first block of the model.
        keeps_heads: Whether only those heads are kept, or all but those.
        at: The output whose predictions are wanted beside the map; no part of the question itself.
    """

    subject: Subject
    method: str | None = None
    out_token: int | None = None
    is_one: bool = False
    target: Pick | None = None
    against: Pick | None = None
    blocks: tuple[int, int] | None = None
    heads: tuple[tuple[int, tuple[int, ...]], ...] = ()
    keeps_heads: bool = False
    at: int | None = None

    @property
    def key(self) -> str:
        """A name for the answer: the same question has the same one."""
        return hashlib.sha256(json.dumps(asdict(replace(self, at=None)), sort_keys=True).encode()).hexdigest()[:32]


def read_ask(document: Any, limits: Limits) -> Ask:
    """The question in a JSON document.

    Raises:
        InputError: a part is missing, of the wrong kind or too long.
    """
    subject = read_subject(document, limits)
    method = document.get("method")
    if method is not None and (not isinstance(method, str) or method not in METHODS):
        raise InputError(f"Expected a method by name, got {_brief(method)}. Choose one of {', '.join(METHODS)}.")
    target, against = (_pick(document, name) for name in ("target", "against"))
    if against is not None and target is None:
        raise InputError("Expected a target with the other one of a contrast, got none. Choose what to explain first.")
    return Ask(
        subject=subject,
        method=method,
        out_token=_number(document, "out_token"),
        is_one=document.get("is_one") is True,
        target=target,
        against=against,
        blocks=_blocks(document.get("blocks")),
        heads=_heads(document.get("heads")),
        keeps_heads=document.get("keeps_heads") is True,
        at=_number(document, "at"),
    )


def read_subject(document: Any, limits: Limits) -> Subject:
    """Model and input in a JSON document."""
    if not isinstance(document, Mapping):
        raise InputError(f"Expected a JSON object, got {_brief(document)}. Send names and values.")
    model, text, image, rules = (document.get(name) for name in ("model", "text", "image", "rules"))
    for name, value in (("model", model), ("text", text), ("image", image), ("rules", rules)):
        if value is not None and not isinstance(value, str):
            raise InputError(f"Expected `{name}` to be text, got {_brief(value)}. Send a string.")
    if model is None:
        raise InputError("Expected the name of a model, got none. Choose one of those on the page.")
    if (text is None) == (image is None):
        raise InputError("Expected a text or an image, got neither or both. Type a text or drop a picture.")
    if text is not None:
        check_text(text, limits)
    if rules is not None and rules not in RULES:
        raise InputError(f"Expected one of {', '.join(RULES)} as `rules`, got {_brief(rules)}. Choose one on the page.")
    return Subject(model=model, text=text, image=image, rules=rules)


def read_model(document: Any) -> str:
    """The name of a model that is to be opened."""
    name = document.get("model") if isinstance(document, Mapping) else None
    if not isinstance(name, str):
        raise InputError("Expected the name of a model, got none. Choose one of those on the page.")
    return name


def read_output(document: Any) -> int:
    """Which output's predictions are wanted; the last if it does not say."""
    number = _number(document, "out_token")
    return -1 if number is None else number


def read_component(document: Any) -> str:
    """The name of a component that is to be switched off."""
    name = document.get("component")
    if not isinstance(name, str) or not 0 < len(name) <= 100:
        raise InputError(f"Expected a component by name, got {_brief(name)}. Choose one in the picture.")
    return name


class Score(NamedTuple):
    """One attention score: of which head, from which token to which."""

    block: int
    head: int
    query: int
    key: int


def read_score(document: Any) -> Score:
    """The score that is to be explained."""
    found = [_number(document, name) for name in Score._fields]
    if None in found:
        raise InputError(f"Expected the numbers {', '.join(Score._fields)}, got {found}. Choose a head in the picture.")
    return Score(*(number for number in found if number is not None))


def check_text(text: str, limits: Limits) -> None:
    """Refuse a text that holds nothing, is too long or is no Unicode."""
    if not text.strip():
        raise InputError("Expected some text, got none. Type a sentence.")
    if len(text) > limits.characters:
        raise InputError(f"Expected at most {limits.characters} characters, got {len(text)}. Shorten the text.")
    check_unicode(text)


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number that a position or an id can be; others overflow further in."""
    return type(value) is int and abs(value) < 2**31


def _number(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and not _is_whole(value):
        raise InputError(f"Expected `{name}` to be a whole number or null, got {_brief(value)}. Send a position.")
    return value


def _pick(document: Mapping[str, Any], name: str) -> Pick | None:
    value = document.get(name)
    if isinstance(value, str) and 0 < len(value) <= 200:
        check_unicode(value)
        return value
    if value is None or _is_whole(value):
        return value
    raise InputError(f"Expected `{name}` to be a token, a class or its number, got {_brief(value)}. Choose one.")


def _blocks(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value)):
        return value[0], value[1]
    raise InputError(f"Expected `blocks` to be two whole numbers such as [3, 9], got {_brief(value)}. Send a range.")


def _heads(value: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if value is None:
        return ()
    try:
        if len(value) > 1_000 or any(len(heads) > 1_000 for heads in value.values()):
            raise ValueError("too many")
        found = {int(block): tuple(sorted(set(heads))) for block, heads in value.items()}
        if not all(_is_whole(number) for block, heads in found.items() for number in (block, *heads)):
            raise ValueError("not whole")
    except (AttributeError, TypeError, ValueError):
        raise InputError(
            f'Expected `heads` as blocks and their heads such as {{"3": [0, 2]}}, got {_brief(value)}. Send an object.'
        ) from None
    return tuple(sorted(found.items()))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
