"""Edits whose reason is known: because of which word does a corrector of English change another one?

    python -m bench templates distilbert-edits --judge edits --out lines.jsonl

Sentences with one mistake are made by template: the word to be changed and the word that decides are marked, and the
rest is drawn at random. The other words are ranked, for the edit at the changed word rather than none. Sentences in
which the model makes another edit are left out. Templates are never split between the halves.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorlens as tl
from bench.judges.reactions import scores_of
from bench.passages.scores import RULES
from tensorlens.errors import InputError

TEMPLATES = {
    "they have": ("In the {place} «they» {adverb} ‹has› a {thing} for {name}.", "$REPLACE_have"),
    "children have": ("The «children» at the {place} ‹has› a new {thing}.", "$REPLACE_have"),
    "has gone": ("My {kin} «has» {adverb} ‹went› to the {place} {time}.", "$REPLACE_gone"),
    "have taken": ("They «have» {adverb} ‹took› the {thing} to the {place}.", "$REPLACE_taken"),
    "larger than": ("{name} told us {time} that the {thing} is «{larger}» ‹then› the {place}.", "$REPLACE_than"),
    "more than": ("My {kin} was «more» careful {time} ‹then› {name} in the {place}.", "$REPLACE_than"),
    "you're late": ("{name} told me {time} that ‹your› «{right}» in the {place}.", "$REPLACE_you're"),
    "it's raining": ("{name} told my {kin} {time} that ‹its› «{raining}» in the {place}.", "$REPLACE_it's"),
    "their car": ("{name} said that they sold ‹there› «{thing}» {time}.", "$REPLACE_their"),
    "your house": ("{name} saw ‹you're› «{thing}» in the {place} {time}.", "$REPLACE_your"),
    "there is": ("{name} told my {kin} that ‹their› «is» a {thing} in the {place}.", "$REPLACE_there"),
    "too big": ("The {thing} of my {kin} was ‹to› «{big}» for the {place}.", "$REPLACE_too"),
    "he doesn't": ("In the {place} «he» ‹don't› like the {thing} of {name}.", "$REPLACE_doesn't"),
    "wonders whether": ("My {kin} «wonders» {time} ‹weather› {name} is in the {place}.", "$REPLACE_whether"),
}
"""By name; « and » mark the word that decides, ‹ and › the one to be changed; and the right edit."""
WORDS = {
    "name": "Anna,Tom,Peter,Maria,Lucas,Emma,David,Sarah,Paul,Laura",
    "place": "garden,school,station,market,library,park,museum,village",
    "thing": "car,house,boat,garden,dog,camera,piano,bicycle",
    "adverb": "often,never,still,always,probably,certainly,also,already",
    "time": "on Monday,last week,in the morning,after dinner,at the weekend,before the meeting",
    "kin": "uncle,sister,neighbour,teacher,friend,doctor,brother,manager",
    "larger": "better,larger,older,faster,cheaper,smaller",
    "right": "right,late,welcome,wrong,happy",
    "raining": "raining,snowing,cold,late,dark",
    "big": "big,small,expensive,heavy,old",
}
METHODS = (
    *("mean.attn", "rollout.attn", "mean.w_attn_res_ln", "alti", "gradient.integrated"),
    *("control.position", "control.embedding_norm"),
)


class Mistake(NamedTuple):
    """A sentence, where its words are, which of them decides and which is wrong, and the right edit."""

    template: str
    text: str
    words: tuple[tuple[int, int], ...]
    decides: tuple[bool, ...]
    wrong: tuple[int, int]
    edit: str


def mistakes(n: int, seed: int = 0) -> Iterator[Mistake]:
    """So many of each template; the word to be changed is not among the words."""
    for name, (template, edit) in TEMPLATES.items():
        draw = random.Random(f"{seed} {name}")
        for _ in range(n):
            marked = template.format(**{slot: draw.choice(some.split(",")) for slot, some in WORDS.items()})
            parts = re.split("[«»‹›]", marked)
            kinds = [mark for mark, part in zip(" " + re.sub("[^«»‹›]", "", marked), parts, strict=True) for _ in part]
            text = "".join(parts)
            spans = [found.span() for found in re.finditer(r"[\w']+", text)]
            (wrong,) = (span for span in spans if kinds[span[0]] == "‹")
            words = tuple(span for span in spans if span != wrong)
            yield Mistake(name, text, words, tuple(kinds[start] == "«" for start, _ in words), wrong, edit)


def lines(lens: tl.Lens, n: int, rules: Sequence[str] = RULES, methods: Sequence[str] = METHODS) -> Iterator[Any]:
    """One line per sentence that the model corrects as expected: by method a score for each other word."""
    names = list(TEMPLATES)
    for k, one in enumerate(mistakes(n)):
        offsets = lens.prepare(one.text).offsets
        if offsets is None:
            raise InputError("This tokenizer does not report where its tokens are in the text, so words are not known.")
        *units, changed = (
            [token for token, pair in enumerate(offsets) if pair and pair[0] < stop and start < pair[1]]
            for start, stop in (*one.words, one.wrong)
        )
        best, *others = lens(one.text).predictions(len(lens.model.config.id2label), changed[0])  # type: ignore[union-attr, arg-type]
        if best.name == one.edit:
            target = (best.index, next(other.index for other in others if other.name == "$KEEP"))
            middle = sum(one.wrong) / 2
            scores = {"control.nearest": [-abs(sum(span) / 2 - middle) for span in one.words]}
            scores |= scores_of(lens, one.text, units, rules, methods, changed[0], target)
            item = f"edits:{names.index(one.template)}:{k}"
            yield {"judge": "edits", "set": one.template, "item": item, "truth": list(map(float, one.decides))} | {
                "scores": scores
            }
