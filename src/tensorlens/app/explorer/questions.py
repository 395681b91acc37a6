"""Checked questions, from JSON and pictures that anyone may send. Nothing here is a path, or becomes one.

Each question is a `msgspec` record with the fields that the page sends; `read_question` refuses everything else.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tensorlens.app.explorer import Limits
from tensorlens.errors import InputError, missing_extra
from tensorlens.maps.methods import METHODS
from tensorlens.models.texts import check_unicode
from tensorlens.recording.conventions import Rules

Whole = Annotated[int, Meta(gt=-(2**31), lt=2**31)]
"""A whole number for a position or an id; larger ones would overflow later."""
Pick = Annotated[str, Meta(min_length=1, max_length=200)] | Whole
"""A token or class by its name, or by its number."""
Heads = Annotated[dict[Whole, Annotated[list[Whole], Meta(max_length=1000)]], Meta(max_length=1000)]

LONGEST_SIDE = 1024
"""Pixels per side of a picture that is kept; models use a few hundred."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


class OpenAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A model to load, one of those named at start; every other question names one too."""

    model: str

    def check(self, limits: Limits) -> None:
        """Refuse questions that the types alone accept.

        Raises:
            InputError: a part is missing, does not exist or is too long.
        """
        check_unicode(self.model)


class Ask(OpenAsk, frozen=True, kw_only=True):
    """A question for a map.

    Attributes:
        text: The text, or None.
        image: The id of an uploaded picture, or None.
        rules: A rule set by name; None for the recommended one, or the explorer's.
        method: A name in `METHODS`, or None for the default method.
        out_token: The output, or None for all of them.
        is_one: Whether None means the one output to look at first instead.
        target: What to explain, or None for the model's own prediction.
        against: The contrast target, or None.
        blocks: First block and the one after the last, or None for all.
        heads: Blocks and their heads, counted from the first block of the model.
        keeps_heads: Whether to keep only those heads, or all but those.
        at: The output whose predictions are shown beside the map; not a part of the question itself.
    """

    text: str | None = None
    image: str | None = None
    rules: str | None = None
    method: str | None = None
    out_token: Whole | None = None
    is_one: bool = False
    target: Pick | None = None
    against: Pick | None = None
    blocks: tuple[Whole, Whole] | None = None
    heads: Heads | None = None
    keeps_heads: bool = False
    at: Whole | None = None

    @property
    def digest(self) -> str:
        """A name for the map: the same question has the same one."""
        return _digest(msgspec.structs.replace(self, at=None))

    def check(self, limits: Limits) -> None:
        """Refuse an input, a method, rules or a target that do not exist."""
        super().check(limits)
        if (self.text is None) == (self.image is None):
            raise InputError("Expected a text or an image, got neither or both. Type a text or drop a picture.")
        _check_texts(limits, self.text)
        Rules.of(self.rules)
        if self.method is not None and self.method not in METHODS:
            raise InputError(f"TensorLens has no method {self.method[:60]!r}. Choose one of {', '.join(METHODS)}.")
        if self.against is not None and self.target is None:
            raise InputError("Expected a target besides the contrast target, got none. Choose what to explain first.")
        for pick in (self.target, self.against):
            if isinstance(pick, str):
                check_unicode(pick)


class AblateAsk(Ask, frozen=True, kw_only=True):
    """The model without one component, for what a map is about."""

    component: Annotated[str, Meta(min_length=1, max_length=100)]


class WhyAsk(Ask, frozen=True, kw_only=True):
    """Why a head attended from one token to another: the pairs behind its attention score."""

    block: Whole
    head: Whole
    query: Whole
    key: Whole


class CircuitAsk(Ask, frozen=True, kw_only=True):
    """The circuit between the text of a map and another one with as many tokens."""

    corrupted: str

    def check(self, limits: Limits) -> None:
        """Refuse a picture, and texts that are empty or too long."""
        super().check(limits)
        if self.text is None:
            raise InputError("A circuit compares two texts. Type a text in place of the picture.")
        _check_texts(limits, self.corrupted)


class AnswerAsk(OpenAsk, frozen=True, kw_only=True):
    """A question about an answer.

    Attributes:
        prompt: The text.
        is_chat: Whether the prompt is a user's chat message, to be rendered by the model's own template.
        answer: The answer to explain, or None for the model's own.
        max_new_tokens: Largest number of generated tokens.
        against: Contrast answer: the map is of the answer minus this one, all of it in one row.
        groups: Parts of the prompt.
        rows: Parts of the answer.
        rules: A rule set by name; None for the one that is recommended for passages.
    """

    prompt: str
    is_chat: bool = False
    answer: str | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=512)] = 64
    against: str | None = None
    groups: Literal["sentences", "words", "lines", "tokens", "turns"] = "sentences"
    rows: Literal["sentences", "words", "lines", "tokens", "answer"] = "sentences"
    rules: str | None = None

    @property
    def said(self) -> tuple[Any, ...]:
        """Everything that determines the answer: the key of a kept model pass."""
        return self.model, self.prompt, self.is_chat, self.answer, self.max_new_tokens, self.rules

    @property
    def digest(self) -> str:
        """A name for the map: the same question has the same one."""
        return _digest(self)

    def check(self, limits: Limits) -> None:
        """Refuse texts that are empty or too long."""
        super().check(limits)
        Rules.of(self.rules)
        _check_texts(limits, self.prompt, self.answer, self.against)


class SimilarAsk(OpenAsk, frozen=True, kw_only=True):
    """A question about two texts.

    Attributes:
        first: The text of the rows.
        second: The text of the columns.
        against: A third text: why is the second closer to the first than this one is?
        groups: Parts of the texts.
    """

    first: str
    second: str
    against: str | None = None
    groups: Literal["words", "sentences", "lines", "tokens"] = "words"

    def check(self, limits: Limits) -> None:
        """Refuse texts that are empty or too long."""
        super().check(limits)
        _check_texts(limits, self.first, self.second, self.against)


AnyQuestion = TypeVar("AnyQuestion", bound=OpenAsk)


def read_question(body: bytes, kind: type[AnyQuestion], limits: Limits) -> AnyQuestion:
    """The question in the body of a request.

    Raises:
        InputError: it is not JSON, or a part is missing, of the wrong kind or too long.
    """
    try:
        document = json.loads(body)  # accepts half a character: `check_unicode` has a better error
    except (ValueError, RecursionError) as error:
        raise InputError(f"Expected a JSON document, got something else ({type(error).__name__}).") from error
    try:
        found = msgspec.convert(document, kind, str_keys=True)
    except (msgspec.ValidationError, UnicodeError) as error:  # half a character where a number should be
        raise InputError(f"This question is malformed. {error}.") from None
    found.check(limits)
    return found


def _check_texts(limits: Limits, *texts: str | None) -> None:
    for text in (one for one in texts if one is not None):
        if not text.strip():
            raise InputError("Expected some text, got none. Type a sentence.")
        if len(text) > limits.characters:
            raise InputError(f"Expected at most {limits.characters} characters, got {len(text)}. Shorten the text.")
        check_unicode(text)


def _digest(question: OpenAsk) -> str:
    text = msgspec.json.encode([type(question).__name__, question])
    return hashlib.sha256(text).hexdigest()[:32]


def read_picture(data: bytes, limits: Limits) -> Any:
    """Decode an uploaded picture, upright and in RGB, and make it small.

    Raises:
        InputError: not a picture, damaged, or one with more pixels than the limit; sizes are read before pixels are.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise missing_extra("Dropping an image", "pillow", "explore") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large pictures; our own limit is lower
            opened = Image.open(io.BytesIO(data), formats=_FORMATS)
        width, height = opened.size
        if width * height > limits.image_pixels:
            raise InputError(
                f"Expected a picture of at most {limits.image_pixels:,} pixels, got {width} × {height}. Shrink it."
            )
        if width < 1 or height < 1:
            raise InputError("Expected a picture with pixels, got an empty one. Choose another file.")
        opened.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))
        picture = ImageOps.exif_transpose(opened).convert("RGB")
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        return picture
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001  decoders raise whatever a hostile file provokes
        raise InputError(
            f"Expected a PNG, JPEG, WebP, GIF or BMP picture, got a file that cannot be read ({type(error).__name__}). "
            "Choose another file."
        ) from error
