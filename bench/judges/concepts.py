"""Does the pair map of two sentences rank their shared concept first?

    python -m bench.judges.concepts minilm [--limit N] [--rules paper,jacobian] [--out FILE]

Sentences are made from templates. Each has three nouns, and one noun of each names the same concept in another word.
All pairs of words are ranked by the size of their score. The second half has new concepts, templates and distractors.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

import tensorlens as tl
from bench.tables import markdown
from tensorlens.files import write_json
from tensorlens.maps.groups import find_words
from tensorlens.studies.report import interval

CONCEPTS = (
    (
        "guitar violin,dog puppy,doctor physician,car automobile,ocean sea,house cottage,money cash,bread toast,"
        "train railway,king monarch,rain storm,book novel,teacher professor,coffee espresso,child toddler,ship boat,"
        "winter snow,lawyer attorney,movie film,forest woods"
    ),
    (
        "wine champagne,soldier warrior,mountain hill,river stream,jacket coat,sofa couch,priest bishop,cow cattle,"
        "thief burglar,lamp lantern,stone rock,road street,rifle gun,jewel diamond,village town,shoe boot,cake pastry,"
        "judge court,plane aircraft,farmer harvest"
    ),
)
FIRST = (
    (
        "Near the {1} and the {2} we noticed a {0} yesterday.",
        "My uncle sold his {0} together with a {1} and a {2}.",
        "A {1} stood beside the {0}, and behind it a {2}.",
    ),
    (
        "Everybody forgot the {1}, the {0} and even the {2}.",
        "She drew a {2} first, later a {1}, and finally a {0}.",
        "The {0} was found last week under a {1} and a {2}.",
    ),
)
SECOND = (
    (
        "They talked about the {0}, the {1} and the {2} for hours.",
        "Nobody expected a {1}, a {2} or a {0} in that corner.",
        "He asked whether the {2}, the {0} or the {1} was missing.",
    ),
    (
        "I dreamed of a {1}, of a {0}, and of some {2}.",
        "You will need the {0} as well as the {2} and the {1}.",
        "Only the {2} and the {1} were older than the {0}.",
    ),
)
BESIDE = (
    ("bottle ladder pencil carpet window basket candle hammer mirror button", "tunnel blanket wallet helmet scissors"),
    ("ribbon kettle magnet parcel saddle curtain pillow needle bucket shovel", "ticket engine shelf garden umbrella"),
)
MEMBERS = ("paper", "cp_lrp", "attn_lrp", "jacobian")
"""Encoders without gates: `half_gate` is `paper` here."""
PER_CONCEPT = 10


class Pair(NamedTuple):
    """Two sentences, and the words that share a meaning."""

    first: str
    second: str
    known: tuple[str, str]


def pairs(half: int) -> Iterator[Pair]:
    """The 200 pairs of a half: 0 to choose by, 1 to report."""
    draw = random.Random(half)
    beside = [words.split() for words in BESIDE[half]]
    for k in range(PER_CONCEPT):
        for concept in CONCEPTS[half].split(","):
            a, b = concept.split()
            first = draw.choice(FIRST[half]).format(a, *draw.sample(beside[0], 2))
            second = draw.choice(SECOND[half]).format(b, *draw.sample(beside[1], 2))
            yield Pair(first, second, (a, b)) if k % 2 == 0 else Pair(second, first, (b, a))


# Scores of words ------------------------------------------------------------------------------------------------------


class Read(NamedTuple):
    """One sentence as the model reads it: its words by tokens, states, attention and embeddings."""

    words: list[tuple[str, list[int]]]
    states: Tensor
    attention: list[Tensor]
    inputs: Tensor


def read(lens: tl.Lens, text: str) -> Read:
    """One plain pass, with gradients of the embeddings."""
    made = lens.processor(text, return_tensors="pt", return_offsets_mapping=True)
    offsets = [[a, b] if b > a else None for a, b in made.pop("offset_mapping")[0].tolist()]
    labels = lens.processor.convert_ids_to_tokens(made["input_ids"][0].tolist())
    words = find_words(labels, {"text": text, "offsets": offsets})
    kept = [(one.label.strip(), list(range(one.start, one.stop))) for one in words if offsets[one.start]]
    inputs = lens.model.get_input_embeddings()(made["input_ids"]).detach().requires_grad_()
    given = lens.model(inputs_embeds=inputs, attention_mask=made["attention_mask"], output_attentions=True)
    return Read(kept, given.last_hidden_state[0], [one[0].mean(0) for one in given.attentions], inputs)


def by_word(values: Tensor, words: list[tuple[str, list[int]]]) -> Tensor:
    """Sums over the tokens of each word."""
    return torch.stack([values[tokens].sum(0) for _, tokens in words])


def token_cosine(a: Read, b: Read) -> Tensor:
    """Cosines of the words' last states, as BERTScore compares tokens."""
    first, second = (torch.nn.functional.normalize(by_word(one.states, one.words), dim=-1) for one in (a, b))
    return first @ second.T


