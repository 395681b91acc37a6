"""The question: defaults, targets as weights on logits, and the question in one sentence.

All code that answers questions fills in here what was left open (method, output, prediction), and the signatures of
users' functions take their defaults from here. `Context` has the names of tokens and classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_whole
from tensorlens.models.texts import INCOMPLETE, check_unicode, token_labels
from tensorlens.operators.operator import check_token
from tensorlens.operators.plain import plain_logits
from tensorlens.recording.recording import Recording
from tensorlens.views.captions import after, headline_of, within
from tensorlens.views.labels import visible

if TYPE_CHECKING:
    from tensorlens.maps.token_map import TokenMap

METHOD = "tensor.in_out"
"""The method of `T.map`, `lens.maps` and `batch.maps`: it works for any model, with or without a head."""

METHOD_OF_CLASSES = "tensor.in_class"
"""The method of `Mapper`, of `tensorlens maps` and of the explorer for a model with a head."""

METHOD_OF_PICTURES = "tensor.contribution"
"""The first method for a picture in a model without a head."""

OUT_TOKEN = -1
"""The output of a question about one output: the last, which in a decoder predicts the next token."""

SHARE, MAX_NODES = 0.8, 200
"""Where a graph stops growing: the share of the flow into its nodes, and the largest number of nodes."""

Weights = dict[int, float]
"""Weights on logits by class."""


def own_prediction(logits: Tensor) -> Tensor:
    """(…): the class with the largest of logits (…, class), which is explained if there is no target."""
    return logits.argmax(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Feature:
    r"""A feature of a dictionary as a target, $w·x_i + b$ at a token: its activation wherever it is active.

    Attributes:
        number: Its number.
        block: The block that it reads.
        row: w, its row of the encoder.
        bias: b.
        component: What it decomposes: ``"feed-forward"`` or ``"attention"``.
        reads: The state it reads there: the component's output, its input, or the stream before it.
    """

    number: int
    block: int
    row: Tensor
    bias: float
    component: str
    reads: str

    def __str__(self) -> str:
        """Its name."""
        return f"feature {self.number} of block {self.block}"


Target = str | int | tuple[str | int, str | int] | Weights | Feature
"""A target: a token or class, a pair of them for a contrast, weights by class, or a feature."""


class Said(msgspec.Struct, frozen=True):
    """One of the classes that the model ranks highest."""

    name: str
    index: int
    probability: float


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The tokens or classes that a model can be asked about, and their names.

    Attributes:
        n_classes: Number of logits.
        tokenizer: For a language model, its tokenizer.
        labels: For a classifier, the names of the classes.
    """

    n_classes: int
    tokenizer: Any = None
    labels: dict[int, str] | None = None

    def weights(self, target: Target) -> Weights:
        """Weights on logits: +1 for the target, and -1 for the other of a pair; or weights as given."""
        if isinstance(target, dict):
            weights = dict[int, float]()
            for one, weight in target.items():  # a name and its number are one class
                index, number = self.index(one), float(weight) if isinstance(weight, Real) else math.nan
                weights[index] = weights.get(index, 0.0) + number
            weights = {index: weight for index, weight in weights.items() if weight}
            if not weights or not all(map(math.isfinite, weights.values())):
                raise InputError(f"Weights must be {{id: number}}, without NaN and not all zero; got {target!r:.80}.")
            return weights
        if isinstance(target, Feature):
            raise InputError(f"Expected a target on logits; got {target}, which `T.components` and `T.graph` explain.")
        if isinstance(target, (tuple, list)):
            if len(target) != 2:
                raise InputError(f"A contrast is a pair (target, other); got {len(target)} entries.")
            first, second = (self.index(one) for one in target)
            if first == second:
                raise InputError(f"The two targets of a contrast must differ; both are {self.name(first)!r}.")
            return {first: 1.0, second: -1.0}
        return {self.index(target): 1.0}

    def index(self, target: str | int) -> int:
        """The class behind a token string, a class label or a number."""
        if isinstance(target, Integral) and not isinstance(target, bool):
            return check_whole(target, "target", 0, self.n_classes - 1)
        if not isinstance(target, str):
            raise InputError(
                f"`target` must be a token string, a class label, a number, or a pair; got {type(target).__name__}."
            )
        if self.labels is not None:
            return self._label_index(target)
        return self._token_index(target)

    def name(self, index: int) -> str:
        """The name of class `index`."""
        if self.labels is not None:
            return str(self.labels.get(index, index))
        if self.tokenizer is None:
            return str(index)
        name = self.tokenizer.decode([index])
        return token_labels([index], self.tokenizer)[0] if INCOMPLETE in name else name  # a piece of a character

    def said(self, probabilities: Tensor, k: int = 5) -> tuple[Said, ...]:
        """The classes with the highest of some probabilities (class,)."""
        best = probabilities.topk(min(k, len(probabilities)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return tuple([Said(self.name(index), index, probability) for index, probability in pairs])

    def all_names(self) -> dict[int, str] | None:
        """The names of all classes; None if they have none."""
        if self.labels is not None or self.tokenizer is None:
            return self.labels
        ids = [[index] for index in range(self.n_classes)]
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        names = self.tokenizer.batch_decode(ids) if fast is None else fast.decode_batch(ids, skip_special_tokens=False)
        return dict(enumerate(names))

    def names(self, weights: Mapping[int, float]) -> str:
        """Weights on logits as text: ``Paris``, ``Paris − Rome``, ``0.5·Paris + 0.5·Lyon − Rome``."""
        terms = [
            (weight, f"{'' if abs(weight) == 1 else f'{abs(weight):.3g}·'}{self.name(i)}")
            for i, weight in weights.items()
        ]
        first = ("−" if terms[0][0] < 0 else "") + terms[0][1]
        return first + "".join(f" {'−' if weight < 0 else '+'} {term}" for weight, term in terms[1:])

    def _label_index(self, target: str) -> int:
        assert self.labels is not None
        exact = [index for index, label in self.labels.items() if str(label) == target]
        found = exact or [index for index, label in self.labels.items() if str(label).lower() == target.lower()]
        if len(found) > 1:
            raise InputError(f"{len(found)} classes are called {target!r}: {found[:8]}. Pass the number of one.")
        if found:
            return int(found[0])
        if target.isdecimal():
            return self.index(int(target))
        known = ", ".join(str(label) for label in list(self.labels.values())[:8])
        raise InputError(
            f"`target` must be a class of the model ({known}{', …' if len(self.labels) > 8 else ''}); got {target!r}."
        )

    def _token_index(self, target: str) -> int:
        if self.tokenizer is None:
            if target.isdecimal():
                return self.index(int(target))
            raise InputError(f"Got the target {target!r}, but this lens has no tokenizer. Pass the token's id.")
        check_unicode(target)
        if getattr(self.tokenizer, "has_labels_only", False):
            return self._labelled(target)
        ids = self.tokenizer(target, add_special_tokens=False)["input_ids"]
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if len(ids) == 1 and (ids[0] != unknown or target == self.tokenizer.unk_token):
            return int(ids[0])
        exact = self.tokenizer.convert_tokens_to_ids(target)
        if isinstance(exact, int) and exact != self.tokenizer.unk_token_id:
            return exact
        if unknown is not None and set(ids) == {unknown}:
            if target.isdecimal():  # an id, since the vocabulary has no such text
                return self.index(int(target))
            raise InputError(
                f"`target` must be one token of the vocabulary; {target!r} is not one. Name one, or pass its id."
            )
        pieces = [self.tokenizer.decode([i]) for i in ids]
        spaced = self.tokenizer(f" {target}", add_special_tokens=False)["input_ids"]
        hint = f" Did you mean {f' {target}'!r}, which is one token?" if len(spaced) == 1 else ""
        raise InputError(
            f"`target` must be one token; {target!r} is {len(ids)} of them: {pieces}.{hint} "
            "Name one token, such as the first of these, or pass its id."
        )

    def _labelled(self, target: str) -> int:
        """The only class with this label."""
        found = [index for index in range(self.n_classes) if self.name(index) == target]
        if len(found) != 1:
            raise InputError(f"{len(found)} of {self.n_classes} tokens have the label {target!r}. Pass the token's id.")
        return found[0]


class ReadTarget(NamedTuple):
    """A target as a person wrote it, read as weights on logits.

    Attributes:
        weights: Weights on logits by class.
        target: The target, written as its tokens.
        against: The contrast target; None without a contrast.
        note: How the target was read, if that differs from what was written; otherwise empty.
    """

    weights: Weights
    target: str
    against: str | None
    note: str


def read_target(classes: Classes, target: str | int, against: str | int | None, logits: Tensor) -> ReadTarget:
    """A target as people write it: its leading space may be missing, and it may have several tokens.

    “Rome” is read as “ Rome” if that is fewer tokens, or likelier and no more. Several tokens are the sum of their
    logits.

    Args:
        classes: The model's classes.
        target: A token, a text of several tokens, a class label or a number.
        against: The contrast target, in the same forms.
        logits: (class,) at the output that is explained; they say which token is likelier.

    Raises:
        InputError: the model does not know it, or the two sides of a contrast are the same.
    """
    sides = [_read_one(classes, one, logits) for one in (target, against) if one is not None]
    weights = dict(sides[0].weights)
    for index, weight in sides[1].weights.items() if len(sides) > 1 else ():
        weights[index] = weights.get(index, 0.0) - weight
    weights = {index: weight for index, weight in weights.items() if weight}
    if not weights:
        raise InputError(f"The two targets of a contrast must differ; both are {sides[0].target!r}.")
    note = " ".join(side.note for side in sides if side.note)
    return ReadTarget(weights, sides[0].target, sides[1].target if len(sides) > 1 else None, note)


def named(classes: Classes, weights: Weights) -> ReadTarget:
    """Weights on logits with the names of what they add and of what they subtract."""
    added, subtracted = ({k: abs(w) for k, w in weights.items() if (w > 0) is is_added} for is_added in (True, False))
    if not added:
        return ReadTarget(weights, classes.names(weights), None, "")
    return ReadTarget(weights, classes.names(added), classes.names(subtracted) if subtracted else None, "")


def _read_one(classes: Classes, target: str | int, logits: Tensor) -> ReadTarget:
    if classes.tokenizer is None or not isinstance(target, str):
        index = classes.index(target)
        return ReadTarget({index: 1.0}, classes.name(index), None, "")
    if not target:
        raise InputError("`target` must be a token, a text, a class label or a number; got an empty text.")
    spaced = _tokens(classes, f" {target}")
    try:
        index = classes.index(target)
    except InputError:
        written = _tokens(classes, target)
        if len(spaced) != 1 and (not written or getattr(classes.tokenizer, "unk_token_id", None) in written):
            raise
    else:
        written = [index]
    note, is_likelier = "", len(spaced) == len(written) and logits[spaced[0]] > logits[written[0]]
    if not target[:1].isspace() and spaced and (len(spaced) < len(written) or not written or is_likelier):
        why = ["one token"] * (len(spaced) == 1) + ["likelier"] * is_likelier
        note = f"“{target}” is taken as “ {target}”, which is {' and '.join(why) or 'fewer tokens'}."
        target, written = f" {target}", spaced
    if len(written) > 1:
        note = f"{note} “{target}” is {len(written)} tokens; their logits are added up.".strip()
    return ReadTarget({index: float(written.count(index)) for index in written}, target, None, note)


def _tokens(classes: Classes, text: str) -> list[int]:
    """The tokens of a text; empty if they do not decode to it, or if a tokenizer of characters lacks one of them."""
    if getattr(classes.tokenizer, "has_labels_only", False):
        return []
    try:
        ids = classes.tokenizer(text, add_special_tokens=False)["input_ids"]
    except InputError:
        return []
    return list(ids) if classes.tokenizer.decode(ids) == text else []


def no_head(model: str) -> MethodError:
    """The error for a question about classes to a model that has none."""
    return MethodError(
        f"`{model}` has no head that gives logits for each token or for the whole input, so it has no target and "
        "no components to explain. Leave these out to explain its output states (`tensor.in_out`), or load the model "
        "with its head."
    )


@dataclass(frozen=True, kw_only=True)
class Context:
    """The origin of a map, and the names of classes.

    Attributes:
        tokens: A label for each input token.
        classes: Names of the classes, or None for a model without a head.
        meta: Model, versions and picture, for the map's `meta`.
        out_tokens: A label for each output, if different from those of the inputs.
    """

    tokens: tuple[str, ...]
    classes: Classes | None
    meta: dict[str, Any]
    out_tokens: tuple[str, ...] | None = None


# What a question leaves open -----------------------------------------------------------------------------------------


def one_output(recording: Recording, out_token: int) -> int:
    """The requested output; a head that reads the whole input at once has only one."""
    return 0 if recording.pools else check_token(out_token, recording.states[-1].shape[1])


def has_one_row(recording: Recording, method: str | None) -> bool:
    """Whether a map has only one row, because the logits of the whole input are explained."""
    return recording.pools and method == METHOD_OF_CLASSES


# From here on T is an `AttentionTensor`, which belongs to a layer above this one.


def has_predictions(T: Any) -> bool:
    """Whether the model has a head that predicts something."""
    return T.context.classes is not None and T.operator.recording.has_head


def default_method(T: Any, target: Any = None) -> str:
    """The method for the usual first question: why did the model say this?

    That is In+Class if the blocks asked for reach the head, or if a target is named. Otherwise it is In+Out, and for a
    picture the length of each patch's contribution, since the directions of its output have no names.
    """
    reaches_head = has_predictions(T) and T.operator.span.stop == T.operator.recording.n_blocks
    if reaches_head or target is not None:
        return METHOD_OF_CLASSES
    return METHOD if T.context.meta.get("grid") is None else METHOD_OF_PICTURES


def default_output(T: Any) -> int:
    """The output to look at first: the masked token, the token that represents a picture, or the last one.

    The last of an encoder is the last token of the text, not the special one after it.
    """
    mask, grid = getattr(getattr(T.context.classes, "tokenizer", None), "mask_token", None), T.context.meta.get("grid")
    if mask in T.out_tokens:
        return T.out_tokens.index(mask)
    if grid is not None and grid["first"] > 0:
        return 0
    n_out, places = T.shape[0], T.context.meta.get("offsets") or ()  # None for a token that is not text
    is_encoder = not T.context.meta.get("causal") and len(places) == n_out
    return max((k for k, place in enumerate(places) if place), default=n_out - 1) if is_encoder else n_out - 1


@dataclass(frozen=True, kw_only=True)
class MapQuestion:
    """A question to an operator. The command line and the explorer fill in open parts here.

    Attributes:
        method: A name in `METHODS`.
        out_token: The output, or None for all of them.
        target: What is explained; None for the model's own prediction.
        against: The contrast target, or None.
    """

    method: str
    out_token: int | None
    target: str | int | None = None
    against: str | int | None = None

    @classmethod
    def complete(
        cls,
        T: Any,
        method: str | None,
        out_token: int | None,
        target: str | int | None = None,
        against: str | int | None = None,
        *,
        is_one: bool = False,
    ) -> MapQuestion:
        """Fill in method and output. A prediction and a picture are explained at one output, a method at every one.

        Args:
            T: The operator.
            method: A name in `METHODS`; the default of the model if None.
            out_token: The output, or None.
            target: What is explained.
            against: The contrast target.
            is_one: Whether None means the one output to look at first, even if a method was named.

        Raises:
            InputError: there is no such output.
        """
        if out_token is not None:
            check_token(out_token, T.shape[0])
        chosen = default_method(T, target) if method is None else method
        is_one = is_one or method is None and chosen != METHOD
        if has_one_row(T.operator.recording, chosen):
            out_token = None  # its head reads the whole input at once
        elif out_token is None and is_one and not T.operator.recording.pools:
            out_token = default_output(T)
        return cls(method=chosen, out_token=out_token, target=target, against=against)

    def place(self, T: Any) -> int:
        """The one output of headline and predictions."""
        chosen = default_output(T) if self.out_token is None else self.out_token
        return 0 if T.operator.recording.pools else chosen % T.shape[0]

    def predictions(self, T: Any, k: int) -> list[Any]:
        """The model's predictions at the chosen output; empty for all outputs, or for a model without a head."""
        return T.predictions(k, self.place(T)) if self._is_one(T) and has_predictions(T) else []

    def headlined(self, T: Any) -> Headlined | None:
        """The target as people write it; None without a head, or for the predictions at every output."""
        recording = T.operator.recording
        reaches_head = has_predictions(T) and T.operator.span.stop == recording.n_blocks
        if not reaches_head or self.method != METHOD_OF_CLASSES or self.target is None and not self._is_one(T):
            return None
        return headlined(recording, T.context, self.place(T), self.target, self.against)

    def answered(self, T: Any, told: Headlined | None, compute: Callable[..., TokenMap]) -> TokenMap:
        """The map, with its headline if it is about one output; `compute` takes method, output and target."""
        if told is None:
            pair = self.target if self.against is None else (self.target, self.against)
            found = compute(self.method, self.out_token, pair)
            if self.method != METHOD_OF_PICTURES or T.context.meta.get("grid") is None or not self._is_one(T):
                return found
            headline = headline_of_states(T.context, T.out_tokens, self.place(T))
            return replace(found, meta=found.meta | {"headline": headline})
        found = compute(self.method, self.out_token, told.asked.weights)
        return replace(found, meta=found.meta | told.meta) if self._is_one(T) else found

    def _is_one(self, T: Any) -> bool:
        return self.out_token is not None or T.operator.recording.pools


# The question in one sentence -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Headlined:
    """A question about a target at one output.

    Attributes:
        asked: The target on logits, and its name.
        probability: The model's probability of the target; None for a sum of several tokens.
        where: The text before the output, or the input that it belongs to; see `place_of`.
        logits: (class,) the model's own logits at that output.
    """

    asked: ReadTarget
    probability: float | None
    where: str
    logits: Tensor

    @property
    def meta(self) -> dict[str, Any]:
        """The part that maps store, so that every view shows the same headline."""
        why = {
            "target": self.asked.target,
            "probability": self.probability,
            "against": self.asked.against,
            "where": self.where,
        }
        return {"why": why} | ({"note": self.asked.note} if self.asked.note else {})

    @property
    def headline(self) -> str:
        """Why “ Paris” (70 %) rather than “ London” after “… in the city of”?"""
        return headline_of(self.meta, self.asked.target)


def headlined(
    recording: Recording, context: Context, out_token: int, target: Any = None, against: Any = None
) -> Headlined:
    """A question as people write it; about the model's top prediction if no target is named.

    Args:
        recording: The pass.
        context: Names of tokens and classes; there must be classes.
        out_token: The output, counted from the start.
        target: A token, a text of several tokens, a class or a number; see `read_target`.
        against: The same for what it is compared with.
    """
    assert context.classes is not None, "only for a model with a head"
    if isinstance(target, (tuple, list)):
        raise InputError(f"`target` must be one token or class; got {target!r:.60}. Pass the other as `against`.")
    logits = plain_logits(recording, [0 if recording.pools else out_token])[0]
    asked = read_target(context.classes, int(own_prediction(logits)) if target is None else target, against, logits)
    return placed(recording, context, out_token, asked, logits)


def placed(recording: Recording, context: Context, out_token: int, asked: ReadTarget, logits: Tensor) -> Headlined:
    """A target with its probability and its place."""
    added = [index for index, weight in asked.weights.items() if weight > 0]
    chance = float(logits.float().softmax(-1)[added[0]]) if len(added) == 1 else None
    where = place_of(context, None if recording.pools else out_token)
    return Headlined(asked=asked, probability=chance, where=where, logits=logits)


def headline_of_states(context: Context, out_tokens: Sequence[str], out_token: int) -> str:
    """The question without a head: about the state that represents a picture, or about all states of a text."""
    is_one = context.meta.get("grid") is not None
    what = f"the output “{out_tokens[out_token]}”" if is_one else "these outputs"
    return f"Why {what} {place_of(context, None)}?"


def place_of(context: Context, out_token: int | None) -> str:
    """The place of an output: after which words, or at which token of a text, or in which text or picture."""
    if context.meta.get("grid") is not None:
        return "for this picture"
    text, labels = context.meta.get("text"), context.out_tokens or context.tokens
    if context.meta.get("causal"):
        is_last = out_token is None or out_token % len(labels) == len(labels) - 1
        between = "" if context.classes is None or context.classes.tokenizer is not None else " "
        return after(text if isinstance(text, str) and is_last else between.join(labels[: (out_token or 0) + 1]))
    at = f"at “{visible(labels[out_token].strip())}” " if out_token is not None and len(labels) > 1 else ""
    return at + within(text if isinstance(text, str) else " ".join(context.tokens))
