"""What is explained if nothing was chosen: the method, the output, and the rules to try next.

The command line and the explorer ask here, so that they answer the same first question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorlens.maps.token_map import TokenMap
    from tensorlens.tensor import AttentionTensor


def default_method(T: AttentionTensor, target: Any = None) -> str:
    """The method for the first question that people have: why did the model say this?

    That is In+Class if the blocks asked for reach the head, or if a target is named; In+Out otherwise.
    """
    from tensorlens.maps.defaults import METHOD, METHOD_OF_CLASSES

    reaches_head = has_predictions(T) and T.operator.span.stop == T.operator.recording.n_blocks
    return METHOD_OF_CLASSES if reaches_head or target is not None else METHOD


def default_output(T: AttentionTensor) -> int:
    """The output to look at first: the masked token, the token that stands for a picture, or the last one."""
    from tensorlens.maps.defaults import first_output

    mask = getattr(getattr(T.context.classes, "tokenizer", None), "mask_token", None)
    return T.out_tokens.index(mask) if mask in T.out_tokens else first_output(T.context.meta, T.shape[0])


def has_predictions(T: AttentionTensor) -> bool:
    """Whether the model has a head that predicts something."""
    return T.context.classes is not None and T.operator.recording.has_head


def recommended(T: AttentionTensor, found: TokenMap) -> str | None:
    """The rule set that ranks words better, for a map that asks about one word under the paper's rules.

    If the model has gates, halving them helps. In a model without gates that changes nothing; there, attention must
    not be kept fixed.
    """
    from tensorlens.maps.defaults import METHOD_OF_CLASSES

    rules = found.meta.get("rules")
    if found.method != METHOD_OF_CLASSES or found.shape[0] != 1 or not isinstance(rules, dict):
        return None
    if (rules.get("attention"), rules.get("gate")) != ("hold", "freeze_gate"):
        return None
    has_gates = any(rule.startswith("gate: ") for rule, _ in T.operator.recording.rules_applied)
    return "half_gate" if has_gates else "attn_lrp"
