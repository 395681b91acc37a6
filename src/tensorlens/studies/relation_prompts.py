"""Relations from files, and their prompts: few-shot text, tokens, where the subject is, which facts align, splits.

The format is that of the relations data set (Hernandez et al. 2024), one JSON file per relation: `name`,
`prompt_templates` with ``{}`` for the subject, `samples` of `subject` and `object`. A bad file never stops the good
ones. A mean over attention tensors needs prompts of one length with the subject in one place, so facts are kept by
token length before anything is computed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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


class Problem(NamedTuple):
    """Something wrong at a place in a relation file; if it is fatal, the relation had to be left out."""

    path: str
    place: str
    message: str
    is_fatal: bool = False


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
    """One relation from its file, or None, and what was wrong with it; its key is relative to the folder `root`."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_RelationFile)
    except (OSError, ValueError, RecursionError) as error:
        return None, [_problem(path, "", error, is_fatal=True)]
    facts: dict[str, Fact] = {}  # a repeated subject would be in both halves of a split
    problems = []
    for i, sample in enumerate(file.samples):
        try:
            fact = msgspec.convert(sample, Fact)
            if fact.subject in facts:
                raise ValueError(f"{fact.subject!r} is listed twice; the first one counts - at `$.subject`")
            facts[fact.subject] = fact
        except (ValueError, RecursionError) as error:
            problems.append(_problem(path, f"samples[{i}]", error))
    if not facts:
        none = ValueError("every sample is malformed; expected a subject with an object - at `$.samples`")
        return None, [*problems, _problem(path, "", none, is_fatal=True)]
    inside = path.parent.relative_to(root or path.parent).parts
    declared = file.properties.get("relation_type") if isinstance(file.properties, dict) else None
    category = inside[0] if inside else declared if isinstance(declared, str) and declared else "other"
    key, template = f"{category}/{path.stem}", file.prompt_templates[0]
    found = Relation(key=key, category=category, template=template, facts=tuple(facts.values()), path=str(path))
    return found, problems


def _problem(path: Path, place: str, error: Exception, *, is_fatal: bool = False) -> Problem:
    """The message of msgspec, which ends with the place: ``- at `$.samples` ``."""
    message, _, where = str(error).partition(" - at `$")
    for regex, words in ((r"'\\S'", "a visible character"), (r"'\\{\\}'", "`{}` in the subject's place")):
        message = message.replace(f"matching regex {regex}", f"with {words}")
    place = (place + where.removesuffix("`")).removeprefix(".") or "the file"
    return Problem(str(path), place, message, is_fatal)


# Prompts -------------------------------------------------------------------------------------------------------------


DOCUMENT_START = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class RelationPrompt:
    """A text that ends where the object should follow: examples, one per line, then the query.

    Attributes:
        text: The text.
        ids: Its tokens, including those that open a document.
        subject_tokens: Positions of the query's subject among them; the last one is where LRE reads.
    """

    text: str
    ids: tuple[int, ...]
    subject_tokens: tuple[int, ...]

    @property
    def layout(self) -> tuple[int, tuple[int, ...]]:
        """Length and places of the subject: what must agree for a mean to make sense."""
        return len(self.ids), self.subject_tokens


class FactSplit(NamedTuple):
    """Facts to estimate on and facts to test on, no subject in both."""

    train: tuple[Fact, ...]
    test: tuple[Fact, ...]


class Tokens:
    """A tokenizer as this study needs it: texts to ids, characters to positions."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None:
            raise InputError(
                "Relation decoding needs a tokenizer; got a lens without one. Use `Lens(model, tokenizer)`."
            )
        self.tokenizer = tokenizer

    @cached_property
    def opening_ids(self) -> tuple[int, ...]:
        """Ids put before every text: the separator of documents, as in LRE, unless the tokenizer adds one itself."""
        own = self.tokenizer("a")["input_ids"]
        if own and own[0] in (self.tokenizer.all_special_ids or ()):
            return ()
        vocabulary = self.tokenizer.get_vocab()
        start = vocabulary.get(DOCUMENT_START, self.tokenizer.bos_token_id)
        return () if start is None else (start,)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text, opened."""
        return (*self.opening_ids, *self.tokenizer(text)["input_ids"])

    def positions(self, text: str, start: int, stop: int) -> tuple[int, ...]:
        """Positions of the tokens that hold any of the characters `start` to `stop` - 1 of a text."""
        shift = len(self.opening_ids)
        if getattr(self.tokenizer, "is_fast", False):
            offsets = self.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
            return tuple(shift + i for i, (a, b) in enumerate(offsets) if a < stop and b > start)
        before, within = (len(self.tokenizer(text[:end])["input_ids"]) for end in (start, stop))
        return tuple(range(shift + before, shift + within))

    def first_token(self, query: str, answer: str) -> int:
        """The token the model would have to say first to say `answer` after `query` and a space."""
        before, after = self.encode(query), self.encode(f"{query} {answer}")
        if after[: len(before)] == before and len(after) > len(before):
            return after[len(before)]
        return self.tokenizer(f" {answer}", add_special_tokens=False)["input_ids"][0]

    def decode(self, token: int) -> str:
        """The text of one token."""
        return self.tokenizer.decode([token])


