"""Relations from files: one JSON file per relation, read so that a bad file never stops the good ones.

The format is that of the relations data set (Hernandez et al. 2024): `name`, `prompt_templates` with ``{}`` for the
subject, `samples` of `subject` and `object`. Tokens and models are the business of `prompts`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError
from tensorlens.models.plain_text import has_half_characters
from tensorlens.studies.identity import digest_of

PLACEHOLDER = "{}"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One subject and its object."""

    subject: str
    object: str


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
        place: Where in it: a key such as ``samples[3].object``, or a line and column.
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


class _Malformed(Exception):
    """Something that is not as it should be: where, and how."""

    def __init__(self, place: str, message: str) -> None:
        self.place, self.message = place, message


def load_relations(
    folder: str | Path, categories: Collection[str] | None = None
) -> tuple[list[Relation], list[Problem]]:
    """Every relation below a folder, and what was wrong with the files.

    Args:
        folder: Holds JSON files, by category in sub-folders or not.
        categories: Only these; None for all.

    Raises:
        InputError: If the folder is not there or holds no JSON file.
    """
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
    wrong: list[_Malformed] = []
    try:
        document = _document(path)
        template = _template(document)
        facts = _facts(document, wrong)
        _text(document, "name")
        problems = [Problem(path=str(path), place=one.place, message=one.message, is_fatal=False) for one in wrong]
    except _Malformed as error:
        problems = [Problem(path=str(path), place=one.place, message=one.message, is_fatal=False) for one in wrong]
        return None, [*problems, Problem(path=str(path), place=error.place, message=error.message, is_fatal=True)]
    inside = path.parent.relative_to(root or path.parent).parts
    properties = document.get("properties")
    declared = properties.get("relation_type") if isinstance(properties, dict) else None
    category = inside[0] if inside else declared if isinstance(declared, str) and declared else "other"
    key = f"{category}/{path.stem}"
    return Relation(key=key, category=category, template=template, facts=facts, path=str(path)), problems


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise _Malformed(f"line {error.lineno}, column {error.colno}", f"expected JSON; {error.msg}") from None
    except UnicodeDecodeError as error:
        raise _Malformed(f"byte {error.start}", "expected UTF-8 text") from None
    except (OSError, ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        raise _Malformed("the file", f"cannot be read as JSON; {error}") from None
    if not isinstance(document, dict):
        raise _Malformed("the top level", f"expected an object with `samples`; got {document!r:.60}")
    return document


def _template(document: Mapping[str, Any]) -> str:
    template = _list(document, "prompt_templates")[0]
    if not _is_text(template) or PLACEHOLDER not in template:
        raise _Malformed("prompt_templates[0]", f"expected a text with {{}} for the subject; got {template!r:.60}")
    return template


def _facts(document: Mapping[str, Any], wrong: list[_Malformed]) -> tuple[Fact, ...]:
    """The facts that are well-formed, the first for each subject: a repeated one would be in both halves of a split."""
    found: dict[str, Fact] = {}
    for i, sample in enumerate(_list(document, "samples")):
        try:
            if not isinstance(sample, dict):
                raise _Malformed("", f"expected a subject and an object; got {sample!r:.60}")
            fact = Fact(subject=_text(sample, "subject"), object=_text(sample, "object"))
            if fact.subject in found:
                raise _Malformed("subject", f"{fact.subject!r} is there already; the first one counts")
            found[fact.subject] = fact
        except _Malformed as error:
            wrong.append(_Malformed(f"samples[{i}].{error.place}".removesuffix("."), error.message))
    if not found:
        raise _Malformed("samples", "expected at least one subject with an object; every sample is malformed")
    return tuple(found.values())


def _list(document: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(document.get(key), list) or not document[key]:
        raise _Malformed(key, f"expected a list; got {_shown(document, key)}")
    return document[key]


def _text(document: Mapping[str, Any], key: str) -> str:
    if not _is_text(document.get(key)):
        raise _Malformed(key, f"expected some text; got {_shown(document, key)}")
    return document[key]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not has_half_characters(value)


def _shown(document: Mapping[str, Any], key: str) -> str:
    if key not in document:
        return "nothing: the key is missing"
    return "an empty list" if document[key] == [] else f"{document[key]!r:.60}"
