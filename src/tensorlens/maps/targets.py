"""Targets: a token, a class or a contrast of two as weights on logits; `Context`: names of classes and tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from tensorlens.errors import InputError, MethodError
from tensorlens.models.texts import check_unicode

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
            if not target or not all(isinstance(weight, Real) and math.isfinite(weight) for weight in target.values()):
                raise InputError(
                    f"Weights must be {{id: number}} with at least one entry and no NaN; got {target!r:.80}."
                )
            return {self.index(index): float(weight) for index, weight in target.items()}
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
        if isinstance(target, int) and not isinstance(target, bool):
            if not 0 <= target < self.n_classes:
                raise InputError(f"`target` must be from 0 to {self.n_classes - 1}; got {target}.")
            return target
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
        return self.tokenizer.decode([index]) if self.tokenizer is not None else str(index)

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
        known = ", ".join(str(label) for label in list(self.labels.values())[:8])
        raise InputError(
            f"`target` must be a class of the model ({known}{', …' if len(self.labels) > 8 else ''}); got {target!r}."
        )

    def _token_index(self, target: str) -> int:
        if self.tokenizer is None:
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

    “Rome” is read as “ Rome” if that is one token and likelier. Several tokens are the sum of their logits.

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
    is_missing = not target[:1].isspace() and len(spaced) == 1 and spaced != written
    if is_missing and (len(written) != 1 or logits[spaced[0]] > logits[written[0]]):
        why = "one token and likelier" if len(written) == 1 else "one token"
        return ReadTarget({spaced[0]: 1.0}, f" {target}", None, f"“{target}” is taken as “ {target}”, which is {why}.")
    weights = {index: float(written.count(index)) for index in written}
    note = f"“{target}” is {len(written)} tokens; their logits are added up." if len(written) > 1 else ""
    return ReadTarget(weights, target, None, note)


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
        f"`{model}` has no head that gives logits for each token or for the whole input, so it has no classes to "
        "explain. Use `tensor.in_out` or `tensor.norm`, or load the model with its head."
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