def query_text(template: str, subject: str) -> str:
    """A template with its subject."""
    return template.replace(PLACEHOLDER, subject)


def make_prompt(tokens: Tokens, template: str, examples: Sequence[Fact], subject: str) -> RelationPrompt:
    """A few-shot prompt: lines of "query object", then the query.

    The subject is looked for at the last place the template gives it, which is its last occurrence in the text unless
    the template's own words repeat it.
    """
    lines = [f"{query_text(template, fact.subject)} {fact.object}" for fact in examples]
    before = template[: template.rindex(PLACEHOLDER)]
    text = "\n".join([*lines, query_text(template, subject)])
    start = len(text) - len(query_text(template, subject)) + len(query_text(before, subject))
    return RelationPrompt(
        text=text, ids=tokens.encode(text), subject_tokens=tokens.positions(text, start, start + len(subject))
    )


def align(relation: Relation, tokens: Tokens) -> tuple[Fact, ...]:
    """The facts of the most common (subject, query, line) length; of equally common ones the shortest."""
    by_length: dict[tuple[int, int, int], list[Fact]] = {}
    for fact in relation.facts:
        prompt = make_prompt(tokens, relation.template, (), fact.subject)
        line = tokens.encode(f"{prompt.text} {fact.object}")
        by_length.setdefault((len(prompt.subject_tokens), len(prompt.ids), len(line)), []).append(fact)
    lengths = min(by_length, key=lambda key: (-len(by_length[key]), key))
    return tuple(by_length[lengths])


def long_objects(relation: Relation, tokens: Tokens) -> list[Problem]:
    """A note on the objects of several tokens: of those only the first token can be compared."""
    queries = [(fact, query_text(relation.template, fact.subject)) for fact in relation.facts]
    lengths = [len(tokens.encode(f"{query} {fact.object}")) - len(tokens.encode(query)) for fact, query in queries]
    long = [fact for fact, length in zip(relation.facts, lengths, strict=True) if length > 1]
    if not long:
        return []
    place = f"objects such as {long[0].object!r} of {long[0].subject!r}"
    message = f"{len(long)} of {len(relation.facts)} have several tokens; only the first is compared"
    return [Problem(relation.path, place, message)]


def split_facts(facts: Sequence[Fact], n_train: int, seed: int) -> FactSplit:
    """Shuffle, then take objects in turn, so that training covers as many of them as it can (as LRE's code does)."""
    order = list(facts)
    random.Random(seed).shuffle(order)
    by_object: dict[str, list[Fact]] = {}
    for fact in order:
        by_object.setdefault(fact.object, []).append(fact)
    turns = max(map(len, by_object.values()), default=0)
    covering = [group[turn] for turn in range(turns) for group in by_object.values() if turn < len(group)]
    return FactSplit(tuple(covering[:n_train]), tuple(covering[n_train:]))


def training_prompts(
    tokens: Tokens, template: str, train: Sequence[Fact], *, with_all: bool = False
) -> list[RelationPrompt]:
    """For each training fact its query after the other m - 1 facts, or after all m."""
    return [
        make_prompt(tokens, template, [other for other in train if with_all or other is not fact], fact.subject)
        for fact in train
    ]


def testing_prompts(tokens: Tokens, template: str, split: FactSplit, *, with_all: bool = False) -> list[RelationPrompt]:
    """For each test fact its query after the first m - 1 training facts, or all: the length is that of training."""
    examples = split.train if with_all else split.train[:-1]
    return [make_prompt(tokens, template, examples, fact.subject) for fact in split.test]


# Scores --------------------------------------------------------------------------------------------------------------


def is_prefix_match(said: str, expected: str) -> bool:
    """Whether a token, stripped and in lower case, is a non-empty beginning of the object (LRE's faithfulness)."""
    said, expected = said.strip().lower(), expected.strip().lower()
    return bool(said) and expected.startswith(said)


def chance(answers: Sequence[int]) -> float:
    r"""$\sum_o (n_o/n)^2$: how often a guess drawn from the answers themselves is right."""
    return sum(count**2 for count in Counter(answers).values()) / max(len(answers), 1) ** 2


def majority(answers: Sequence[int]) -> float:
    """The share of the most common answer: what the best constant guess scores. Never below `chance`."""
    return max(Counter(answers).values(), default=0) / max(len(answers), 1)
