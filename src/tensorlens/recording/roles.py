"""Roles: the origin of a tensor, as far as a product needs to know it.

Which factor of a product gates is meaning, not calculus: in φ(W_g x) ⊙ (W_u x) the activated factor is the gate, in
z ⊙ σ(z) the sigmoid is. So tensors carry a role, which linear functions pass on and contractions with a weight drop.
Every decision about roles is in this file; which factor of a gated feed-forward is then held is `Rules.gate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from tensorlens.program.nodes import words
from tensorlens.recording.conventions import Rules


class Role(Enum):
    """The origin of a tensor."""

    ACTIVATED = "activated"
    """The result of an activation with φ(0) = 0: the gate of a gated feed-forward."""
    ATTENTION = "attention"
    """The result of a softmax."""
    GATE = "gate"
    """The direct result of a sigmoid."""
    FACTOR = "factor"
    """Made only from activations with φ(0) ≠ 0: the gate of a product."""
    STATISTIC = "statistic"
    """A statistic of a norm, where norms are followed by their derivative."""
    SIZE = "size"
    """|x|."""
    SCALE = "scale"
    """Made from magnitudes, or a denominator: a scale of other tensors."""
    STEP = "step"
    """A sign."""
    CHOICE = "choice"
    """Decided by values of the input, such as an index or a comparison. Held."""


FACTORS = frozenset([Role.GATE, Role.FACTOR, Role.STATISTIC, Role.SCALE, Role.STEP])
"""Roles of factors, which multiply other live tensors."""

CARRIED = frozenset([Role.ACTIVATED, Role.ATTENTION])
"""Roles that a function of `KEEPS_ROLE` passes on, whatever its other arguments are."""

KEEPS_ROLE = words(
    "add sub mul div view reshape flatten unflatten squeeze unsqueeze transpose permute contiguous clone "
    "expand repeat chunk split split_with_sizes tensor_split unbind narrow select getitem index_select to type "
    "type_as float double half bfloat16 dropout masked_fill clamp pad repeat_interleave _to_copy slice alias "
    "detach t _unsafe_view expand_as view_as native_dropout"
)
"""Functions after which an activated tensor is still an activated one, and attention still attention."""

CONTRACTIONS = words(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution grouped_mm "
    "_grouped_mm matmul bmm mm mv dot inner outer ger tensordot kron einsum addmm baddbmm addbmm addmv"
)
"""Functions by which a weight reads a factor as the input of another layer: the result is not a factor."""


def is_factor(role: Role | None, rules: Rules) -> bool:
    """Whether a live tensor of this role multiplies others: a gate, a statistic, live attention."""
    return role in FACTORS or role is Role.ATTENTION and rules.attention != "hold"


def after_linear(name: str, roles: Sequence[Role | None], rules: Rules, *, reads_weight: bool) -> Role | None:
    """The role of a linear function's result, from the roles of its live arguments.

    Args:
        name: Name of the function.
        roles: Roles of the live tensors it took.
        rules: The conventions in force.
        reads_weight: Whether it also took a tensor that does not depend on the input.
    """
    if not any(roles):
        return None
    if len(roles) == 1 and roles[0] is Role.SIZE:
        return Role.SCALE if name in ("mean", "sum") else Role.SIZE if name in KEEPS_ROLE else None
    if not (name in CONTRACTIONS and reads_weight):
        found = of_factors(roles, rules)
        if found is not None:
            return found
    return next((role for role in roles if role in CARRIED), None) if name in KEEPS_ROLE else None


def of_factors(roles: Sequence[Role | None], rules: Rules) -> Role | None:
    """A tensor made only from live factors is a factor again."""
    if not roles or not all(is_factor(role, rules) for role in roles):
        return None
    kinds = set(roles)
    if kinds in ({Role.SCALE}, {Role.STEP}, {Role.ATTENTION}):
        return roles[0]
    return Role.STATISTIC if Role.STATISTIC in kinds else Role.FACTOR


def of_largest(role: Role | None, rules: Rules) -> Role | None:
    """The mean or the largest of sizes |x| is a norm: a number that scales others."""
    return Role.SCALE if role is Role.SIZE else of_factors([role], rules)


def of_product(first: Role | None, second: Role | None, rules: Rules) -> str | None:
    """How a product of two live tensors is replaced, if a factor among them decides it; None if none does.

    | one factor is | the other is | gate: freeze_gate, freeze_up | half, taylor |
    |---|---|---|---|
    | a statistic | anything | taylor | taylor |
    | a step | no step | step held | step held |
    | a scale | no scale | scale held | half, taylor |
    | a factor | no factor | factor held | half, taylor |
    | a factor | a factor | both held | half, taylor |
    """
    if Role.STATISTIC in (first, second):
        return "taylor"
    of_first, of_second = is_factor(first, rules), is_factor(second, rules)
    if not (of_first or of_second):
        return None
    holds = rules.gate not in ("half", "taylor")
    for role, is_held in ((Role.SCALE, holds), (Role.STEP, True)):
        if is_held and role in (first, second) and first is not second:
            return "first held" if first is role else "second held"
    if not holds:
        return rules.gate
    return "both held" if of_first and of_second else "first held" if of_first else "second held"


def of_matrix_product(first: Role | None, second: Role | None, rules: Rules) -> str:
    """The same for a matrix product: attention and tensors without a role follow `Rules.attention`."""
    if Role.ATTENTION in (first, second) and rules.attention != "hold":
        return rules.attention
    by_factor = of_product(first, second, rules)
    return by_factor or ("first held" if rules.attention == "hold" else rules.attention)
