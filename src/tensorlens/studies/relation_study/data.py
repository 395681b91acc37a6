"""Relations from files: one JSON file per relation, read so that a bad file never stops the good ones.

The format is that of the relations data set (Hernandez et al. 2024): `name`, `prompt_templates` with ``{}`` for the
subject, `samples` of `subject` and `object`. Tokens and models are the business of `prompts`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tensorlens.errors import InputError
from tensorlens.studies.runs import digest_of

PLACEHOLDER = "{}"
Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
Template = Annotated[str, msgspec.Meta(pattern=r"\{\}")]


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One subject and its object."""

    subject: Text
    object: Text


class _RelationFile(msgspec.Struct, kw_only=True):
    name: Text
    prompt_templates: Annotated[list[Template], msgspec.Meta(min_length=1)]
    samples: Annotated[list[Any], msgspec.Meta(min_length=1)]
    properties: Any = None


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A relation: a template and the facts that fill it, each subject once.

    Attributes:
        key: Category and file name, such as ``factual/country_capital_city``: unlike the name in the file it is unique.
        category: The folder the file is in, or the file's own `relation_type`.
        template: The first prompt template.
        facts: In the order of the file.
        path: The file.
    """

    key: str
    category: str
    template: str
    facts: tuple[Fact, ...]
    path: str

    @property
    def digest(self) -> str:
        """Digest of template and facts: a run that is continued must find them as they were."""
        return digest_of([self.template, *(text for fact in self.facts for text in (fact.subject, fact.object))])


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something wrong in a relation file.

    Attributes:
        path: The file.
        place: Where in it: a key such as ``samples[3].object``, or the file.
        message: What was expected and what came.
        is_fatal: Whether the relation had to be left out; otherwise only the place was.
    """

    path: str
    place: str
    message: str
    is_fatal: bool

    def __str__(self) -> str:
        """One line for people."""
        consequence = "the relation is left out" if self.is_fatal else "the rest is used"
        return f"{self.path}: {self.place}: {self.message} ({consequence})"


def load_relations(
    folder: str | Path, categories: Collection[str] | None = None
) -> tuple[list[Relation], list[Problem]]:
    """Every relation below a folder, and what was wrong with the files."""
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"Expected a folder of relation files; {str(root)!r} is not one. Pass the data set's folder.")
    paths = sorted(root.rglob("*.json"))
    if not paths:
        raise InputError(f"Expected relation files (*.json) below {str(root)!r}; found none.")
    relations, problems = [], []
    for path in paths:
        relation, found = read_relation(path, root)
        problems += found
        if relation is not None and (categories is None or relation.category in categories):
            relations.append(relation)
    return relations, problems


def read_relation(path: Path, root: Path | None = None) -> tuple[Relation | None, list[Problem]]:
    """One relation from its file, or None, and what was wrong with it.

    Args:
        path: The JSON file.
        root: Folder that keys are relative to; the file's own by default.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_RelationFile)
        facts, problems = _facts(file.samples, path)
    except (OSError, ValueError, RecursionError) as error:
        return None, [_problem(path, "", error, is_fatal=True)]
    if not facts:
        none = ValueError("every sample is malformed; expected a subject with an object - at `$.samples`")
        return None, [*problems, _problem(path, "", none, is_fatal=True)]
    inside = path.parent.relative_to(root or path.parent).parts
    declared = file.properties.get("relation_type") if isinstance(file.properties, dict) else None
    category = inside[0] if inside else declared if isinstance(declared, str) and declared else "other"
    key, template = f"{category}/{path.stem}", file.prompt_templates[0]
    return Relation(key=key, category=category, template=template, facts=facts, path=str(path)), problems


def _facts(samples: list[Any], path: Path) -> tuple[tuple[Fact, ...], list[Problem]]:
    """The facts that are well-formed, the first for each subject: a repeated one would be in both halves of a split."""
    found: dict[str, Fact] = {}
    problems = []
    for i, sample in enumerate(samples):
        try:
            fact = msgspec.convert(sample, Fact)
            if fact.subject in found:
                raise ValueError(f"{fact.subject!r} is there already; the first one counts - at `$.subject`")
            found[fact.subject] = fact
        except ValueError as error:
            problems.append(_problem(path, f"samples[{i}]", error, is_fatal=False))
    return tuple(found.values()), problems


def _problem(path: Path, place: str, error: Exception, *, is_fatal: bool) -> Problem:
    """What msgspec says, which ends with where: ``- at `$.samples` ``."""
    message, _, where = str(error).partition(" - at `$")
    for regex, words in ((r"'\\S'", "a visible character"), (r"'\\{\\}'", "`{}` in the subject's place")):
        message = message.replace(f"matching regex {regex}", f"with {words}")
    place = (place + where.removesuffix("`")).removeprefix(".") or "the file"
    return Problem(path=str(path), place=place, message=message, is_fatal=is_fatal)
