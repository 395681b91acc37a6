"""The rules a user may choose, as one record: which affine function replaces each kind of nonlinear step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from typing import Any, Literal, get_args

from tensorlens.errors import InputError, check_choice, words
from tensorlens.views.printing import Printed

Attention = Literal["hold", "half", "taylor"]
Gate = Literal["freeze_gate", "freeze_up", "half", "taylor"]
Norm = Literal["hold", "taylor"]
Activation = Literal["gain", "taylor"]
Sink = Literal["live", "hold"]

RULE_SETS = ("paper", "cp_lrp", "half_gate", "attn_lrp", "gim", "jacobian")
"""The rule sets that have a name, each a constructor of `Rules`."""


@dataclass(frozen=True, kw_only=True)
class Rules(Printed):
    r"""Choices that exactness leaves open, because every one of them reproduces F(X).

    The frozen model may be any affine function of its input with the value F(X) at X. Each nonlinear step is replaced
    by such a function of its live arguments; with $a^0$ the value at X,

    - ``hold``: $a \odot b \to a^0 \odot b$; a norm's statistic and the attention matrix are constants;
    - ``half``: $a \odot b \to \tfrac12 a^0 \odot b + \tfrac12 a \odot b^0$;
    - ``taylor``: $f(x) \to f(x^0) + J_f(x^0)(x - x^0)$, for a product $a^0 \odot b + a \odot b^0 - a^0 \odot b^0$;
    - ``gain``: $\varphi(z) \to \varphi(0) + \frac{\varphi(z^0) - \varphi(0)}{z^0}\, z$.

    Constants go into B. Decisions (top-k, maxima, the piece of a clamp) are kept fixed under every rule set.

    Attributes:
        attention: The attention matrix $A = \mathrm{softmax}(S)$ and matrix products of live tensors: ``"hold"`` holds
            A (of other products, the left factor); with ``"half"`` and ``"taylor"`` $A = A^0 + J(S - S^0)$ is live, and
            both $AV$ and the scores $QK^\top$ follow the choice.
        gate: Elementwise products of live tensors. In a gated feed-forward $W_d(\varphi(W_g x) \odot (W_u x))$,
            ``"freeze_gate"`` holds $\varphi(W_g x)$ and stays linear in the up branch (the default) and
            ``"freeze_up"`` holds $W_u x$ and stays linear in the gate; both hold sigmoids and the like where they meet
            a live tensor (output gates, routers, the gates of recurrences). ``"half"`` and ``"taylor"`` hold neither.
        norm: Statistics ($1/\sigma$, norms, logarithms) and division by a live tensor.
        activation: Activations, including soft caps of scores. Powers follow Taylor if `norm` or `activation` does.
        sink: What attention takes from the first position, where heads attend if nothing else matters. ``"live"``
            leaves it in that token's column. ``"hold"`` holds the values there, from the first block in which they no
            longer depend on the token, so the column splits into the word's contribution and the sink's, which goes
            into B. A number holds them from that block on. It needs `attention` held and a model in which the first
            position sees no other; every other column stays as it is.
        softmax_temperature: The temperature τ of the derivative of a softmax, where the attention matrix is live:
            $A = A^0 + (\mathrm{diag}\,s - s s^\top)(S - S^0)$ with $s = \mathrm{softmax}(S^0/τ)$. At 1 it is the
            softmax's own derivative; above 1, a saturated softmax still has a derivative.
        include_final_norm: Whether the output state $X^N$ is taken after the model's final norm.
    """

    attention: Attention = "hold"
    gate: Gate = "freeze_gate"
    norm: Norm = "hold"
    activation: Activation = "gain"
    sink: Sink | int = "live"
    softmax_temperature: float = 1.0
    include_final_norm: bool = True

    def __post_init__(self) -> None:
        for field, kind in (("attention", Attention), ("gate", Gate), ("norm", Norm), ("activation", Activation)):
            check_choice(getattr(self, field), field, get_args(kind))
        if self.sink not in get_args(Sink) and (type(self.sink) is not int or self.sink < 0):
            raise InputError(f"`sink` must be live, hold or the number of a block; got {self.sink!r:.60}.")
        if self.sink != "live" and self.attention != "hold":
            raise InputError(
                f"`sink` can only be kept fixed if attention is; got attention={self.attention!r}, under which the "
                "words also decide how much goes to the sink. Use rules that keep attention fixed, such as half_gate."
            )
        object.__setattr__(self, "softmax_temperature", _temperature(self.softmax_temperature))
        if not isinstance(self.include_final_norm, bool):
            raise InputError(f"`include_final_norm` must be True or False; got {self.include_final_norm!r:.60}.")

    @classmethod
    def paper(cls, *, include_final_norm: bool = True) -> Rules:
        """The paper's operator: attention, norms and the gate held, activations by their gain."""
        return cls(include_final_norm=include_final_norm)

    @classmethod
    def cp_lrp(cls, *, include_final_norm: bool = True) -> Rules:
        """CP-LRP (Ali et al. 2022), which is the paper's operator."""
        return cls.paper(include_final_norm=include_final_norm)

    @classmethod
    def half_gate(cls, *, include_final_norm: bool = True) -> Rules:
        """The paper's operator with both factors of a gated product live, each in one half."""
        return cls(gate="half", include_final_norm=include_final_norm)

    @classmethod
    def attn_lrp(cls, *, include_final_norm: bool = True) -> Rules:
        """AttnLRP (Achtibat et al. 2024): products halved, attention live."""
        return cls(attention="half", gate="half", include_final_norm=include_final_norm)

    @classmethod
    def gim(cls, *, include_final_norm: bool = True) -> Rules:
        """GIM (gradient interaction modifications): products halved, softmax at temperature 2, norms held.

        AttnLRP's products and norms, with activations followed by their derivative.
        """
        return cls(
            attention="half",
            gate="half",
            activation="taylor",
            softmax_temperature=2.0,
            include_final_norm=include_final_norm,
        )

    @classmethod
    def jacobian(cls, *, include_final_norm: bool = True) -> Rules:
        """The model's own derivative: T = J and B = F(X) - J X."""
        return cls(
            attention="taylor",
            gate="taylor",
            norm="taylor",
            activation="taylor",
            include_final_norm=include_final_norm,
        )

    @classmethod
    def of(cls, rules: Any, *, include_final_norm: bool = True) -> Rules:
        """Rules from their name, from ``key=value`` pairs, or from both: ``"attn_lrp,gate=freeze_up"``.

        Args:
            rules: A name in `RULE_SETS`, pairs such as ``"gate=half,attention=hold"`` that change the default, `Rules`
                (returned as they are), a `Recommendation` (its rules), or None for the default.
            include_final_norm: Which output state the rules describe: after the final norm, or before it.

        Raises:
            InputError: there is no such rule set, or no such choice in it.
        """
        rules = getattr(rules, "rules", rules)  # a recommendation's
        if rules is None or isinstance(rules, Rules):
            return rules or cls(include_final_norm=include_final_norm)
        if not isinstance(rules, str):
            raise InputError(f"`rules` must be a rule set by name or a `tensorlens.Rules`; got {rules!r:.60}.")
        first, *others = (part.strip() for part in rules.split(","))
        name, pairs = ("paper", [first, *others]) if "=" in first else (first, others)
        if name not in RULE_SETS:
            raise InputError(
                f"TensorLens has no rule set {name!r}. Choose {', '.join(RULE_SETS)}, or give pairs such as "
                "gate=half,attention=hold."
            )
        choices: dict[str, Any] = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
        known = [one.name for one in fields(cls) if one.name != "include_final_norm"]
        unknown = next((key for key in choices if key not in known), None)
        if unknown is not None:
            raise InputError(f"Rules have no option {unknown!r}. Choose among {', '.join(known)}, as in gate=half.")
        choices |= {key: int(value) for key, value in choices.items() if key == "sink" and value.isdecimal()}
        return replace(getattr(cls, name)(include_final_norm=include_final_norm), **choices)

    @property
    def name(self) -> str | None:
        """Name of the rule set in `RULE_SETS`, ``"paper"`` for CP-LRP too; None if it has none.

        With a held sink, what `of` takes: ``"paper,sink=hold"``.
        """
        return _name_of(self)

    @property
    def holds_factors(self) -> bool:
        """Whether every step is a product with held factors, so that a block can be written as matrices."""
        return self.attention == "hold" and self.norm == "hold" and self.activation == "gain" and self.gate != "taylor"

    def as_dict(self) -> dict[str, str | float]:
        """The choices as plain data, for certificates and saved maps."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@cache
def _name_of(rules: Rules) -> str | None:
    member = replace(rules, sink="live")
    for name in RULE_SETS:
        if member == getattr(Rules, name)(include_final_norm=rules.include_final_norm):
            return name if rules.sink == "live" else f"{name},sink={rules.sink}"
    return None


def _temperature(given: Any) -> float:
    """A temperature as a number; from ``key=value`` pairs it comes as text."""
    try:
        found = float("nan") if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        found = float("nan")
    if not 0 < found < float("inf"):
        raise InputError(f"`softmax_temperature` must be a number above 0; got {given!r:.60}.")
    return found


# Roles ----------------------------------------------------------------------------------------------------------------
#
# Which factor of a product gates is meaning, not calculus: in φ(W_g x) ⊙ (W_u x) the activated factor is the gate, in
# z ⊙ σ(z) the sigmoid is. So tensors carry a role, which linear functions pass on and contractions with a weight drop.
# Every decision about roles is here; which factor of a gated feed-forward is then held is `Rules.gate`.


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