def attention_products(a: Read, b: Read) -> Tensor:
    """Products of what attention, rolled out, brings of each word into the mean."""

    def rolled(one: Read) -> Tensor:
        eye = torch.eye(len(one.states))
        whole = eye
        for attention in one.attention:
            whole = (0.5 * attention + 0.5 * eye) @ whole
        return by_word(whole.mean(0), one.words)

    return rolled(a)[:, None] * rolled(b)[None]


def input_gradient(a: Read, b: Read) -> Tensor:
    """Products of input times gradient of the cosine, word by word."""
    cosine = torch.cosine_similarity(a.states.mean(0), b.states.mean(0), dim=0)
    gradients = torch.autograd.grad(cosine, (a.inputs, b.inputs))
    first, second = ((g * x.inputs)[0].sum(-1) for g, x in zip(gradients, (a, b), strict=True))
    return by_word(first, a.words)[:, None] * by_word(second, b.words)[None]


BASELINES: Mapping[str, Callable[[Read, Read], Tensor]] = {
    "token cosine (BERTScore-like)": token_cosine,
    "attention products": attention_products,
    "input × gradient products": input_gradient,
}


def rank(scores: Tensor, rows: list[str], columns: list[str], known: tuple[str, str]) -> int:
    """The place of the known pair by size, 1 for the first."""
    size = scores.detach().abs()
    place = size[rows.index(known[0]), columns.index(known[1])]
    return 1 + int((size > place).sum())


def ranks(lens: tl.Lens, items: list[Pair], members: tuple[str, ...]) -> dict[str, list[int]]:
    """By method the rank of each known pair, all among the same words."""
    found: dict[str, list[int]] = {}
    ours = {name: lens.with_rules(name) for name in members}
    for item in items:
        a, b = read(lens, item.first), read(lens, item.second)
        rows, columns = ([word for word, _ in one.words] for one in (a, b))
        for name, one in ours.items():
            made = tl.similarity(one, item.first, item.second, pooling="mean", groups="words")
            kept = [
                [k for k, label in enumerate(labels) if label.strip() in wanted]
                for labels, wanted in ((made.out_tokens, rows), (made.in_tokens, columns))
            ]
            scores = made.scores[kept[0]][:, kept[1]]  # in the order of the words
            title = f"pair map, {name}" + (" (as BiLRP)" if name == "jacobian" else "")
            found.setdefault(title, []).append(rank(scores, rows, columns, item.known))
        for name, method in BASELINES.items():
            found.setdefault(name, []).append(rank(method(a, b), rows, columns, item.known))
    return found


def table(found: Mapping[str, list[int]]) -> list[dict[str, str]]:
    """First places and mean reciprocal ranks, with 95 % bootstrap intervals of the latter."""
    draw, rows = np.random.default_rng(0), []
    for name, places in found.items():
        inverse = 1 / np.array(places)
        means = draw.choice(inverse, (2000, len(inverse))).mean(1)
        low, high = interval(means)
        first = f"{100 * np.mean(np.array(places) == 1):.0f} %"
        rows.append(
            {"method": name, "first": first, "mean reciprocal rank": f"{inverse.mean():.2f} [{low:.2f}, {high:.2f}]"}
        )
    return sorted(rows, key=lambda row: row["mean reciprocal rank"], reverse=True)


def main() -> None:
    """Print a table for each half; write both into a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--rules", default=",".join(MEMBERS))
    parser.add_argument("--out", type=Path)
    asked: Any = parser.parse_args()
    lens, members = tl.load(asked.model, attention="eager"), tuple(asked.rules.split(","))
    tables = {}
    for half, name in enumerate(("to choose by", "held out")):
        items = list(pairs(half))[: asked.limit]
        tables[name] = table(ranks(lens, items, members))
        print(f"\n{asked.model}, {name}, {len(items)} pairs\n\n{markdown(tables[name])}", flush=True)
    if asked.out is not None:
        versions = {one.__name__: one.__version__ for one in (torch, transformers)}
        record = {"model": asked.model, "device": "CPU", "versions": versions, "pairs": len(items), "tables": tables}
        write_json(asked.out, record)


if __name__ == "__main__":
    main()
