"""How a study takes its options: a record, single keywords, or a record with some of them changed.

Each study has one frozen record, which checks itself when it is made; this is the one place where it is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from tensorlens.errors import InputError

Options = TypeVar("Options")


def chosen_options(kind: type[Options], options: Options | None, changes: Mapping[str, Any]) -> Options:
    """The record of a study's options.

    Args:
        kind: The study's record.
        options: A record, or None for the defaults.
        changes: What the caller named instead of it, or beside it.

    Raises:
        InputError: there is no such option, or `options` is another study's.
    """
    if options is not None and not isinstance(options, kind):
        raise InputError(f"Expected `options` of type {kind.__name__}; got {type(options).__name__}.")
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # every record is a dataclass
    unknown = next((name for name in changes if name not in known), None)
    if unknown is not None:
        raise InputError(f"Expected options among {', '.join(known)}; got {unknown!r}.{_hint(unknown, known)}")
    return replace(options, **changes) if options is not None else kind(**changes)  # type: ignore[type-var]


def checked_names(chosen: Iterable[Any], known: Iterable[str], name: str) -> tuple[Any, ...]:
    """The names chosen for the option `name`, each once; one name by itself will do."""
    known = tuple(known)
    chosen = (chosen,) if isinstance(chosen, str) else tuple(dict.fromkeys(chosen))
    wrong = next((one for one in chosen if one not in known), None)
    if wrong is not None or not chosen:
        got = repr(wrong) if chosen else "none"
        raise InputError(f"Expected `{name}` among {', '.join(known)}; got {got}.{_hint(str(wrong), known)}")
    return chosen


def check_positive(options: Any, *names: str) -> None:
    """Refuse numbers below 1; None stands for no limit."""
    for name in names:
        number = getattr(options, name)
        if number is not None and number < 1:
            raise InputError(f"Expected `{name}` of at least 1; got {number}.")


def _hint(wrong: str, known: Iterable[str]) -> str:
    near = get_close_matches(wrong, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
