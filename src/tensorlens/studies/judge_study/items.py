"""What a judge is made of: items whose answer is known, the measures that compare, and what could not be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorlens.lens import Lens
from tensorlens.maps.targets import Target
from tensorlens.studies.digests import digest_of

Right = str
"""When the model is right about an item: ``contrast`` (its target is positive), ``first`` (its target is the model's
first choice), ``always`` (the item asks nothing of it)."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question whose answer is known.

    Attributes:
        judge: Name of the judge.
        set: Name of the set within it.
        name: Where it came from: file and row.
        ids: The tokens that the model is given.
        target: A token, a pair for a contrast, or None for the model's own first choice.
        units: What is ranked: the tokens of each word or sentence. Tokens of no unit are not ranked.
        labels: A name for each unit.
        truth: The answer: for each unit 1 if it is evidence and 0 if not, or its true effect; None where the effect
            is measured when the item is judged.
        right: See `Right`; items that the model gets wrong are left out.
        out_token: Where the target is read.
        overlap: Words by which the control of word overlap ranks.
        model: Which model is asked: the user's (empty), or a compiled program.
        extra: What else the judge needs.
    """

    judge: str
    set: str
    name: str
    ids: tuple[int, ...]
    target: Target | None
    units: tuple[tuple[int, ...], ...]
    labels: tuple[str, ...]
    truth: tuple[float, ...] | None
    right: Right = "contrast"
    out_token: int = -1
    overlap: str = ""
    model: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[str, str, int, int]:
        """What items that are judged together have in common."""
        return self.judge, self.model, len(self.ids), self.out_token


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A judge, as data.

    Attributes:
        name: What it is called.
        question: What it decides; a key of `QUESTIONS`.
        measures: Names in `MEASURES`; the first is the one that ranks.
        items: What is asked.
        problems: A line for each row that could not be used, with file, row and reason.
        models: Lenses on models of its own, by `Item.model`.
    """

    name: str
    question: str
    measures: tuple[str, ...]
    items: tuple[Item, ...]
    problems: tuple[str, ...] = ()
    models: Mapping[str, Lens] = field(default_factory=dict)

    def digest(self) -> str:
        """What tells whether a run is continued on the same items."""
        return digest_of(repr((item.name, item.ids, item.target, item.units, item.truth)) for item in self.items)


QUESTIONS = {
    "word": "Which word decided?",
    "passage": "Which passage?",
    "component": "Which component?",
    "removal": "What happens if it goes?",
}
"""What users ask, and what the tables of the leaderboard are called."""


def groups_of(items: Sequence[Item], size: int) -> list[list[int]]:
    """Items that share a recording: of one judge, one model and one length, at most `size` of them."""
    by_kind: dict[Any, list[int]] = {}
    for index, item in enumerate(items):
        by_kind.setdefault(item.kind, []).append(index)
    return [some[i : i + size] for some in by_kind.values() for i in range(0, len(some), size)]
