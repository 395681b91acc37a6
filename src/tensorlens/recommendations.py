"""What is taken where nothing was chosen: the rules and the method of a question, and the output to look at first.

`recommended` is the only table of it. Python, command line and explorer ask here, so that they answer the same question
alike. Nothing here imports torch: help and mistakes are answered at once.
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
"""What can be asked without choosing rules and a method."""


@dataclass(frozen=True, kw_only=True)
class Recommendation(Printed):
    """What benchmarks with known answers say to take for a question.

    Attributes:
        question: A name in `QUESTIONS`.
        rules: The rule set.
        method: A name in `METHODS`; ``"components"`` for `AttentionTensor.components`.
        target: What is explained of the prediction: its ``"logit"``.
        because: The reason in one sentence, with its number and the page it stands on.
    """

    question: str
    rules: Rules
    method: str
    target: Literal["logit"]
    because: str


def recommended(question: str = "word", *, gated: bool = True) -> Recommendation:
    """The rules, the method and the target to take for a question.

    Args:
        question: ``"word"`` (which word decided?), ``"passage"`` (which sentence?), ``"component"`` (which head or
            feed-forward?) or ``"paper"`` (the paper's own operator).
        gated: Whether the model has gated feed-forwards, as Llama, Gemma and Qwen have and GPT-2 and BERT have not.
            Only the rules for words depend on it.

    Raises:
        InputError: there is no such question.
    """
    if question not in QUESTIONS:
        raise InputError(f"The question must be one of {', '.join(QUESTIONS)}; got {question!r:.60}.")
    rules, method, because = _TABLE["word without gates" if question == "word" and not gated else question]
    return Recommendation(question=question, rules=rules, method=method, target="logit", because=because)


_TABLE = {
    "word": (
        Rules.half_gate(),
        "tensor.in_class",
        "half_gate ranks the deciding word higher than the paper's rules, by 0.04 of the reciprocal rank on held-out "
        "sets of SmolLM2 (docs/what-to-use.md).",
    ),
    "word without gates": (
        Rules.attn_lrp(),
        "tensor.in_class",
        "without gates half_gate is the paper's rule set, and attn_lrp is first of all on held-out sets, with a "
        "reciprocal rank of 0.73 (docs/what-to-use.md).",
    ),
    "passage": (
        Rules.attn_lrp(),
        "tensor.in_class",
        "attn_lrp ranks the right sentence first more often than the paper's rules, by 0.07 of held-out documents "
        "(docs/what-to-use.md).",
    ),
    "component": (
        Rules.jacobian(),
        "components",
        "jacobian is the derivative, and a patch is a change: it predicts 1 patch of a component best "
        "(docs/what-to-use.md).",
    ),
    "paper": (
        Rules.paper(),
        "tensor.in_class",
        "this is the operator of the paper: attention, norms and gates are kept fixed (docs/paper-and-code.md).",
    ),
}


# What a question leaves open ------------------------------------------------------------------------------------------


def has_gates(T: AttentionTensor) -> bool:
    """Whether two live tensors met as a gate and what it lets through."""
    return any(rule.startswith("gate: ") for rule, _ in T.operator.recording.rules_applied)


def has_predictions(T: AttentionTensor) -> bool:
    """Whether the model has a head that predicts something."""
    return T.context.classes is not None and T.operator.recording.has_head


def default_method(T: AttentionTensor, target: Any = None) -> str:
    """The method for the first question that people have: why did the model say this?

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
