"""Methods that name a member of the family of rules behind an @: ``tensor.in_class@attn_lrp``."""

from __future__ import annotations

from dataclasses import replace

from tensorlens.freezing.conventions import Rules

MEMBERS: dict[str, Rules] = {
    "paper": Rules.paper(),
    "half_gate": Rules.half_gate(),
    "attn_lrp": Rules.attn_lrp(),
    "jacobian": Rules.jacobian(),
}
"""The members of the family that are compared."""


def split(name: str) -> tuple[str, str]:
    """The map and the member of a name."""
    base, _, member = name.partition("@")
    return base, member or "paper"


def rules_of(member: str, like: Rules) -> Rules:
    """The rules of a member, with the user's choice of the output."""
    return replace(MEMBERS[member], include_final_norm=like.include_final_norm)
