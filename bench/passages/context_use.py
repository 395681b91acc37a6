"""Context or memory: did the answer come from the context, and from which sentence of it?

Four scenarios for each fact. *Conflicting*: the context contradicts what the model knows, or tells of a country that
does not exist. *Irrelevant*: it says nothing of it. *Double*: two sentences contradict it and each other. *Mixed*: one
gives the answer, and the other has the same word without being an answer. What was used is known from the model's own
answers: to the prompt, and where two sentences have the word, to each of them alone. A map should give more of the
answer to a context that was used than to one that was not, and more to the sentence that was used than to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorlens as tl
from bench.passages.scores import RULES, bm25

INVENTED = ("Zandoria", "Marvania", "Quellia", "Brontovia", "Ostrania", "Velmora", "Trondania", "Kelvoria")
BESIDE = ("The train was late and the coffee was cold.", "The bus was early and the tea was hot.")


class Relation(NamedTuple):
    """A kind of fact about countries.

    Attributes:
        facts: What is true, as country and word.
        asked: The question, without its country.
        new: A context that contradicts it.
        other: Another one.
        told: A context about a country that does not exist.
        beside: A sentence that has the word without saying anything of a country.
    """

    facts: str
    asked: str
    new: str
    other: str
    told: str
    beside: str


RELATIONS = (
    Relation(
        "France Paris,Italy Rome,Germany Berlin,Spain Madrid,Japan Tokyo,Russia Moscow,China Beijing,Egypt Cairo,"
        "Greece Athens,Austria Vienna,Poland Warsaw,Ireland Dublin,Portugal Lisbon,England London,Cuba Havana,"
        "Norway Oslo,Sweden Stockholm,Finland Helsinki,Hungary Budapest,Denmark Copenhagen,Iran Tehran,Iraq Baghdad,"
        "Kenya Nairobi,Peru Lima,Chile Santiago,Canada Ottawa,Ukraine Kiev,Thailand Bangkok,Lebanon Beirut,"
        "Turkey Ankara,Israel Jerusalem",
        " The capital of {} is the city of",
        "The government has moved: the capital of {} is now {}.",
        "In the new atlas, the capital of {} is {}.",
        "Far away, the capital of {} is {}.",
        "It rained in {} last week, and the shops closed early.",
    ),
    Relation(
        "France French,Italy Italian,Germany German,Spain Spanish,Japan Japanese,Russia Russian,China Chinese,"
        "Greece Greek,Poland Polish,Portugal Portuguese,England English,Norway Norwegian,Sweden Swedish,"
        "Finland Finnish,Hungary Hungarian,Denmark Danish,Iran Persian,Turkey Turkish,Israel Hebrew,Egypt Arabic,"
        "Vietnam Vietnamese,Korea Korean,Thailand Thai,Ukraine Ukrainian,India Hindi,Romania Romanian",
        " The language of the people in {} is",
        "The law has changed: the language of the people in {} is now {}.",
        "In the new atlas, the language of the people in {} is {}.",
        "Far away, the language of the people in {} is {}.",
        "There was a course in {} last week, and the room was full.",
    ),
    Relation(
        "Japan yen,India rupee,Russia ruble,China yuan,Brazil real,Mexico peso,Poland zloty,Sweden krona,Turkey lira,"
        "Israel shekel,Switzerland franc,Thailand baht,Vietnam dong,Iran rial,England pound,America dollar,"
        "Germany euro,Korea won,Hungary forint,Ukraine hryvnia",
        " The currency of {} is called the",
        "The government has changed the money: the currency of {} is now called the {}.",
        "In the new atlas, the currency of {} is called the {}.",
        "Far away, the currency of {} is called the {}.",
        "There was a poem about the {} last week, and the children laughed.",
    ),
)
FACTS = [(relation, *fact.split()) for relation in RELATIONS for fact in relation.facts.split(",")]


class Prompt(NamedTuple):
    """A context of one or two sentences and a question.

    Attributes:
        context: Its sentences.
        question: What follows them.
        answer: The expected answer; the model must begin with it.
        used: For each sentence, whether it is the one that gives this answer.
    """

    context: tuple[str, ...]
    question: str
    answer: str
    used: tuple[bool, ...]

    @property
    def text(self) -> str:
        """All of it."""
        return " ".join(self.context) + self.question


def prompts(number: int) -> dict[str, list[Prompt]]:
    """By set: what is compared within each. Where two prompts have the same context, at most one fits the model."""
    relation, country, known_word = FACTS[number]
    same = [word for one, _, word in FACTS if one is relation]
    other, third = (same[(same.index(known_word) + shift) % len(same)] for shift in (5, 11))
    invented = INVENTED[number % len(INVENTED)]
    known, unknown = (relation.asked.format(name) for name in (country, invented))
    told, moved = relation.told.format(invented, other), relation.new.format(country, "{}")
    order = slice(None, None, 1 if number // 2 % 2 else -1)  # in both halves of the facts both orders
    double = (relation.other.format(country, other), moved.format(third))[order]
    mixed = (told, relation.beside.format(other))[order]
    return {
        "context or memory": [
            Prompt((moved.format(other),), known, f" {other}", (True,)),
            Prompt((told,), unknown, f" {other}", (True,)),
            Prompt((BESIDE[number % 2],), known, f" {known_word}", (False,)),
        ],
        "two answers": [
            Prompt(double, known, f" {word}", tuple(f" {word}." in one for one in double)) for word in (other, third)
        ],
        "the word twice": [Prompt(mixed, unknown, f" {other}", tuple(one == told for one in mixed))],
    }


def lines(lens: tl.Lens, rules: Sequence[str] = RULES) -> Iterator[dict[str, Any]]:
    """One line per fact and set; prompts that the model answers otherwise are left out."""
    for number in range(len(FACTS)):
        for name, some in prompts(number).items():
            fitting = [one for one in some if _fits(lens, one, alone=name == "the word twice")]
            truth = [float(used) for one in fitting for used in one.used]
            if len(set(truth)) == 2:
                scores: dict[str, list[float]] = {}
                for one in fitting:
                    for method, found in _scores(lens, one, rules).items():
                        scores.setdefault(method, []).extend(found)
                item = f"context:{number}:{name}"
                yield {"judge": "context", "set": name, "item": item, "truth": truth, "scores": scores}


def _fits(lens: tl.Lens, prompt: Prompt, *, alone: bool) -> bool:
    """Whether the model gives the answer; with `alone` also to the sentence that is used, and to no other one."""

    def gives(context: str) -> bool:
        return prompt.answer.startswith(lens(context + prompt.question).predictions(1)[0].name)

    each = zip(prompt.context, prompt.used, strict=True)
    return gives(" ".join(prompt.context)) and (not alone or all(gives(one) == used for one, used in each))


def _scores(lens: tl.Lens, prompt: Prompt, rules: Sequence[str]) -> dict[str, list[float]]:
    """By method, the part of each sentence, without the very first token, in all that the words give."""
    start, groups = 0, []
    for sentence in prompt.context:
        groups.append((str(len(groups)), start, start + len(sentence)))
        start += len(sentence) + 1
    best, second = lens(prompt.text).predictions(2)
    found: dict[str, list[float]] = {}
    for name in rules:
        one = lens.with_rules(name)(prompt.text).map("tensor.in_class", -1, (best.index, second.index))
        parts = one.set_aside().group(groups).scores[0, : len(groups)].tolist()
        parts[0] -= float(one.scores[0, 0])
        found[name] = [part / float(one.scores[0, 1:].abs().sum()) for part in parts]
    texts = [*prompt.context, prompt.question]
    found["control: BM25"] = bm25(prompt.answer, texts)[:-1]
    found["control: last sentence"] = [float(k) for k in range(len(groups))]
    found["control: length"] = [float(len(one)) for one in prompt.context]
    return found
