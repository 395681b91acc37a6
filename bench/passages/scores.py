"""Scores for the passages of a prompt, or for their tokens: T with every rule set and target, and what else people use.

The highest is to be the passage that the answer stands on. Targets: ``centred``, the sum of the answer's logits less
their means; ``raised``, the same with each token weighted by how much the context raised its log-probability;
``runner_up``, each logit less that of the likeliest other token. The first token is left out of its passage.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import tensorlens as tl
from bench.passages.items import Item
from tensorlens.answers.shares import TargetKind, make_targets, shares
from tensorlens.maps.groups import Group, find_groups

RULES = ("paper", "half_gate", "attn_lrp", "gim", "jacobian")
TARGETS: dict[str, TargetKind] = {"centred": "centred", "raised": "centred", "runner_up": "runner_up"}
"""What is explained of each token of the answer; `raised` weights the tokens."""


def scores_of(
    lens: tl.Lens,
    item: Item,
    rules: Sequence[str] = RULES,
    targets: Iterable[str] = TARGETS,
    only: int | None = None,
) -> tuple[list[float], dict[str, list[float]]]:
    """What is right, and by method a score, for each passage or token; of one token of the answer, if it is given."""
    found: dict[str, list[float]] = {}
    truth, units, weights = list[float](), list[Group](), dict[str, Tensor]()
    for name in rules:
        answer = lens.with_rules(name).answer(item.prompt, item.answer)
        if not found:
            truth, units = units_of(answer, item)
            every = torch.ones(len(answer.ids)) if only is None else torch.eye(len(answer.ids))[only]
            weights = {one: raised(lens, answer, item) if one == "raised" else every for one in targets}
            found |= {"mean attention": mean_attention(lens, answer, units, every)}
            found |= token_controls(answer, units) if item.by_token else controls(answer.text, item)
        recording, first = answer.tensor.operator.recording, answer.positions.start
        taken = {j for one in units for j in one.tokens}
        groups = [*units, Group("rest", tuple(j for j in range(len(answer.tensor.tokens)) if j not in taken))]
        for target in targets:
            made = make_targets(recording, answer.ids, first, TARGETS[target])
            row = weights[target][None].to(answer.tensor.device)
            given = shares(answer.tensor.operator, made, row, groups, "pulls")
            found[f"{name}, {target}"] = given.scores[0, : len(units)].tolist()
    return truth, found


def raised(lens: tl.Lens, answer: Any, item: Item) -> Tensor:
    """How much the context raised the log-probability of each token of the answer; 0 where it lowered it."""
    bare = lens.answer(item.after.strip(), answer.ids)
    return (torch.tensor(answer.log_probabilities) - torch.tensor(bare.log_probabilities)).clamp_min(0)


def mean_attention(lens: tl.Lens, answer: Any, groups: Sequence[Group], weights: Tensor) -> list[float]:
    """Attention to each passage from the positions that predict the answer, the mean of all heads and blocks.

    Positions are weighted as the tokens that they predict.

    Of a model with an encoder, that of its decoder to the encoder's states.
    """
    model: Any = lens.model
    before, prompt = model.config._attn_implementation, answer.prompt
    ids, n = torch.tensor([[*prompt.ids, *answer.ids[:-1]]], device=model.device), prompt.n_encoder
    past = None
    try:
        with torch.no_grad():
            if not n:
                n = len(prompt.ids) - 1
                past = model(ids[:, :n], use_cache=True, logits_to_keep=1).past_key_values
            model.set_attn_implementation("eager")
            if past is None:
                given = model(ids[:, :n], decoder_input_ids=ids[:, n:], output_attentions=True)
                heads = [one[:, :, len(prompt.decoder_ids) - 1 :] for one in given.cross_attentions]
            else:
                heads = model(ids[:, n:], past_key_values=past, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    by_token = (weights / weights.sum()).to(model.device) @ torch.stack([one[0].float().mean(0) for one in heads]).mean(
        0
    )
    return [float(by_token[list(group.tokens)].sum()) for group in groups]


def controls(answer: str, item: Item) -> dict[str, list[float]]:
    """What needs no model: retrieval by the answer, and the place."""
    return {
        "control: BM25": bm25(answer, item.passages),
        "control: last passage": [float(k) for k in range(len(item.passages))],
        "control: length": [float(len(one)) for one in item.passages],
    }


def token_controls(answer: Any, tokens: Sequence[Group]) -> dict[str, list[float]]:
    """The same for tokens: those that the answer has too, and the latest."""
    ids, own = answer.prompt.ids, set(answer.ids)
    return {
        "control: words of the answer": [float(ids[one.tokens[0]] in own) for one in tokens],
        "control: last token": [float(k) for k in range(len(tokens))],
    }


def bm25(query: str, passages: Sequence[str], k1: float = 1.2, b: float = 0.75) -> list[float]:
    r"""Okapi BM25, $\sum_w \mathrm{idf}_w f_w (k_1 + 1) / (f_w + k_1 (1 - b + b n / \bar n))$."""
    texts = [Counter(_words(one)) for one in passages]
    lengths = [sum(one.values()) for one in texts]
    mean, found = sum(lengths) / len(lengths), [0.0] * len(texts)
    for word in set(_words(query)):
        n = sum(word in one for one in texts)
        idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
        for k, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            found[k] += idf * text[word] * (k1 + 1) / (text[word] + k1 * (1 - b + b * length / mean))
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def units_of(answer: Any, item: Item) -> tuple[list[float], list[Group]]:
    """What is ranked, the passages or their tokens, and which of it is right."""
    of = [
        (k, one)
        for k, group in enumerate(passages_of(answer, item))
        for one in ([(j,) for j in group.tokens] if item.by_token else [group.tokens])
    ]
    return [float(k == item.right) for k, _ in of], [Group(str(i), tokens) for i, (_, tokens) in enumerate(of)]


def passages_of(answer: Any, item: Item) -> list[Group]:
    """The tokens of each passage without the very first token."""
    meta = {"text": answer.prompt.text, "offsets": [pair and list(pair) for pair in answer.prompt.offsets]}
    made = find_groups(item.groups(), answer.tensor.tokens[: answer.n_prompt_tokens], meta)
    by_label = {one.label: one for one in made}
    groups = [by_label[label] for label, *_ in item.groups()]
    return [one._replace(tokens=tuple(j for j in one.tokens if j)) for one in groups]
