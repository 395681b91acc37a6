"""Prompts with sentences hidden in other text: needles that an answer stands on, decoys, injected instructions."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorlens.maps.groups import sentences

DECOYS = (
    'The crossword of that week had the entry "{}" in its last row.',
    'Somebody had written "{}" on the back of an old envelope.',
    'A list of phrases that are hard to translate begins with "{}".',
    'The choir was asked to say "{}" three times to warm up.',
)
"""Sentences that hold the words of an answer without being where it comes from."""

INSTRUCTION = "Read the text, then answer the question with words of the text, in one short sentence."


@dataclass(frozen=True)
class Item:
    """A question about sentences, some of which hold the answer."""

    name: str
    question: str
    sentences: tuple[str, ...]
    needles: dict[int, str]  # where a needle stands, and the words that show that the answer used it
    decoys: tuple[int, ...]
    n_tokens: int  # of prompt and answer, about

    @property
    def context(self) -> str:
        return " ".join(self.sentences)

    def passages(self, text: str) -> list[tuple[str, int, int]]:
        """Each sentence as a group of characters of the prompt."""
        start, found = text.index(self.context), []
        for k, sentence in enumerate(self.sentences):
            found.append((f"s{k}", start, start + len(sentence)))
            start += len(sentence) + 1
        return found

    def messages(self) -> list[dict[str, str]]:
        content = f"{INSTRUCTION}\n\n{self.context}\n\nQuestion: {self.question}"
        return [{"role": "user", "content": content}]

    def used(self, answer: str) -> list[int]:
        """The needles whose words stand in an answer."""
        return [k for k, words in self.needles.items() if words.lower() in answer.lower()]


def filler(wikitext: Path) -> list[str]:
    """Sentences of WikiText, without headings and without much that the tokenizer of old left behind."""
    found = []
    for line in wikitext.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.strip().startswith("="):
            plain = line.strip().replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".")
            for mark in ",.;:!?)":
                plain = plain.replace(f" {mark}", mark)
            plain = plain.replace("( ", "(").replace(" 's", "'s")
            found += [
                span.label for span in sentences(plain) if 40 < len(span.label) < 260 and "<unk>" not in span.label
            ]
    return found


def items(folder: Path, wikitext: Path, kind: str, n: int, tokenizer: Any, n_tokens: int, seed: int = 0) -> list[Item]:
    """Items of about `n_tokens` tokens in all; every second one has a decoy."""
    random_ = random.Random(f"{kind} {n_tokens} {seed}")
    rows = json.loads((folder / f"{kind}.json").read_text())
    random_.shuffle(rows)
    text = filler(wikitext)
    return [
        _item(f"{kind}-{n_tokens}-{k}", row, text, random_, k % 2 == 1, tokenizer, n_tokens)
        for k, row in enumerate(rows[:n])
    ]


def _item(
    name: str, row: dict[str, Any], text: list[str], random_: random.Random, decoy: bool, tokenizer: Any, n_tokens: int
) -> Item:
    hidden = list(zip(row["needles"], row["gt_answers"], strict=True))
    extra = [random_.choice(DECOYS).format(row["gt_answers"][0])] if decoy else []
    room = n_tokens - 80 - 48  # the instruction and the template; the answer
    room -= sum(len(tokenizer(one)["input_ids"]) for one in (row["question"], *row["needles"], *extra))
    start, chosen = random_.randrange(len(text)), []
    while room > 0 and len(chosen) < len(text):
        sentence = text[(start + len(chosen)) % len(text)]
        room -= len(tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
        chosen.append(sentence)
    marked: list[tuple[str, str | None]] = [(sentence, None) for sentence in chosen[:-1]]
    for sentence, words in [*hidden, *((one, "") for one in extra)]:
        marked.insert(random_.randrange(len(marked) + 1), (sentence, words))
    return Item(
        name=name,
        question=row["question"],
        sentences=tuple(sentence for sentence, _ in marked),
        needles={k: words for k, (_, words) in enumerate(marked) if words},
        decoys=tuple(k for k, (_, words) in enumerate(marked) if words == ""),
        n_tokens=n_tokens,
    )
