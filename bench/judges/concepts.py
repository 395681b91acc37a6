"""Does the pair map of two sentences rank their shared concept first?

    python -m bench templates minilm --judge concepts --out lines.jsonl

Sentences are made from templates. Each has three nouns, and one noun of each names the same concept in another word.
All pairs of words are ranked by the size of their score. The second half has new concepts, templates and distractors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tensorlens as tl
from tensorlens.maps.groups import find_words

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
RULES = ("paper", "attn_lrp", "gim", "jacobian")
"""Encoders without gates: `half_gate` is `paper` here."""


class Pair(NamedTuple):
    """Two sentences, and the words that share a meaning."""

    first: str
    second: str
    known: tuple[str, str]


def pairs(half: int, n: int) -> Iterator[Pair]:
    """`n` pairs of each concept of a half: 0 to choose by, 1 to report."""
    draw = random.Random(half)
    beside = [words.split() for words in BESIDE[half]]
    for k in range(n):
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
    places = [list(range(one.start, one.stop)) for one in words if offsets[one.start]]
    named = [(text[offsets[some[0]][0] : offsets[some[-1]][1]].strip().lower(), some) for some in places]  # type: ignore[index]
    kept = [(word, some) for word, some in named if word]
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
    "cosine of words (BERTScore)": token_cosine,
    "products of attention rollouts": attention_products,
    "products of input × gradient": input_gradient,
}


def scores_of(lens: tl.Lens, item: Pair, a: Read, b: Read, rules: Sequence[str]) -> dict[str, Tensor]:
    """By method a score for each pair of words."""
    rows, columns = ([word for word, _ in one.words] for one in (a, b))
    found: dict[str, Tensor] = {}
    for name in rules:
        made = tl.similarity(lens.with_rules(name), item.first, item.second, pooling="mean", groups="words")
        kept = [
            [k for k, label in enumerate(labels) if label.strip().lower() in wanted]
            for labels, wanted in ((made.out_tokens, rows), (made.in_tokens, columns))
        ]
        found[f"pairs@{name}"] = made.scores[kept[0]][:, kept[1]]  # in the order of the words
    return found | {name: method(a, b) for name, method in BASELINES.items()}


def lines(lens: tl.Lens, n: int, rules: Sequence[str] = RULES) -> Iterator[dict[str, Any]]:
    """One line per pair of sentences: by method the size of the score of each pair of words."""
    lens.model.set_attn_implementation("eager")  # type: ignore[operator]
    for k, both in enumerate(zip(pairs(0, n), pairs(1, n), strict=True)):
        for half, item in enumerate(both):
            a, b = read(lens, item.first), read(lens, item.second)
            of = [(first, second) for first, _ in a.words for second, _ in b.words]
            found = scores_of(lens, item, a, b, rules)
            sizes = {
                name: [float(f"{one:.4g}") for one in some.abs().flatten().tolist()] for name, some in found.items()
            }
            line = {"judge": "concepts", "set": "pairs of sentences", "item": f"concepts:{half}:{k}"}
            yield line | {"truth": [float(one == item.known) for one in of], "scores": sizes}
