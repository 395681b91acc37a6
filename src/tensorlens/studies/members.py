"""Methods that name a rule set after an @: ``tensor.in_class@attn_lrp``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tensorlens.errors import MethodError
from tensorlens.recording.conventions import RULE_SETS, Rules

if TYPE_CHECKING:
    from tensorlens.lens import Lens

MEMBERS: dict[str, Rules] = {name: getattr(Rules, name)() for name in RULE_SETS if name != "cp_lrp"}
"""The rule sets that are compared."""


def split(name: str) -> tuple[str, str]:
    """The map and the rule set of a name."""
    base, _, member = name.partition("@")
    return base, member or "paper"


def check_member(name: str) -> None:
    """Refuse a name whose rule set does not exist, or whose map takes none.

    Raises:
        MethodError: There is no such method.
    """
    base, member = split(name)
    if member not in MEMBERS or "@" in name and not base.startswith("tensor."):
        raise MethodError(f"TensorLens has no method {name!r}. After an @, maps of T take one of {', '.join(MEMBERS)}.")


def member_lens(lens: Lens, member: str) -> Lens:
    """The same model under a rule set, with the user's choice of the output."""
    return lens.with_rules(replace(MEMBERS[member], include_final_norm=lens.rules.include_final_norm))
