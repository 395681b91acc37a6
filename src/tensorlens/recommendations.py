"""Defaults: the rules and the method for a question, and the output to look at first.

`recommended` is the only table of them: Python, command line and explorer all use it and give the same answers. Nothing
here imports torch, so help and usage errors appear at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tensorlens.errors import InputError
from tensorlens.recording.conventions import Rules
from tensorlens.views.printing import Printed

if TYPE_CHECKING:
    from tensorlens.tensor import AttentionTensor

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
            because="on held-out sentences it ranks the deciding word above every baseline, by 0.14 of the reciprocal "
            "rank for SmolLM2 and 0.08 for Gemma 3, where half_gate does better still (docs/what-to-use.md).",
        ),
        Recommendation(
            question="passage",
            rules=Rules.attn_lrp(),
            method="tensor.in_class",
            target="runner_up",
            because="with the runner-up's logit subtracted, the right sentence is first in 35 of 35 held-out "
            "documents; the sum of centred logits finds 24 of them (docs/what-to-use.md).",
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
