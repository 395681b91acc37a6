"""`recommended`: the rules and the method for each question, in the one table that all interfaces use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tensorlens.errors import InputError
from tensorlens.recording.conventions import Rules
from tensorlens.views.printing import Printed

QUESTIONS = ("word", "passage", "component", "paper")
"""The questions with recommended rules and method."""


@dataclass(frozen=True, kw_only=True)
class Recommendation(Printed):
    """The recommendation of benchmarks with known answers for a question.

    Attributes:
        question: A name in `QUESTIONS`.
        rules: The rule set.
        method: A method in `METHODS` that takes a target, or ``"components"`` for `AttentionTensor.components`. A model
            without a head has no target; there `default_method` of `maps/targets` decides.
        target: The target: the ``"logit"`` of the prediction, or its logit minus that of the ``"runner_up"``,
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
            because="on held-out sentences, with four models, they rank the deciding word higher than every "
            "baseline does, by 0.07 to 0.14 in reciprocal rank (docs/what-to-use.md).",
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
            because="it predicts the effect of patching a component best, with a correlation of 0.92 on held-out "
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
