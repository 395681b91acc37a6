"""The options of a study: a record, single keywords, or a record with some of them changed.

Each study has one `Options` record, which checks itself by the types of its fields when it is made and can be read from
a file; this is the one place where it is made. Methods may name a rule set after an @: ``tensor.in_class@attn_lrp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import msgspec

from tensorlens.errors import InputError, MethodError
from tensorlens.recording.conventions import RULE_SETS, Rules

if TYPE_CHECKING:
    from tensorlens.lens import Lens

Count = Annotated[int, msgspec.Meta(ge=1)]
"""A number of things, at least one."""
Whole = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number, not negative."""
Names = tuple[str, ...]
"""Names, or a single one."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the numbers of a study depend on besides model and data."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            value = (value,) if isinstance(value, str) and field.type in (Names, Names | None) else value
            try:
                self.settle(**{field.name: msgspec.convert(value, field.type)})
            except msgspec.ValidationError as error:
                known = [one for one in get_args(field.type) if isinstance(one, str)]
                least = str(error).partition(" >= ")[2]
                wanted = f"among {', '.join(known)}" if known else f"of at least {least}" if least else f"({error})"
                raise InputError(f"Expected `{field.name}` {wanted}; got {value!r}.") from error

    def settle(self, **values: Any) -> None:
        """Replace given values with checked ones; for `__post_init__` alone."""
        for name, value in values.items():
            msgspec.structs.force_setattr(self, name, value)


Chosen = TypeVar("Chosen", bound=Options)


def chosen_options(kind: type[Chosen], options: Chosen | None, changes: Mapping[str, Any]) -> Chosen:
    """The record of a study's options.

    Args:
        kind: The study's record.
        options: A record, or None for the defaults.
        changes: Options that the caller named instead of it, or beside it.

    Raises:
        InputError: there is no such option, or `options` is another study's.
    """
    if options is not None and not isinstance(options, kind):
        raise InputError(f"Expected `options` of type {kind.__name__}; got {type(options).__name__}.")
    known = kind.__struct_fields__
    unknown = next((name for name in changes if name not in known), None)
    if unknown is not None:
        raise InputError(f"Expected options among {', '.join(known)}; got {unknown!r}.{_hint(unknown, known)}")
    return kind(**changes) if options is None else msgspec.structs.replace(options, **changes)


def checked_names(chosen: Iterable[Any], known: Iterable[str], name: str) -> tuple[Any, ...]:
    """The names chosen for the option `name`, each once; a single name is accepted."""
    known = tuple(known)
    chosen = (chosen,) if isinstance(chosen, str) else tuple(dict.fromkeys(chosen))
    wrong = next((one for one in chosen if one not in known), None)
    if wrong is not None or not chosen:
        got = repr(wrong) if chosen else "none"
        raise InputError(f"Expected `{name}` among {', '.join(known)}; got {got}.{_hint(str(wrong), known)}")
    return chosen


def _hint(wrong: str, known: Iterable[str]) -> str:
    near = get_close_matches(wrong, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


# Rule sets ------------------------------------------------------------------------------------------------------------


MEMBERS: dict[str, Rules] = {name: getattr(Rules, name)() for name in RULE_SETS if name != "cp_lrp"}
"""The rule sets that are compared."""


def split(name: str) -> tuple[str, str]:
    """The map and the rule set of a name."""
    base, _, member = name.partition("@")
    return base, member or "paper"


def check_member(name: str) -> None:
    """Refuse a name whose rule set does not exist, or whose map takes none."""
    base, member = split(name)
    if member not in MEMBERS or "@" in name and not base.startswith("tensor."):
        raise MethodError(f"TensorLens has no method {name!r}. After an @, maps of T take one of {', '.join(MEMBERS)}.")


def member_lens(lens: Lens, member: str) -> Lens:
    """The same model under a rule set, with the user's choice of the output."""
    return lens.with_rules(replace(MEMBERS[member], include_final_norm=lens.rules.include_final_norm))
