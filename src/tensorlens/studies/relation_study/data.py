"""Relations from files: one JSON file per relation, read so that a bad file never stops the good ones.

The format is that of the relations data set (Hernandez et al. 2024): `name`, `prompt_templates` with ``{}`` for the
subject, `samples` of `subject` and `object`. Tokens and models are the business of `prompts`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tensorlens.errors import InputError
from tensorlens.models.plain_text import has_half_characters
from tensorlens.studies.digests import digest_of

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
        key: Category and file name, such as ``factual/country_capital_city``: unlike the name it is unique.
        name: What the file calls it.
        category: The folder the file is in, or the file's own `relation_type`.
        template: The first prompt template.
        facts: In the order of the file.
        path: The file.
    """

    key: str
    name: str
    category: str
    template: str
    facts: tuple[Fact, ...]
    path: str

    @property
    def digest(self) -> str:
        """Digest of template and facts: a run that goes on must find them as they were."""
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
    """A file that cannot become a relation."""

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
    problems: list[Problem] = []
    try:
        document = _read_document(path)
        template = _template(document)
        facts = _facts(document, str(path), problems)
        name, category = _name(document), _category(document, path, root or path.parent)
    except _Malformed as error:
        return None, [*problems, Problem(path=str(path), place=error.place, message=error.message, is_fatal=True)]
    key = f"{category}/{path.stem}"
    return Relation(
        key=key, name=name, category=category, template=template, facts=tuple(facts), path=str(path)
    ), problems


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise _Malformed(f"line {error.lineno}, column {error.colno}", f"expected JSON; {error.msg}") from None
    except UnicodeDecodeError as error:
        raise _Malformed(f"byte {error.start}", "expected UTF-8 text") from None
    except OSError as error:
        raise _Malformed("the file", f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
        raise _Malformed("the file", f"expected JSON; {error}") from None
    if not isinstance(document, dict):
        raise _Malformed("the top level", f"expected an object with `samples`; got {_kind(document)}")
    return document


def _name(document: dict[str, Any]) -> str:
    name: Any = document.get("name")
    if not _is_text(name):
        raise _Malformed("name", f"expected some text; got {_shown(document, 'name')}")
    return name


def _category(document: dict[str, Any], path: Path, root: Path) -> str:
    inside = path.parent.relative_to(root).parts
    properties = document.get("properties")
    declared = properties.get("relation_type") if isinstance(properties, dict) else None
    return inside[0] if inside else declared if isinstance(declared, str) and declared else "other"


def _template(document: dict[str, Any]) -> str:
    templates = document.get("prompt_templates")
    if not isinstance(templates, list) or not templates:
        raise _Malformed("prompt_templates", f"expected a list of texts; got {_shown(document, 'prompt_templates')}")
    template = templates[0]
    if not _is_text(template) or PLACEHOLDER not in template:
        raise _Malformed("prompt_templates[0]", f"expected a text with {{}} for the subject; got {template!r}")
    return template


def _facts(document: dict[str, Any], path: str, problems: list[Problem]) -> list[Fact]:
    """The facts that are well-formed, the first for each subject: a repeated one would be in both halves of a split."""
    samples = document.get("samples")
    if not isinstance(samples, list) or not samples:
        raise _Malformed("samples", f"expected a list of subjects and objects; got {_shown(document, 'samples')}")
    first: dict[str, int] = {}
    facts = []
    for i, sample in enumerate(samples):
        trouble = _sample_trouble(sample)
        if trouble is None and sample["subject"] in first:
            earlier = f"samples[{first[sample['subject']]}]"
            trouble = (f"samples[{i}].subject", f"{sample['subject']!r} is in {earlier} already; the first one counts")
        elif trouble is not None:
            trouble = (f"samples[{i}]{trouble[0]}", trouble[1])
        if trouble is None:
            first[sample["subject"]] = i
            facts.append(Fact(subject=sample["subject"], object=sample["object"]))
        else:
            problems.append(Problem(path=path, place=trouble[0], message=trouble[1], is_fatal=False))
    if not facts:
        raise _Malformed("samples", "expected at least one subject with an object; every sample is malformed")
    return facts


def _sample_trouble(sample: Any) -> tuple[str, str] | None:
    """Where in a sample something is wrong, and what."""
    if not isinstance(sample, dict):
        return "", f"expected a subject and an object; got {_kind(sample)}"
    for part in ("subject", "object"):
        if not _is_text(sample.get(part)):
            return f".{part}", f"expected some text; got {_shown(sample, part)}"
    return None


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip()) and not has_half_characters(value)


def _shown(document: dict[str, Any], key: str) -> str:
    if key not in document:
        return "nothing: the key is missing"
    value = document[key]
    return repr(value) if isinstance(value, str) else _kind(value)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return {type(None): "null", dict: "an object", str: "a text"}.get(type(value), "a number")
