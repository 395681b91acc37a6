"""Titles: from which word of a text does a model that writes titles have a word of its title?

Of every title, each word that also stands in the text, once in both and of five letters or more, is explained on its
own, by its first token. All words of the text of that length are ranked; the same word is the right one.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorlens as tl
from bench.passages.items import Item, sentences_of
from bench.passages.scores import scores_of

LONG = 5
"""Letters of a word that is ranked: shorter ones are in most texts and titles."""


class Copied(NamedTuple):
    """A word of a title: its number among the words of the text, and the number of its first token in the title."""

    word: int
    token: int


def copied(words: Sequence[str], title: str, offsets: Sequence[tuple[int, int]]) -> list[Copied]:
    """The words of a title that were copied from a text of these words; a token of the title for each of `offsets`."""
    in_text, spans = Counter(map(_plain, words)), list(re.finditer(r"\S+", title))
    in_title = Counter(_plain(one[0]) for one in spans)
    found = []
    for span in spans:
        plain = _plain(span[0])
        if len(plain) >= LONG and in_text[plain] == in_title[plain] == 1:
            token = next(k for k, (_, stop) in enumerate(offsets) if stop > span.start())
            found.append(Copied([_plain(one) for one in words].index(plain), token))
    return found


def _plain(word: str) -> str:
    return re.sub(r"\W", "", word.lower())


def lines(
    lens: tl.Lens, text: Path, n: int, rules: Sequence[str], targets: Sequence[str], seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A line for each copied word in the titles of `n` sentences of a text, without the first words of sentences."""
    drawn = random.Random(seed).sample(sentences_of(text), n)
    for number, sentence in enumerate(drawn):
        answer, words = lens.answer(sentence, max_new_tokens=24), tuple(sentence.split())
        made = lens.processor(answer.text, add_special_tokens=False, return_offsets_mapping=True)
        if made["input_ids"] != list(answer.ids[: len(made["input_ids"])]):
            continue  # its tokens are not those of its text
        ranked = [k for k, word in enumerate(words) if k and len(_plain(word)) >= LONG]
        for one in copied(words, answer.text, made["offset_mapping"]):
            if one.word in ranked:
                name = f"{number}:{one.word}"
                item = Item(
                    judge="titles",
                    set="sentences",
                    name=name,
                    before="",
                    passages=words,
                    after="",
                    answer=answer.ids,
                    right=one.word,
                )
                truth, scores = scores_of(lens, item, rules, targets, only=one.token)
                kept = {key: [float(f"{some[k]:.5g}") for k in ranked] for key, some in scores.items()}
                line = {"judge": "titles", "set": "sentences", "item": f"titles:{name}"}
                yield line | {"truth": [truth[k] for k in ranked], "scores": kept}
