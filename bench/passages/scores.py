"""Scores for the passages of a prompt by T and by what else people use; the highest is to be the passage used.

Each takes an answer and (label, start, stop) for the passages and gives one number each, with how often the model ran:
forward passes of the whole input, and backward passes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import tensorlens as tl
from tensorlens.maps.groups import find_groups

Passages = Sequence[tuple[str, int, int]]
Scored = tuple[list[float], int, int]
Score = Callable[[tl.Lens, Any, Passages], Scored]
RULES = {
    "T (paper)": tl.Rules.paper(),
    "T, gate halved": tl.Rules(gate="half"),
    "T, AttnLRP": tl.Rules.attn_lrp(),
}
LONG = 4096
"""Tokens from which a plain backward pass runs each block again: the attention of all blocks takes 70 GB at 8,192."""
STOP = frozenset(
    re.findall(
        r"\w+", "a an and are as at be by for from i in is it its my of on or that the this to was were with you"
    )
)


def by_tensor(lens: tl.Lens, found: Any, passages: Passages, rules: tl.Rules, **options: Any) -> Scored:
    """R over the passages, the whole answer as one target; `found` is recorded again, so that its cost counts."""
    made = lens.with_rules(rules).answer(list(found.prompt.ids), list(found.ids))
    shown = made.map(_positions(found, passages), **options)
    by_label = dict(zip(shown.in_tokens, shown.scores[0].tolist(), strict=True))
    n_backward = 1 if not options.get("through") else len(found.ids)
    return [by_label[label] for label, *_ in passages], 1, n_backward


def mean_attention(lens: tl.Lens, found: Any, passages: Passages) -> Scored:
    """Attention to each passage from the positions that predict the answer, the mean of all heads and blocks."""
    model: Any = lens.model
    before = model.config._attn_implementation
    ids = torch.tensor([[*found.prompt.ids, *found.ids[:-1]]], device=model.device)
    n = len(found.prompt.ids) - 1
    with torch.no_grad():
        past = model(ids[:, :n], use_cache=True, logits_to_keep=1).past_key_values
        model.set_attn_implementation("eager")
        try:
            heads = model(ids[:, n:], past_key_values=past, output_attentions=True).attentions
        finally:
            model.set_attn_implementation(before)
    by_token = torch.stack([one[0].float().mean((0, 1)) for one in heads]).mean(0)
    return _summed(found, passages, by_token), 1, 0


def gradients(lens: tl.Lens, found: Any) -> Tensor:
    """Input × gradient of the answer's logits less their means, for each token: one ordinary backward pass."""
    model: Any = lens.model
    ids = torch.tensor([[*found.prompt.ids, *found.ids]], device=model.device)
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    with blocks_run_again(model, is_on=ids.shape[1] > LONG):
        logits = model(inputs_embeds=x, use_cache=False, logits_to_keep=len(found.ids) + 1).logits[0, :-1].float()
        chosen = logits.gather(1, ids[0, len(found.prompt.ids) :, None])[:, 0]
        (gradient,) = torch.autograd.grad((chosen - logits.mean(1)).sum(), x)
    return (gradient * x).sum(-1)[0].detach().float()


@contextmanager
def blocks_run_again(model: Any, *, is_on: bool) -> Iterator[None]:
    """Transformers' checkpointing, which wants a model in training mode; models with dropout would answer otherwise."""
    if not is_on:
        yield
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        model.eval()
        model.gradient_checkpointing_disable()


def input_gradient(lens: tl.Lens, found: Any, passages: Passages) -> Scored:
    return _summed(found, passages, gradients(lens, found)), 1, 1


def input_gradient_magnitude(lens: tl.Lens, found: Any, passages: Passages) -> Scored:
    return _summed(found, passages, gradients(lens, found).abs()), 1, 1


def recency(_lens: tl.Lens, _found: Any, passages: Passages) -> Scored:
    return [float(start) for _, start, _ in passages], 0, 0


def word_overlap(_lens: tl.Lens, found: Any, passages: Passages) -> Scored:
    """How many of the answer's words, small ones left out, stand in a passage."""
    words = set(re.findall(r"\w+", found.text.lower())) - STOP
    text = found.prompt.text
    return [float(len(words & set(re.findall(r"\w+", text[a:b].lower())))) for _, a, b in passages], 0, 0


SCORES: dict[str, Score] = {
    **{
        name: (lambda lens, found, passages, rules=rules: by_tensor(lens, found, passages, rules))
        for name, rules in RULES.items()
    },
    "T (paper), through": lambda lens, found, passages: by_tensor(
        lens, found, passages, tl.Rules.paper(), through=True
    ),
    "mean attention": mean_attention,
    "input × gradient": input_gradient,
    "size of input × gradient": input_gradient_magnitude,
    "recency": recency,
    "word overlap": word_overlap,
}


def token_groups(found: Any, passages: Passages) -> list[list[int]]:
    """The tokens of each passage, each to the one that it overlaps most."""
    meta = {"text": found.prompt.text, "offsets": [pair and list(pair) for pair in found.prompt.offsets]}
    groups = {
        one.label: one.tokens for one in find_groups(list(passages), found.tensor.tokens[: found.n_prompt_tokens], meta)
    }
    return [list(groups[label]) for label, *_ in passages]


def _positions(found: Any, passages: Passages) -> list[tuple[str, int, int]]:
    return [
        (label, some[0], some[-1] + 1)
        for (label, *_), some in zip(passages, token_groups(found, passages), strict=True)
    ]


def _summed(found: Any, passages: Passages, by_token: Tensor) -> list[float]:
    return [float(by_token[some].sum()) for some in token_groups(found, passages)]
