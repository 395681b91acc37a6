"""Defaults for what a question leaves open (method, output, prediction), and the question in one sentence.

All code that answers questions uses this file, and the signatures of users' functions take their defaults from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tensorlens.operators.operator import check_token
from tensorlens.recording.recording import Recording

if TYPE_CHECKING:
    from tensorlens.maps.token_map import TokenMap


from collections.abc import Mapping, Sequence

from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.maps.targets import Context, ReadTarget, own_prediction, read_target
from tensorlens.operators.plain import plain_logits
from tensorlens.views.captions import after, headline_of, within

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
    """The output to look at first: the masked token, the token that represents a picture, or the last one."""
    mask, grid = getattr(getattr(T.context.classes, "tokenizer", None), "mask_token", None), T.context.meta.get("grid")
    if mask in T.out_tokens:
        return T.out_tokens.index(mask)
    return 0 if grid is not None and grid["first"] > 0 else T.shape[0] - 1


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
    added = [index for index, weight in asked.weights.items() if weight > 0]
    chance = float(logits.float().softmax(-1)[added[0]]) if len(added) == 1 else None
    n_out = recording.states[-1].shape[1]
    return Headlined(
        asked=asked, probability=chance, where=place_of(context.meta, context.tokens, out_token, n_out), logits=logits
    )


def headline_of_states(context: Context, out_tokens: Sequence[str], out_token: int) -> str:
    """The question without a head: about the state that represents a picture, or about all states of a text."""
    is_one = context.meta.get("grid") is not None
    what = f"the output “{out_tokens[out_token]}”" if is_one else "these outputs"
    return f"Why {what} {place_of(context.meta, context.tokens, out_token, len(out_tokens))}?"


def place_of(meta: Mapping[str, Any], tokens: Sequence[str], out_token: int, n_out: int) -> str:
    """The place of an output: after which words, or in which text or picture."""
    if meta.get("grid") is not None:
        return "for this picture"
    text = meta.get("text")
    if not meta.get("causal"):
        return within(text if isinstance(text, str) else " ".join(tokens))
    is_last = out_token % n_out == n_out - 1
    return after(text if isinstance(text, str) and is_last else "".join(tokens[: out_token % n_out + 1]))
