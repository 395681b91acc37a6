"""What is judged: the maps of `METHODS` under the paper's rules, In+Class and In+Out under other rules, controls.

A name is that of a map, and after an @ the member of the family of rules: ``tensor.in_class@attn_lrp``. A map that
does not come from T has no member. `gradient.times_input` is ``tensor.in_class@jacobian``, CP-LRP is
`tensor.in_class`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorlens.maps.methods import METHODS, check_question
from tensorlens.studies.members import MEMBERS, check_member, split

WORD_OVERLAP = "control.word_overlap"
SAME_AS_A_MEMBER = {"gradient.times_input": "tensor.in_class@jacobian"}
EXACTLY_KNOWN = "control.random"
"""What chance gets is computed for each item, and needs no draw."""
LONG = (
    "tensor.in_class",
    "tensor.in_out",
    "mean.attn",
    "rollout.attn",
    "control.recency",
    "control.position",
    "control.embedding_norm",
)
"""Maps whose cost does not grow with the square of the input, and the attention that everybody looks at."""


def default_methods(*, long: bool = False) -> tuple[str, ...]:
    """Every method; of long inputs those that are affordable."""
    base = LONG if long else tuple(name for name in METHODS if name not in (*SAME_AS_A_MEMBER, EXACTLY_KNOWN))
    members = [
        f"{name}@{member}" for name in ("tensor.in_class", "tensor.in_out") for member in MEMBERS if member != "paper"
    ]
    return (*base, *members, WORD_OVERLAP)


def check_methods(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once.

    Raises:
        MethodError: There is no such map or member.
    """
    for name in names:
        if name != WORD_OVERLAP:
            check_question(split(name)[0])
            check_member(name)
    return tuple(dict.fromkeys(names))
