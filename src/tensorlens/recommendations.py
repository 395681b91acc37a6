"""Defaults: the rules and the method for a question, and the output to look at first.

`recommended` is the only table of them: Python, command line and explorer all use it and give the same answers. Nothing
here imports torch, so help and usage errors appear at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from tensorlens.errors import InputError
from tensorlens.recording.conventions import Rules
from tensorlens.views.printing import Printed

if TYPE_CHECKING:
    from tensorlens.maps.headlines import Headlined
    from tensorlens.maps.token_map import TokenMap
    from tensorlens.tensor import AttentionTensor, Prediction

QUESTIONS = ("word", "passage", "component", "paper")
"""Questions that need no choice of rules and method."""


@dataclass(frozen=True, kw_only=True)
class Recommendation(Printed):
    """What benchmarks with known answers recommend for a question.

    Attributes:
        question: A name in `QUESTIONS`.
        rules: The rule set.
        method: A name in `METHODS`; ``"components"`` for `AttentionTensor.components`.
        target: What is explained of the prediction: its ``"logit"``, or its logit minus that of the ``"runner_up"``,
            the likeliest other token.
        because: The reason in one sentence, with a number and the page that documents it.
    """

    question: str
    rules: Rules
    method: str
    target: Literal["logit", "runner_up"]
    because: str


def recommended(question: str = "word") -> Recommendation:
    """The rules, the method and the target recommended for a question.

    Args:
        question: ``"word"`` (which word decided?), ``"passage"`` (which sentence?), ``"component"`` (which head or
            feed-forward?) or ``"paper"`` (the paper's own operator).

    Raises:
        InputError: there is no such question.
    """
    if question not in QUESTIONS:
        raise InputError(f"The question must be one of {', '.join(QUESTIONS)}; got {question!r:.60}.")
    return _TABLE[question]


_TABLE = {
    one.question: one
    for one in (
        Recommendation(
            question="word",
            rules=Rules.attn_lrp(),
            method="tensor.in_class",
            target="logit",
            because="on held-out sentences of four models it ranks the deciding word above every baseline, by 0.07 to "
            "0.14 of the reciprocal rank (docs/what-to-use.md).",
        ),
        Recommendation(
            question="passage",
            rules=Rules(),
            method="tensor.in_class",
            target="runner_up",
            because="with the runner-up's logit subtracted, the right sentence is first in 35 of 35 held-out "
            "documents of SmolLM2; the sum of centred logits finds 19 of them (docs/what-to-use.md).",
        ),
        Recommendation(
            question="component",
            rules=Rules.jacobian(),
            method="components",
            target="logit",
            because="jacobian predicts best what patching a component does, with a correlation of 0.92 on held-out "
            "prompts of SmolLM2; the paper's rules have 0.75 (docs/what-to-use.md).",
        ),
        Recommendation(
            question="paper",
            rules=Rules.paper(),
            method="tensor.in_class",
            target="logit",
            because="this is the operator of the paper: attention, norms and gates are kept fixed "
            "(docs/paper-and-code.md).",
        ),
    )
}


# What a question leaves open ------------------------------------------------------------------------------------------


def has_predictions(T: AttentionTensor) -> bool:
    """Whether the model has a head that predicts something."""
    return T.context.classes is not None and T.operator.recording.has_head


def default_method(T: AttentionTensor, target: Any = None) -> str:
    """The method for the usual first question: why did the model say this?

    That is In+Class if the blocks asked for reach the head, or if a target is named. Otherwise it is In+Out, and for a
    picture the length of what each patch contributes, since no direction of its output has a name.
    """
    from tensorlens.maps.defaults import METHOD, METHOD_OF_CLASSES, METHOD_OF_PICTURES

    reaches_head = has_predictions(T) and T.operator.span.stop == T.operator.recording.n_blocks
    if reaches_head or target is not None:
        return METHOD_OF_CLASSES
    return METHOD if T.context.meta.get("grid") is None else METHOD_OF_PICTURES


def default_output(T: AttentionTensor) -> int:
    """The output to look at first: the masked token, the token that stands for a picture, or the last one."""
    from tensorlens.maps.defaults import first_output

    mask = getattr(getattr(T.context.classes, "tokenizer", None), "mask_token", None)
    return T.out_tokens.index(mask) if mask in T.out_tokens else first_output(T.context.meta, T.shape[0])


@dataclass(frozen=True, kw_only=True)
class MapQuestion:
    """What is asked of an operator. The command line and the explorer fill in what was left open here.

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
        T: AttentionTensor,
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
            is_one: Whether None is the one output that is looked at first, also if a method was named.

        Raises:
            InputError: there is no such output.
        """
        from tensorlens.maps.defaults import METHOD, has_one_row

        n_out = T.shape[0]
        if out_token is not None and not -n_out <= out_token < n_out:
            raise InputError(f"The output must be a position from {-n_out} to {n_out - 1}; got {out_token}.")
        chosen = default_method(T, target) if method is None else method
        is_one = is_one or method is None and chosen != METHOD
        if has_one_row(T.operator.recording, chosen):
            out_token = None  # its head reads the whole input at once
        elif out_token is None and is_one and not T.operator.recording.pools:
            out_token = default_output(T)
        return cls(method=chosen, out_token=out_token, target=target, against=against)

    def place(self, T: AttentionTensor) -> int:
        """The one output that headline and predictions are about."""
        chosen = default_output(T) if self.out_token is None else self.out_token
        return 0 if T.operator.recording.pools else chosen % T.shape[0]

    def predictions(self, T: AttentionTensor, k: int) -> list[Prediction]:
        """The model's at the chosen output; empty for all outputs, or for a model without a head."""
        return T.predictions(k, self.place(T)) if self._is_one(T) and has_predictions(T) else []

    def headlined(self, T: AttentionTensor) -> Headlined | None:
        """The target as people write it; None without a head, or for the predictions at every output."""
        from tensorlens.maps.defaults import METHOD_OF_CLASSES
        from tensorlens.maps.headlines import headlined

        recording = T.operator.recording
        reaches_head = has_predictions(T) and T.operator.span.stop == recording.n_blocks
        if not reaches_head or self.method != METHOD_OF_CLASSES or self.target is None and not self._is_one(T):
            return None
        return headlined(recording, T.context, self.place(T), self.target, self.against)

    def answered(self, T: AttentionTensor, told: Headlined | None, compute: Callable[..., TokenMap]) -> TokenMap:
        """The map, with its headline if it is about one output; `compute` takes method, output and target."""
        if told is None:
            pair = self.target if self.against is None else (self.target, self.against)
            return compute(self.method, self.out_token, pair)
        found = compute(self.method, self.out_token, told.asked.weights)
        return replace(found, meta=found.meta | told.meta) if self._is_one(T) else found

    def _is_one(self, T: AttentionTensor) -> bool:
        return self.out_token is not None or T.operator.recording.pools
